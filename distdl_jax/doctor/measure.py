"""Facts that take several workers: times of messages, and whether they see one folder. Collective."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from distdl_jax.doctor.facts import Measured, Message

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = (8, 2**20)
"""Bytes of the messages, and of the arrays that are summed."""

SECONDS = 0.2
"""How long one of them is repeated."""

MOST_HOSTS = 8
"""How many other hosts worker 0 exchanges messages with."""

_BEFORE, _MOST = 5, 200


def pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs that exchange messages: worker 0 with the next on its host, and with one on each other host.

    >>> pairs(["a", "a", "a", "b", "b", "c"])
    [(0, 1), (0, 3), (0, 5)]
    """
    near = [worker for worker, host in enumerate(hosts) if worker and host == hosts[0]][:1]
    first = {host: worker for worker, host in reversed(list(enumerate(hosts))) if host != hosts[0]}
    return [(0, worker) for worker in near + sorted(first.values())[:MOST_HOSTS]]


def measure(comm: MPI.Intracomm, hosts: Sequence[str], folder: str) -> Measured:
    """Measure, on all workers of `comm`; the times are worker 0's."""
    messages = []
    for source, to in pairs(hosts):
        for nbytes in SIZES:
            _wait_for_all(comm)
            if comm.Get_rank() in (source, to):
                seconds = _ping_pong(comm, source, to, nbytes)
                messages.append(Message(source, to, nbytes, seconds))
    sums = {nbytes: _all_reduce(comm, nbytes) for nbytes in SIZES}
    return Measured(tuple(messages), sums, _folder_seen(comm, folder))


def _wait_for_all(comm: MPI.Intracomm) -> None:
    """Wait for the others asleep: MPI's own barrier spins, which takes the time of workers that measure."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def _ping_pong(comm: MPI.Intracomm, source: int, to: int, nbytes: int) -> float:
    """Return half the time of a message and its answer."""
    block, other = bytearray(nbytes), to if comm.Get_rank() == source else source

    def once() -> None:
        if other == to:
            comm.Send(block, other)
            comm.Recv(block, other)
        else:
            comm.Recv(block, other)
            comm.Send(block, other)

    def agree(count: int) -> int:
        if other == to:
            comm.send(count, other)
            return count
        answer: int = comm.recv(source=other)
        return answer

    return _repeat(once, agree) / 2


def _all_reduce(comm: MPI.Intracomm, nbytes: int) -> float:
    from mpi4py import MPI

    block, total = bytearray(nbytes), bytearray(nbytes)
    _wait_for_all(comm)
    return _repeat(lambda: comm.Allreduce([block, MPI.FLOAT], [total, MPI.FLOAT]), comm.bcast)


def _repeat(once: Callable[[], None], agree: Callable[[int], int]) -> float:
    """Return the median time of `once`, repeated for `SECONDS`; `agree` makes a count the same on all."""

    def timed() -> float:
        began = time.perf_counter()
        once()
        return time.perf_counter() - began

    first = median(timed() for _ in range(_BEFORE))
    return median(timed() for _ in range(agree(min(_MOST, 1 + int(SECONDS / max(first, 1e-6))))))


def _folder_seen(comm: MPI.Intracomm, folder: str) -> tuple[bool, ...]:
    """Return, by worker, whether it sees a file that worker 0 wrote to `folder`; () where worker 0 can't write."""
    name = f".distdl_jax_doctor_{os.getpid()}"
    wrote = False
    if comm.Get_rank() == 0:
        try:
            (Path(folder) / name).touch()
            wrote = True
        except OSError:
            pass
    name, wrote = comm.bcast((name, wrote))
    if not wrote:
        return ()
    seen = comm.allgather((Path(folder) / name).exists())
    if comm.Get_rank() == 0:
        (Path(folder) / name).unlink(missing_ok=True)
    return tuple(seen)
