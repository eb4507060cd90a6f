"""How far this worker's clock is from worker 0's."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

QUESTIONS = 50
"""How often the time is asked for; the answer that took least counts."""


def clock_offset(comm: MPI.Intracomm) -> int:
    """Return the ns to add to this host's clock for that of worker 0; collective in `comm`.

    Workers of one host have one clock.
    """
    from mpi4py import MPI

    hosts = comm.allgather(socket.gethostname())
    others = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    offset = 0
    for rank in others:
        if comm.rank == 0:
            for _ in range(QUESTIONS):
                comm.recv(source=rank)
                comm.send(time.time_ns(), rank)
        elif comm.rank == rank:
            offset = offset_by(lambda: comm.sendrecv(None, 0, source=0, recvtag=MPI.ANY_TAG))
    comm.Barrier()
    return offset


def offset_by(ask: Callable[[], int], clock: Callable[[], int] = time.time_ns) -> int:
    """Return the ns to add to `clock` for the one that `ask` reads, half of the time after it is called."""
    best, offset = None, 0
    for _ in range(QUESTIONS):
        asked = clock()
        there = ask()
        answered = clock()
        if best is None or answered - asked < best:
            best, offset = answered - asked, there - (asked + answered) // 2
    return offset
