"""The options that XLA compiles workers' programs with: the one place that names them. JAX need not be there yet.

XLA's CPU compiler has oneDNN's convolutions within it, and calls them if asked: 8 to 30 times faster than its own in
three dimensions, and in two with few channels (docs/benchmarks.md). `dj.jit` asks for each program, and `python -m
distdl_jax` for all of a job's by XLA_FLAGS, which `jax.jit` has then, too.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from distdl_jax.settings import current_settings, read_settings

log = logging.getLogger("distdl_jax")

ONEDNN = "xla_cpu_experimental_onednn_custom_call"

FIRST_JAXLIB = (0, 11)
"""The first jaxlib that does what it is asked for."""

_asked_for = ContextVar("asked_for", default=False)


@cache
def known_options() -> tuple[str, ...]:
    """Return the switches that the installed jaxlib has, and that make programs faster on CPUs.

    XLA ends the process at a flag that it does not know, so the library itself is looked at, which takes some 20 ms.
    """
    try:
        numbers = tuple(int(part) for part in version("jaxlib").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return ()
    package = find_spec("jaxlib")
    if numbers < FIRST_JAXLIB or package is None or package.origin is None:
        return ()
    for library in sorted(Path(package.origin).parent.glob("libjax_common.*")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(ONEDNN.encode()) >= 0:
                return (ONEDNN,)
    return ()


def options_for(platform: str) -> dict[str, bool]:
    """Return the options for `jax.jit` of a program on `platform`, without those of which XLA_FLAGS says something."""
    if platform != "cpu" or not current_settings().compiler_options:
        return {}
    given = os.environ.get("XLA_FLAGS", "")
    return {name: True for name in known_options() if not _told_of(name, given)}


def flags_for(environment: Mapping[str, str]) -> str:
    """Return XLA_FLAGS with the options, for a process on CPUs that is about to start in `environment`."""
    given = environment.get("XLA_FLAGS", "")
    if not read_settings(environment).settings.compiler_options:
        return given
    return " ".join([given, *(f"--{name}=true" for name in known_options() if name not in given)]).strip()


def convolves_by_onednn() -> bool:
    """Return whether XLA has been asked for oneDNN's convolutions in the program that is being traced."""
    return _asked_for.get() or f"{ONEDNN}=true" in os.environ.get("XLA_FLAGS", "")


@contextmanager
def compiling_with(options: Mapping[str, object]) -> Iterator[None]:
    """Trace a program that is then compiled with `options`."""
    token = _asked_for.set(str(options.get(ONEDNN, False)).lower() == "true")
    try:
        yield
    finally:
        _asked_for.reset(token)


@cache
def _told_of(name: str, flags: str) -> bool:
    if name not in flags:
        return False
    if f"--{name}=true" not in flags.split():
        log.info("XLA_FLAGS has %s, which stays as it is.", name)
    return True
