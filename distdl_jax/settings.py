"""The settings: environment variables, read and checked."""

from __future__ import annotations

import os
from typing import NamedTuple

from distdl_jax.errors import InvalidArgumentError


class TimeLimits(NamedTuple):
    """Seconds after which the clock ends the job; 0 for never.

    - `waiting`: for others that do not come. Longer than a data set takes to load or a checkpoint to be written.
    - `program`: for a program that all workers are in.
    """

    waiting: float
    program: float


DEFAULT_TIME_LIMITS = TimeLimits(1800.0, 4 * 3600.0)


def time_limits() -> TimeLimits:
    """The defaults, or both what `DISTDL_JAX_TIMEOUT` says."""
    given = os.environ.get("DISTDL_JAX_TIMEOUT", "")
    if not given:
        return DEFAULT_TIME_LIMITS
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidArgumentError(f"DISTDL_JAX_TIMEOUT (={given!r}) must be a number of seconds, or 0 for no limit.")
    return TimeLimits(seconds, seconds)
