"""Which checked functions a worker has called in one world, so that workers can be compared: facts, and no times.

Only functions count that all workers must call or none, since their plan binds them together. So the number of a call
is the same on all workers of a program that can go on. When a function is traced, and all agree on its plan, they also
agree on the number.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

REMEMBERED = 1024
"""Of how many calls the names are remembered."""

DIGESTS = 32
"""Of how many of the last calls a worker tells the digests."""


@dataclass(frozen=True)
class CallWindow:
    """The names of the last calls of one worker, up to number `last`."""

    last: int = 0
    names: tuple[str, ...] = ()

    def name_of(self, call: int) -> str | None:
        """The function of the given call (from 1); None where it is not remembered."""
        place = len(self.names) - (self.last - call) - 1
        return self.names[place] if 0 <= place < len(self.names) else None


class Earlier(NamedTuple):
    """How many calls a worker had made before one, and the digest of all of them; None where they can't be compared."""

    number: int
    digest: int | None


@dataclass(frozen=True)
class Calls:
    """What a worker tells of its calls.

    - `number`, `name`: its last call that counts, and the function of it.
    - `digests`: of all calls up to each of the last ones, the last one last; none where they can't be compared.
    - `inside`: whether it is in the last one. `tracing`: whether it traces it; `agreed_before`: what it traces was
      agreed on in an earlier call.
    - `passed`: up to which call it will trace, and agree on, nothing any more.
    - `done`: up to which call all its programs have ended.
    - `mixed`: whether it has run programs that communicate and were not compared: their messages may be astray.
    - `failed`: the last call whose program it will never run, though all had agreed on the plan, and why.
    """

    number: int = 0
    name: str = ""
    digests: tuple[int, ...] = ()
    inside: bool = False
    tracing: bool = False
    agreed_before: bool = False
    passed: int = 0
    done: int = 0
    mixed: bool = False
    failed: tuple[int, str] = (0, "")

    def digest_at(self, call: int) -> int | None:
        """That of the calls up to the given one; None where it is not told."""
        place = len(self.digests) - (self.number - call) - 1
        return self.digests[place] if 0 <= place < len(self.digests) else None

    def agrees_with(self, other: Calls) -> bool:
        """Whether both are known to have made the same calls, as far as both have come."""
        last = min(self.number, other.number)
        digest = self.digest_at(last)
        return digest is not None and digest == other.digest_at(last)

    def differs_from(self, other: Calls) -> bool:
        """Whether both are known to have made different calls."""
        last = min(self.number, other.number)
        ours, theirs = self.digest_at(last), other.digest_at(last)
        return ours is not None and theirs is not None and ours != theirs

    def has_passed(self, other: Calls) -> bool:
        """Whether this worker is known to have passed the call that the other one traces."""
        if not (other.inside and other.tracing and other.digests) or self.passed < other.number:
            return False
        return self.digest_at(other.number) == other.digests[-1]


class CallLog:
    """The calls of one worker in one world, written by the thread that makes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: deque[str] = deque(maxlen=REMEMBERED)
        self._digests: deque[int] = deque([0], maxlen=DIGESTS)
        self._comparable = True
        self.number = 0
        self.inside = False
        self.tracing = False
        self.agreed_before = False
        self.passed = 0
        self.mixed = False
        self.failed = (0, "")

    def begin(self, name: str) -> None:
        """A call that counts."""
        with self._lock:
            self._names.append(name)
            self._digests.append(crc32(name.encode(), self._digests[-1]))
            self.number += 1
            self.inside = True

    def end(self, completed: bool) -> None:
        """The last call is over; if it raised, nobody knows whether others have got further in theirs."""
        with self._lock:
            self.inside = self.tracing = self.agreed_before = False
            if completed:
                self.passed = self.number
            else:
                self._comparable = False

    def undo(self) -> None:
        """The last call has raised before it told anybody anything: to the others it was none."""
        with self._lock:
            self.inside = self.tracing = self.agreed_before = False
            self._names.pop()
            self._digests.pop()
            self._comparable = self._comparable and bool(self._digests)
            self.number -= 1

    def cannot_run(self, why: str) -> None:
        """The program of the call, on whose plan all have agreed, will never run here."""
        with self._lock:
            self.failed = (self.number, why)

    def agree(self, number: int, name: str) -> None:
        """All workers have agreed on the plan of their call, and that it is the given one."""
        with self._lock:
            self._names.clear()
            self._names.append(name)
            self._digests.clear()
            self._digests.append(crc32(f"{number} {name}".encode()))
            self._comparable = True
            self.number = self.passed = number
            self.inside = True

    def cannot_compare(self) -> None:
        """From now on, until all agree again, nothing follows from the calls."""
        self._comparable = False

    def window(self) -> CallWindow:
        """The last calls."""
        with self._lock:
            if not self._comparable:
                return CallWindow()
            return CallWindow(self.number, tuple(self._names))

    def earlier(self) -> Earlier:
        """Those before the one that the worker is in, or is about to make."""
        with self._lock:
            place = -1 - self.inside
            known = self._comparable and len(self._digests) >= -place
            return Earlier(self.number - self.inside, self._digests[place] if known else None)

    def summary(self, done: int = 0) -> Calls:
        """What to tell of them; up to call `done` all programs have ended."""
        with self._lock:
            name = self._names[-1] if self._names else ""
            if not self._comparable:
                return Calls(self.number, name, (), self.inside, self.tracing, mixed=self.mixed, failed=self.failed)
            digests = tuple(self._digests)
            return Calls(
                self.number,
                name,
                digests,
                self.inside,
                self.tracing,
                self.agreed_before,
                self.passed,
                done,
                self.mixed,
                self.failed,
            )
