"""What the marks of a test say: the world it needs and the time it may take."""

import os

import pytest

LIMIT = "DISTDL_JAX_TEST_LIMIT"
DEFAULT_LIMIT = 120.0
ARGUMENT = "world_size"


def declared(mark: pytest.Mark) -> tuple[int, ...]:
    """The sizes in `@pytest.mark.world(1, 4)`; raises `pytest.UsageError` for anything else."""
    good = mark.args and not mark.kwargs and all(isinstance(size, int) and size > 0 for size in mark.args)
    if not good or len(set(mark.args)) != len(mark.args):
        raise pytest.UsageError(f"world{mark.args!r} must name different world sizes, as in pytest.mark.world(1, 4)")
    return tuple(mark.args)


def of(item: pytest.Item) -> int:
    """The size of the world that the item needs; 0 for the parent process itself."""
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


def general_limit() -> float:
    """Seconds for whatever has no mark of its own: a test, a start, an end."""
    return float(os.environ.get(LIMIT) or DEFAULT_LIMIT)


def limit(item: pytest.Item) -> float:
    """Seconds the item may take: the environment's word, else its mark's, else the default."""
    mark = item.get_closest_marker("limit")
    if mark is None or os.environ.get(LIMIT):
        return general_limit()
    return float(mark.args[0])
