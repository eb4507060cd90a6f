"""How much memory a compiled program takes on this worker: as the compiler planned it, and as the system counted it."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Planned(NamedTuple):
    """In bytes: what a program is given, and the buffers that it needs while it runs, by the compiler's plan."""

    arguments: int
    temporaries: int


def planned(function: Callable[..., Any], *args: Any) -> Planned:
    """Compile a jitted function; its next call finds it compiled."""
    plan = function.trace(*args).lower().compile().memory_analysis()
    return Planned(plan.argument_size_in_bytes, plan.temp_size_in_bytes)


def resident_memory(function: Callable[..., Any] | None = None, *args: Any) -> int | None:
    """Measure the highest resident memory of the process during a second call of a function, or now, in bytes.

    None where the system doesn't tell.
    """
    if function is None:
        return _status("VmRSS") if _restart() else None
    jax.block_until_ready(function(*args))  # the first call takes what is taken once
    watched = _restart()
    jax.block_until_ready(function(*args))
    return _status("VmHWM") if watched else None


def _restart() -> bool:
    """Make the highest resident memory so far what is resident now; whether the system lets us: Linux with glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # malloc keeps what is freed
        CLEAR.write_text("5")
    except (AttributeError, OSError):
        return False
    return True


def _status(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())[1])  # type: ignore[index]
