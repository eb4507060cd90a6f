"""What the marks of a test say: the world it needs and the time it may take."""

import pytest

from launcher import settings
from launcher.pace import Pace

ARGUMENT = "world_size"


class Simulated(int):
    """The size of a world of threads, in the process that reads the marks."""


def declared(mark: pytest.Mark) -> tuple[int, ...]:
    """The sizes in `@pytest.mark.world(1, 4)`, or in `simulated(4)`; raises `pytest.UsageError` for anything else."""
    good = mark.args and not mark.kwargs and all(isinstance(size, int) and size > 0 for size in mark.args)
    if not good or len(set(mark.args)) != len(mark.args):
        raise pytest.UsageError(
            f"{mark.name}{mark.args!r} must name different world sizes, as in pytest.mark.{mark.name}(1, 4)"
        )
    return tuple(mark.args)


def simulated(item: pytest.Item) -> Simulated | None:
    """The size of the world of threads that the item needs; None where it needs none."""
    callspec = getattr(item, "callspec", None)
    size = None if callspec is None else callspec.params.get(ARGUMENT)
    return size if isinstance(size, Simulated) else None


def of(item: pytest.Item) -> int:
    """The size of the MPI world that the item needs; 0 for the parent process itself."""
    if simulated(item):
        return 0
    mark = item.get_closest_marker("world")
    if mark is None:
        return 0
    callspec = getattr(item, "callspec", None)
    if callspec is not None and ARGUMENT in callspec.params:
        return int(callspec.params[ARGUMENT])
    found = declared(mark)
    if len(found) > 1:
        raise pytest.UsageError(f"{item.nodeid} is no plain test function and can have one world size only")
    return found[0]


def limit(item: pytest.Item, pace: Pace | None = None) -> float:
    """Seconds the item may take: the environment's word, else its mark's, else the default, times the pace."""
    own = settings.own_limit()
    if own is not None:
        return own
    mark = item.get_closest_marker("limit")
    marked = settings.DEFAULT_LIMIT if mark is None else float(mark.args[0])
    return marked * (pace.now() if pace else 1)


def start_limit(size: int, pace: Pace) -> float:
    """Seconds a world may take to start. Measured by the worlds before: its own slow start is no excuse."""
    return settings.own_limit() or settings.DEFAULT_LIMIT * pace.slowest + 20 * size


def end_limit(pace: Pace) -> float:
    """Seconds a world may take to end, once it has run all its tests."""
    return settings.own_limit() or settings.DEFAULT_LIMIT * pace.now()
