"""Messages between workers outside compiled programs: Python objects, over a communicator that nothing else uses."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI


class Mailbox:
    """One worker's mailbox. Nothing blocks; between two workers messages keep their order."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._sent: list[MPI.Request] = []
        self._everyone = MPI.REQUEST_NULL

    def post(self, message: Any, to: int) -> None:
        """Send to a worker."""
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._comm.isend(message, to))

    def has_message(self) -> bool:
        """Return whether there is a message."""
        return self._comm.iprobe()

    def next(self) -> tuple[int, Any] | None:
        """Return the oldest message, after its sender; None where there is none."""
        if not self.has_message():
            return None
        origin = MPI.Status()
        message = self._comm.recv(status=origin)
        return origin.source, message

    def begin_barrier(self) -> None:
        """Tell all workers that this one is here."""
        self._everyone = self._comm.Ibarrier()

    def has_met(self) -> bool:
        """Return whether all workers have begun the barrier."""
        return self._everyone.Test()
