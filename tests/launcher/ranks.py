"""The ranks of a world, and what they decide together: before the tests, and after each."""

import time
from array import array
from typing import Any, Protocol


class Ranks(Protocol):
    """The ranks that run the same tests."""

    rank: int
    size: int

    def missing(self, mine: set[str]) -> set[str]:
        """Return the items that some rank could not collect. All ranks meet here."""

    def largest_and_smallest(self, code: int) -> tuple[int, int]:
        """Return the largest and the smallest of all ranks' codes."""


class OneProcess:
    """A process without MPI."""

    rank, size = 0, 1

    def missing(self, mine: set[str]) -> set[str]:
        return mine

    def largest_and_smallest(self, code: int) -> tuple[int, int]:
        return code, code


class MPIRanks:
    """The ranks of `MPI.COMM_WORLD`."""

    def __init__(self) -> None:
        from mpi4py import MPI  # initialises MPI where the project has not

        self.MPI = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size

    def missing(self, mine: set[str]) -> set[str]:
        self._wait(self.comm.Ibarrier())
        everyone: list[set[str]] = self.comm.allgather(mine)
        return set().union(*everyone)

    def largest_and_smallest(self, code: int) -> tuple[int, int]:
        mine, all_ = array("i", [code, -code]), array("i", [0, 0])
        self._wait(self.comm.Iallreduce([mine, self.MPI.INT], [all_, self.MPI.INT], op=self.MPI.MAX))
        return all_[0], -all_[1]

    def _wait(self, request: Any) -> None:
        """Wait without spinning: the cores are for the ranks that still work."""
        pause = 1e-5
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
