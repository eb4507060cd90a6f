"""One worker of a process as the others see it: at which operation it is, and what of that still waits."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any

from distdl_jax.tracing.world import Workers
from distdl_jax.watchdog.programs.ir import Operation
from distdl_jax.watchdog.watch.status import WorkerStatus

AGREEMENT = "agreement"
"""The kind of the operation by which workers agree on something while they trace; its `op` is the label."""


class Participant:
    """One worker at the rendezvous: its operation, and what of it still waits.

    - `sends`, `receives`, `meets`: the halves of a message, or the meeting of a team, that wait for partners.
    - `listens`: whether it waits for what the first worker of its team decides.
    - `given`, `result`: what it brings, and what it takes away.
    - `since`: when it came to the operation. `done`: how many operations it has completed.
    - `ended`: whether its program has ended.
    - `gave_up`: whether its operation was ended before it was complete.
    - `raised`: what it was last made to raise here.
    - `thread`: the one that runs its program; `status`: what that does.
    """

    def __init__(self, rank: int, size: int, lock: threading.Lock) -> None:
        self.rank = rank
        self.wake = threading.Condition(lock)
        self.operation: Operation | None = None
        self.given: Any = None
        self.result: Any = None
        self.sends = self.receives = self.meets = self.listens = False
        self.done = self.failures_seen = 0
        self.ended = self.gave_up = False
        self.since = 0.0
        self.thread = 0
        self.raised: BaseException | None = None
        self.status = WorkerStatus(rank, size)

    @property
    def waits(self) -> bool:
        """Whether something of its operation waits for others."""
        return self.sends or self.receives or self.meets or self.listens

    def begin(self, operation: Operation, given: Any) -> None:
        """Come to an operation."""
        self.operation, self.given, self.result, self.gave_up = operation, given, None, False
        self.since = monotonic()
        self.sends, self.receives = operation.dest is not None, operation.source is not None
        self.meets = not operation.is_message

    def end(self) -> Any:
        """End the operation, which is complete; what the worker gets by it."""
        self.done += 1
        result, self.given, self.result = self.result, None, None
        return result

    def release(self) -> None:
        """Let it go, whatever it waits for."""
        self.sends = self.receives = self.meets = self.listens = False
        self.wake.notify()

    def give_up(self) -> None:
        """End its wait, where it waits; an operation that is complete stays so."""
        if self.waits:
            self.gave_up = True
            self.release()

    def is_at(self, team: Workers) -> bool:
        """Return whether it waits in a collective of this team."""
        return self.meets and self.operation is not None and self.operation.team == team
