"""What all tests share: the launcher, which runs them in MPI worlds (README.md), and their settings."""

import os
import signal
import sys
from importlib.metadata import version

import compiled_once
import contexts
import pytest
from launcher import mpiexec, settings

pytest_plugins = ["launcher.plugin"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "primitives: part of the selection that is also run under a second MPI")
    config.addinivalue_line("markers", "gpu: part of the selection that runs on a GPU with DISTDL_JAX_TEST_GPU=1")
    if not config.option.in_world:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell
            signal.signal(signal.SIGINT, signal.default_int_handler)
        settings.set_up_plain(os.environ)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Share contexts, and the compiled programs of threads, where tests call dj.simulate or are simulated."""
    if "jax" in sys.modules and not settings.long_run():
        contexts.keep()
        if session.config.option.world_threads or not session.config.option.in_world:
            compiled_once.begin()


def pytest_report_header() -> list[str]:
    from mpi4py import MPI  # loads the library, and does not start it

    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "mpi4jax", "mpi4py"))
    return [versions, f"{MPI.Get_library_version().splitlines()[0].strip()}; mpiexec: {mpiexec.find()}"]
