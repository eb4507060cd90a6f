"""What the tests ask of the launcher, which runs them in MPI worlds of several sizes; see docs/testing.md."""

import os
import signal
import sys
from collections.abc import Callable, MutableMapping
from importlib.metadata import version
from typing import TYPE_CHECKING

import compiled_once
import contexts
import pytest
from jobs import FAST_TO_COMPILE
from launcher.settings import long_run

if TYPE_CHECKING:
    from distdl_jax.transports.threads.workers import Workers

pytest_plugins = ["launcher.plugin"]

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "JAX_TRACEBACK_FILTERING": "off",  # a failure shows the library's frames, too
    "OPENBLAS_NUM_THREADS": "1",  # else each import of numpy has its threads spin, for a third of what it takes
}


def with_flags(flags: str, *more: str) -> str:
    """Return XLA's flags, with those of `more` that the user has not set."""
    return " ".join([*flags.split(), *(flag for flag in more if flag.split("=")[0] not in flags)])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "primitives: part of the selection that is also run under a second MPI")
    config.addinivalue_line("markers", "gpu: part of the selection that runs on a GPU with DISTDL_JAX_TEST_GPU=1")
    if config.option.in_world:
        return  # see below
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background; tests send it to their programs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), *FAST_TO_COMPILE)


def pytest_world_environment(environment: MutableMapping[str, str], size: int) -> None:
    """Set the CPU, float64 and one thread. What runs on one worker alone is compiled as users compile it."""
    # NPROC is the size of XLA's thread pool; the flag below alone does not limit it in jaxlib 0.10.
    for name, value in {**SETTINGS, "NPROC": "1", "OMP_NUM_THREADS": "1"}.items():
        environment.setdefault(name, value)
    flags = " ".join(flag for flag in environment.get("XLA_FLAGS", "").split() if flag not in FAST_TO_COMPILE)
    fast = FAST_TO_COMPILE if size > 1 else []
    environment["XLA_FLAGS"] = with_flags(flags, "--xla_cpu_multi_thread_eigen=false", *fast)


def pytest_world_start() -> None:
    """Import MPI before the first test."""
    import mpi4py.MPI  # noqa: F401


def pytest_world_settle() -> None:
    """Wait for asynchronous dispatch, so that a hang behind it belongs to its own test."""
    if "jax" in sys.modules:
        sys.modules["jax"].effects_barrier()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Share contexts and compiled programs in this process too: its tests call dj.simulate themselves."""
    if "jax" not in sys.modules or long_run():
        return
    contexts.keep()
    if not session.config.option.in_world:
        compiled_once.begin()


_workers: "dict[int, Workers]" = {}


def pytest_world_simulate(size: int, test: Callable[[], object]) -> None:
    """Run the test on workers that stay from test to test, with what they have compiled, as in MPI worlds."""
    from distdl_jax.transports.threads.workers import Workers

    if not long_run():
        compiled_once.begin()
    workers = _workers.pop(size, None) or Workers(size)
    workers.run(test)
    _workers[size] = workers  # not where it failed


def pytest_report_header(config: pytest.Config) -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "mpi4jax"))
