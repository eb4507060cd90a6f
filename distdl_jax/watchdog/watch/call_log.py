"""The checked functions that a worker has called in one world, for comparing workers: facts, without times.

Only functions that all workers must call together count, since their common plan binds them. So the number of a call is
the same on all workers of a program that can continue. When a function is traced, and all agree on its plan, they also
agree on the number.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple
from zlib import crc32

REMEMBERED = 1024
"""The number of calls whose names and digests are stored."""

DIGESTS = 32
"""The number of last calls whose digests a worker reports, unless asked in full."""


class Earlier(NamedTuple):
    """The number of calls before a given one, and the digest of all of them; None if they can't be compared."""

    number: int
    digest: int | None


@dataclass(frozen=True)
class Calls:
    """The calls of a worker, as reported.

    - `number`, `name`: of its last call that counts, and of its function.
    - `digests`: of all calls up to each of the last ones, the last one last; none if they can't be compared.
    - `names`: their functions, if asked in full; then there are more of both.
    - `inside`: whether it is in the last one. `tracing`: whether it is tracing it.
    - `passed`: up to which call it will not trace, or agree on, anything any more.
    - `done`: up to which call all its programs have ended.
    - `mixed`: whether it has run communicating programs that were not compared, so messages may be misdirected.
    - `failed`: the last call whose program it will never run, although others may, and why: it raised after all had
      agreed on the plan, or while it traced the function again.
    """

    number: int = 0
    name: str = ""
    digests: tuple[int, ...] = ()
    inside: bool = False
    tracing: bool = False
    passed: int = 0
    done: int = 0
    mixed: bool = False
    names: tuple[str, ...] = ()
    failed: tuple[int, str] = (0, "")

    def digest_at(self, call: int) -> int | None:
        """Return the digest of the calls up to the given one; None if it is not reported."""
        place = len(self.digests) - (self.number - call) - 1
        return self.digests[place] if 0 <= place < len(self.digests) else None

    def first_difference(self, other: Calls) -> int | None:
        """Return the number of the first call that both report, with different functions."""
        first = max(calls.number - len(calls.names) for calls in (self, other)) + 1
        return next((n for n in range(first, min(self.number, other.number) + 1) if self[n] != other[n]), None)

    def __getitem__(self, call: int) -> str:
        """Return the function of a call, if reported in full."""
        return self.names[call - self.number - 1]

    def agrees_with(self, other: Calls) -> bool:
        """Return whether both are known to have made the same calls, as far as both have got."""
        last = min(self.number, other.number)
        digest = self.digest_at(last)
        return digest is not None and digest == other.digest_at(last)

    def differs_from(self, other: Calls) -> bool:
        """Return whether both are known to have made different calls."""
        last = min(self.number, other.number)
        digests = self.digest_at(last), other.digest_at(last)
        return None not in digests and digests[0] != digests[1]

    def has_passed(self, other: Calls) -> bool:
        """Return whether this worker is known to have passed the call that the other one traces."""
        if not (other.inside and other.tracing and other.digests) or self.passed < other.number:
            return False
        return self.digest_at(other.number) == other.digests[-1]


class CallLog:
    """The calls of one worker in one world, written by the thread that makes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: deque[str] = deque(maxlen=REMEMBERED)
        self._digests: deque[int] = deque([0], maxlen=REMEMBERED)
        self._comparable = True
        self.number = 0
        self.inside = False
        self.tracing = False
        self.passed = 0
        self.failed = (0, "")

    def begin(self, name: str) -> None:
        """Start a call that counts."""
        with self._lock:
            self._names.append(name)
            self._digests.append(crc32(name.encode(), self._digests[-1]))
            self.number += 1
            self.inside = True

    def end(self, completed: bool) -> None:
        """End the last call; if it raised, others may have got further in it."""
        with self._lock:
            self.inside = self.tracing = False
            if completed:
                self.passed = self.number
            else:
                self._comparable = False

    def undo(self) -> None:
        """Undo the last call. It raised before others learned of it, so it does not count."""
        with self._lock:
            self.inside = self.tracing = False
            self._names.pop()
            self._digests.pop()
            self._comparable = self._comparable and bool(self._digests)
            self.number -= 1

    def cannot_run(self, why: str) -> None:
        """Record that the program of the call, which others may run, will never run here."""
        with self._lock:
            self.failed = (self.number, why)

    def agree(self, number: int, name: str) -> None:
        """Record that all workers have agreed on the plan of their call, and on its number."""
        with self._lock:
            self._names.clear()
            self._names.append(name)
            self._digests.clear()
            self._digests.append(crc32(f"{number} {name}".encode()))
            self._comparable = True
            self.number = self.passed = number
            self.inside = True

    def cannot_compare(self) -> None:
        """Draw no conclusions from the calls from now on, until all agree again."""
        self._comparable = False

    def ended(self) -> int:
        """Return up to which call all have ended; a passed call with an agreed plan may still have to run."""
        with self._lock:
            return min(self.passed, self.number - self.inside)

    def earlier(self) -> Earlier:
        """Return the calls before the current one, or the next one."""
        with self._lock:
            place = -1 - self.inside
            known = self._comparable and len(self._digests) >= -place
            return Earlier(self.number - self.inside, self._digests[place] if known else None)

    def summary(self, done: int = 0, in_full: bool = False) -> Calls:
        """Return a report of them; up to call `done` all programs have ended."""
        with self._lock:
            name = self._names[-1] if self._names else ""
            summary = Calls(self.number, name, (), self.inside, self.tracing, failed=self.failed)
            if not self._comparable:
                return summary
            digests, names = tuple(self._digests), tuple(self._names) if in_full else ()
            return replace(
                summary,
                digests=digests if in_full else digests[-DIGESTS:],
                names=names,
                passed=self.passed,
                done=done,
            )
