"""The environment variables, which begin with `PREFIX`."""

import os

PREFIX = "DISTDL_JAX_TEST_"
LIMIT, MPIEXEC, LONG, WORLDS = (PREFIX + name for name in ("LIMIT", "MPIEXEC", "LONG", "WORLDS"))

DEFAULT_LIMIT = 120.0


def own_limit() -> float | None:
    """Return the user's seconds for every test, start and end; None where none are set."""
    return float(os.environ.get(LIMIT) or 0) or None


def long_run() -> bool:
    """Return whether the user wants more examples."""
    return os.environ.get(LONG, "0") not in ("", "0")


def worlds_at_a_time() -> int:
    """Return how many worlds may run side by side, the plain tests counting as one."""
    return max(1, int(os.environ.get(WORLDS) or 2))
