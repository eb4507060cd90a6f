"""The marks of a test: the processes it needs and the time it may take."""

from typing import NamedTuple

import pytest

from launcher import settings
from launcher.slowdown import Slowdown

ARGUMENT = "world_size"


class Group(NamedTuple):
    """The processes that run a test, beside the pytest process: an MPI world of this size, or (0) without MPI."""

    world: int
    processes: int

    def __str__(self) -> str:
        return f"world of {self.world}" if self.world else "process without MPI"


PARENT = Group(0, 0)  # the pytest process itself
THREADS = Group(0, 1)


class Simulated(int):
    """The size of a world of threads."""


def declared(mark: pytest.Mark) -> tuple[int, ...]:
    """Return the sizes in `@pytest.mark.world(1, 4)`, or in `simulated(4)`; refuse anything else."""
    good = mark.args and not mark.kwargs and all(isinstance(size, int) and size > 0 for size in mark.args)
    if not good or len(set(mark.args)) != len(mark.args):
        raise pytest.UsageError(
            f"{mark.name}{mark.args!r} must name different world sizes, as in pytest.mark.{mark.name}(1, 4)"
        )
    return tuple(mark.args)


def has_size(item: pytest.Item) -> bool:
    """Return whether the item is one of those that a mark's sizes have made of a test."""
    return hasattr(item, "callspec") and ARGUMENT in item.callspec.params


def simulated(item: pytest.Item) -> Simulated | None:
    """Return the size of the world of threads that the item needs; None where it needs none."""
    size = item.callspec.params[ARGUMENT] if has_size(item) else None  # type: ignore[attr-defined]
    return size if isinstance(size, Simulated) else None


def of(item: pytest.Item) -> Group:
    """Return the processes that run the item."""
    if simulated(item):
        return PARENT if item.config.option.usepdb else THREADS  # a debugger needs the terminal
    size = _world(item)
    return Group(size, size) if size else PARENT


def _world(item: pytest.Item) -> int:
    """Return the size of the MPI world that the item needs; 0 where it needs none."""
    mark = item.get_closest_marker("world")
    if mark is None:
        return 0
    if has_size(item):
        return int(item.callspec.params[ARGUMENT])  # type: ignore[attr-defined]
    found = declared(mark)
    if len(found) > 1:
        raise pytest.UsageError(f"{item.nodeid} is no plain test function and can have one world size only")
    return found[0]


def limit(item: pytest.Item, slowdown: Slowdown | None = None) -> float:
    """Return the seconds the item may take: the environment's, else its mark's or the default, times the slowdown."""
    own = settings.own_limit()
    if own is not None:
        return own
    mark = item.get_closest_marker("limit")
    marked = settings.DEFAULT_LIMIT if mark is None else float(mark.args[0])
    return marked * (slowdown.factor() if slowdown else 1)


def start_limit(processes: int, slowdown: Slowdown) -> float:
    """Return the seconds a group may take to start, by the starts before: its own slow start is no excuse."""
    return settings.own_limit() or settings.DEFAULT_LIMIT * slowdown.slowest + 20 * processes


def end_limit(slowdown: Slowdown) -> float:
    """Return the seconds a world may take to end, once it has run all its tests."""
    return settings.own_limit() or settings.DEFAULT_LIMIT * slowdown.factor()
