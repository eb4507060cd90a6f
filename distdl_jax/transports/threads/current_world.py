"""The simulated worker of a thread, and whether there are any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distdl_jax.tracing import cache_keys

simulated_world = cache_keys.simulated_world
"""The world of this thread's worker; None in a thread that is not a worker of `dj.simulate`.

It is part of the key of all JAX caches: a jitted function that two workers share is traced and compiled for each.
"""


def world_here(world: Any) -> Any:
    """Return the world in which this thread's worker represents one of `world`, if it does; otherwise `world`."""
    own = simulated_world.value
    return own if own is not None and own.stands_for is world else world


def original_world(world: Any) -> Any:
    """Return the world whose workers those of `world` represent, if they do; otherwise `world`."""
    stands_for = getattr(world, "stands_for", None)
    return world if stands_for is None else stands_for


_lock = threading.Lock()
_running = 0


@contextmanager
def one_more_runs() -> Iterator[None]:
    """Inside, the workers of one more world run."""
    global _running
    with _lock:
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1


def where_none_runs(action: Callable[[], None]) -> None:
    """Do something that must not overlap with any run, unless a `dj.simulate` runs; none starts meanwhile."""
    with _lock:
        if not _running:
            action()


def simulations_run() -> bool:
    """Return whether any `dj.simulate` runs in this process."""
    return _running > 0
