"""The options that XLA compiles workers' programs with: the one place that names them. JAX need not be there yet.

XLA's CPU compiler has oneDNN within it, from jaxlib 0.11 on, and calls it for convolutions if asked: 8 to 30 times
faster than its own in three dimensions, and in two with few channels (docs/benchmarks.md). That is asked for where our
own calls of oneDNN are not compiled: by `dj.jit` for each program, and by `python -m distdl_jax` in XLA_FLAGS, which
`jax.jit` has then, too. Not where JAX keeps compiled programs: XLA can't write those that call oneDNN (jaxlib 0.12).
"""

from __future__ import annotations

import logging
import mmap
import os
import sysconfig
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distdl_jax.settings import Settings, current_settings, read_settings

log = logging.getLogger("distdl_jax")

OWN_ONEDNN = Path(sysconfig.get_path("platlib")) / "distdl_jax_onednn.so"
"""Where our own calls of oneDNN are in this environment, if they are compiled."""

ONEDNN = "xla_cpu_experimental_onednn_custom_call"

OPTIONS: Mapping[str, bool | str] = {ONEDNN: True, "xla_disable_hlo_passes": "onednn-ops-rewriter"}
"""oneDNN's convolutions, but not its softmax, in whose results no NaN of the input is left: a reproduction is
benchmarks/xla_onednn.py."""

FIRST_JAXLIB = (0, 11)
"""The first jaxlib that does what it is asked for."""

_asked_for = ContextVar("asked_for", default=False)


@cache
def known_options() -> Mapping[str, bool | str]:
    """Return the options that make programs faster on CPUs with the installed jaxlib.

    XLA ends the process at a flag that it does not know, so the library itself is looked at, which takes some 20 ms.
    """
    try:
        numbers = tuple(int(part) for part in version("jaxlib").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return {}
    package = find_spec("jaxlib")
    if numbers < FIRST_JAXLIB or package is None or package.origin is None:
        return {}
    for library in Path(package.origin).parent.glob("libjax_common.*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if all(content.find(name.encode()) >= 0 for name in OPTIONS):
                return OPTIONS
    return {}


def options_for(platform: str) -> Mapping[str, bool | str]:
    """Return the options for `jax.jit` of a program on `platform`; JAX has started."""
    import jax

    from distdl_jax.kernels.cpu.onednn.shared_library import loaded

    keeps = bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined, unused-ignore]
    if platform != "cpu" or not _are_wanted(current_settings(), os.environ, keeps):
        return {}
    return {} if current_settings().onednn == "on" and loaded() is not None else known_options()


def flags_for(environment: Mapping[str, str]) -> str:
    """Return XLA_FLAGS with the options, for a process on CPUs that is about to start in `environment`."""
    given, settings = environment.get("XLA_FLAGS", ""), read_settings(environment).settings
    if not _are_wanted(settings, environment, bool(environment.get("JAX_COMPILATION_CACHE_DIR"))):
        return given
    if settings.onednn == "on" and OWN_ONEDNN.exists():
        return given
    added = (f"--{name}={str(value).lower()}" for name, value in known_options().items())
    return " ".join([given, *added]).strip()


def _are_wanted(settings: Settings, environment: Mapping[str, str], keeps_programs: bool) -> bool:
    given = environment.get("XLA_FLAGS", "")
    if named := [name for name in OPTIONS if name in given]:
        if ONEDNN in named and not _is_given(given):
            _tell_once(f"XLA_FLAGS has {ONEDNN}, which stays as it is.")
        return False
    if keeps_programs and known_options():
        _tell_once(f"JAX keeps compiled programs, so XLA is not asked for oneDNN ({ONEDNN}): it can't write those.")
    return settings.compiler_options and not keeps_programs


def _is_given(flags: str) -> bool:
    return f"--{ONEDNN}=true" in flags.split()


def convolves_by_onednn() -> bool:
    """Return whether XLA has been asked for oneDNN's convolutions in the program that is being traced."""
    return _asked_for.get() or _is_given(os.environ.get("XLA_FLAGS", ""))


def jitted_alone(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return `jax.jit(function, **options)` with the options for where JAX computes; those that are given win.

    It is for programs that are part of no other one, whose options JAX would refuse. JAX has started.
    """
    import jax

    compiler_options = {**options_for(jax.default_backend()), **(options.get("compiler_options") or {})}

    @wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        token = _asked_for.set(str(compiler_options.get(ONEDNN, False)).lower() == "true")
        try:
            return function(*args, **kwargs)
        finally:
            _asked_for.reset(token)

    return jax.jit(traced, **{**options, "compiler_options": compiler_options or None})


@cache
def _tell_once(text: str) -> None:
    log.info("%s", text)
