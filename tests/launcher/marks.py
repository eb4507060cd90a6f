"""What the marks of a test say: what runs it, and how long it may take."""

import pytest

from launcher import settings

MARKERS = (
    "world(*sizes): run the test on every rank of an MPI world of each of these sizes",
    "simulated(*sizes): run the test on the threads of a world of each of these sizes, in one process",
    "limit(seconds): how long the test may take before it fails with every rank's stacks (default 120)",
)
PLAIN, THREADS = -1, 0  # what runs in the pytest process, and what in one process without MPI; else an MPI world's size


class Simulated(int):
    """The size of a world of threads."""


def world_size(item: pytest.Item) -> int | None:
    """Return the size that the item is to run on, by its test's mark or its parameter's; None if there is no mark."""
    if (callspec := getattr(item, "callspec", None)) and "world_size" in callspec.params:
        return callspec.params["world_size"]
    for mark, kind in (("world", int), ("simulated", Simulated)):
        if found := item.get_closest_marker(mark):
            return kind(*found.args)
    return None


def group(item: pytest.Item) -> int:
    """Return what runs the item: PLAIN, THREADS or the size of an MPI world."""
    size = world_size(item)
    if isinstance(size, Simulated):
        return PLAIN if item.config.option.usepdb else THREADS  # a debugger needs the terminal
    return PLAIN if size is None else size


def name(group: int) -> str:
    """Return what runs it, in words."""
    return {PLAIN: "this process", THREADS: "a process without MPI"}.get(group, f"a world of {group}")


def limit(item: pytest.Item) -> float:
    """Return the seconds that the item may take."""
    mark = item.get_closest_marker("limit")
    return settings.limit(mark.args[0]) if mark else settings.limit()
