"""The seconds of layers on all workers, from each worker's recording, with the workers that others waited for."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.tools.profile.activities import BACKWARD, FORWARD, LOSS, MESSAGE, UPDATE, Activities, Activity, Row

Place = tuple[int, int]
"""An operation: its worker, and its number among the worker's."""


class Arrow(NamedTuple):
    """A message: the sender, its number among the sender's operations, the receiver, the number among that one's."""

    sender: int
    sent: int
    receiver: int
    received: int


@dataclass(frozen=True)
class Met:
    """The matching of the operations of each worker, by world rank.

    - `until`: when all partners of each operation had arrived, but not after its end.
    - `waited_for`: the worker that arrived last; the worker itself if it waited for no other.
    - `arrows`: all messages. `matched`: whether each has its partner; otherwise there are none.
    """

    until: Mapping[int, np.ndarray]
    waited_for: Mapping[int, np.ndarray]
    arrows: tuple[Arrow, ...]
    matched: bool = True


def meet(timed: Mapping[int, Sequence[Activity]]) -> Met:
    """Return the workers that messages waited for, by world rank; none for operations whose partners are not recorded.

    A message starts when both workers have arrived; a sender that is done before that did not wait.
    """
    starts = {worker: np.array([each.start for each in several], np.int64) for worker, several in timed.items()}
    until = {worker: start.copy() for worker, start in starts.items()}
    waited_for = {worker: np.full(len(start), worker) for worker, start in starts.items()}

    def wait(place: Place, other: Place) -> None:
        (worker, number), came = place, starts[other[0]][other[1]]
        if until[worker][number] < came < timed[worker][number].end:
            until[worker][number], waited_for[worker][number] = came, other[0]

    try:
        arrows, teams = _meetings(timed)
    except LookupError:
        return Met(until, waited_for, (), matched=False)
    for sender, sent, receiver, received in arrows:
        wait((sender, sent), (receiver, received))
        wait((receiver, received), (sender, sent))
    # All of a team leave together, when the last has come: the others waited for that one.
    for team in teams:
        last = max(team, key=lambda place: starts[place[0]][place[1]])
        for place in team:
            wait(place, last)
    return Met(until, waited_for, tuple(arrows))


def _meetings(timed: Mapping[int, Sequence[Activity]]) -> tuple[list[Arrow], list[list[Place]]]:
    """Return all messages, those between two workers in order, and team operations, matching the n-th of a team.

    Raises `LookupError` if partners are missing.
    """
    sent: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
    received: list[tuple[int, int, int]] = []
    teams: defaultdict[tuple[Workers, int], list[Place]] = defaultdict(list)
    for worker, several in timed.items():
        count: Counter[Workers] = Counter()
        for number, operation in enumerate(each.operation for each in several if each.operation is not None):
            if not operation.is_message:
                teams[operation.team, count[operation.team]].append((worker, number))
                count[operation.team] += 1
                continue
            if operation.dest is not None:
                sent[worker, operation.dest].append(number)
            if operation.source is not None:
                received.append((operation.source, worker, number))
    arrows = [Arrow(sender, sent[sender, worker].popleft(), worker, number) for sender, worker, number in received]
    if any(sent.values()) or any(len(team) != len(present) for (team, _), present in teams.items()):
        raise LookupError
    return arrows, [*teams.values()]


class WaitSpan(NamedTuple):
    """A time in which a worker waits for another one, in ns."""

    start: int
    end: int
    worker: int


def causes(waits: Mapping[int, Sequence[WaitSpan]], wait: WaitSpan) -> Counter[int]:
    """Return how long a wait is due to each worker: while that one waits itself, to the worker that it waits for.

    - `waits`: of each worker, ordered by start.
    """
    found = Counter[int]()
    left = [wait]
    while left:
        start, end, worker = left.pop()
        others = waits.get(worker, ())
        at = bisect_right(others, start, key=lambda each: each.end)
        for other in others[at:]:
            if other.start >= end:
                break
            inside = WaitSpan(max(start, other.start), min(end, other.end), other.worker)
            found[worker] += max(inside.start - start, 0)
            left.append(inside)
            start = inside.end
        found[worker] += max(end - start, 0)
    return found


_TRANSFER, _WAITING = 2, 3
_KINDS = 4


@dataclass
class PassTimes:
    """A layer in one pass, forward or backward: arrays of numbers per step, with an entry for each worker.

    - `arithmetic`, `packing`: seconds in which the worker computes; in which it copies, cuts and joins for messages.
    - `transfer`: seconds of messages and collective operations once their workers have arrived, `waiting`: until then;
      both without those in which the worker also computes, which are `hidden`.
    - `messages`, `bytes`: operations, including messages and collectives, and the bytes that the worker passes to them.
    """

    arithmetic: np.ndarray
    packing: np.ndarray
    transfer: np.ndarray
    waiting: np.ndarray
    hidden: np.ndarray
    messages: np.ndarray
    bytes: np.ndarray

    @classmethod
    def none(cls, workers: int) -> PassTimes:
        """Return zeros."""
        return cls(*(np.zeros(workers) for _ in fields(cls)))

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def total(self) -> np.ndarray:
        """All seconds of the step that it takes."""
        return self.arithmetic + self.packing + self.transfer + self.waiting


@dataclass(frozen=True)
class LayerProfile:
    """The times of one layer.

    - `place`, `name`: its place in the network, "3.body.0", and its class; or the scopes around it.
    - `forward`, `backward`: its times in each pass.
    - `waited_for`: a row for each worker, a column for each worker that it waited for there: seconds of a step. If a
      worker waits itself, the time is attributed to the one that it waits for.
    """

    place: str
    name: str
    forward: PassTimes
    backward: PassTimes
    waited_for: np.ndarray

    @property
    def title(self) -> str:
        """Its place and its class: "3.body.0 DistributedConv2d"."""
        return f"{self.place} {self.name}".strip()

    @property
    def both(self) -> PassTimes:
        """Both passes together."""
        return self.forward + self.backward


class Totals(NamedTuple):
    """Layers, and for each worker the seconds of a step, the idle seconds, and the workers that it waited for.

    - `matched`: whether all messages were matched with their partners.
    """

    layers: tuple[LayerProfile, ...]
    seconds: np.ndarray
    idle: np.ndarray
    waited_for: np.ndarray
    matched: bool


def add_up(recorded: Mapping[int, Activities], steps: int) -> Totals:
    """Return the times of all layers, from all workers' recordings on one clock."""
    workers, met = len(recorded), meet({worker: mine.messages for worker, mine in recorded.items()})
    waits = {worker: _waits(mine, met, worker) for worker, mine in recorded.items()}
    layers: dict[tuple[str, str], LayerProfile] = {}
    seconds, idle, are_known = np.zeros(workers), np.zeros(workers), True
    middles: dict[tuple[str, str], float] = {}
    for worker, mine in sorted(recorded.items()):
        own = [_layer(layers, row, workers) for row in mine.rows]
        spans, until = list[Span](), iter(met.until[worker].tolist())
        waited = {wait.start: wait for wait in waits[worker]}
        for each in mine.activities:
            column, operation = _KINDS * each.row, each.operation
            if each.kind != MESSAGE:
                spans.append(Span(each.start, each.end, column + each.kind, False))
                continue
            # A message first waits until its partner has arrived; only then do its bytes travel.
            came = each.start if operation is None else next(until)
            spans.append(Span(each.start, came, column + _WAITING, True))
            spans.append(Span(came, each.end, column + _TRANSFER, True))
            are_known = are_known and operation is not None
            if any(start <= each.start < end for start, end in mine.steps):
                layer, times = own[each.row]
                times.messages[worker] += 1 / steps
                times.bytes[worker] += 0 if operation is None else operation.bytes_sent / steps
                if operation is not None and (wait := waited.get(each.start)) is not None:
                    for other, took in causes(waits, wait).items():
                        layer.waited_for[worker, other] += took * 1e-9 / steps
        # Activities overlap: each moment is given away once, so that the columns add up to the step.
        found = shares(spans, mine.steps, _KINDS * len(mine.rows))
        by_row, hidden = (each.reshape(-1, _KINDS) / steps for each in (found.seconds, found.hidden))
        for (_, times), numbers, under in zip(own, by_row, hidden, strict=True):
            for name, number in zip(("arithmetic", "packing", "transfer", "waiting"), numbers, strict=True):
                getattr(times, name)[worker] += number
            times.hidden[worker] += under.sum()
        seconds[worker] = sum(end - start for start, end in mine.steps) * 1e-9 / steps
        idle[worker] = found.idle / steps
        for key, time in _middles(mine).items():
            middles[key] = min(time, middles.get(key, time))
    # In the order of a step, by the middle of each layer's first pass: a layer may run on some workers only.
    ordered = [layers[key] for key in sorted(layers, key=lambda key: (*_order(*key), middles.get(key, np.inf)))]
    waited_for = sum((layer.waited_for for layer in ordered), np.zeros((workers, workers)))
    return Totals(tuple(ordered), seconds, idle, waited_for, met.matched and are_known)


def _middles(mine: Activities) -> dict[tuple[str, str], float]:
    """Return the middle of the time of each layer's forward pass, from the start of the first step."""
    sums: dict[tuple[str, str], np.ndarray] = {}
    start, end = mine.steps[0]
    for each in mine.activities:
        row = mine.rows[each.row]
        if row.direction == FORWARD and start <= each.start < end:
            took = each.end - each.start
            sums.setdefault((row.place, row.name), np.zeros(2))[:] += (took, took * (each.start - start))
    return {key: float(weighted / took) for key, (took, weighted) in sums.items() if took}


def _order(place: str, name: str) -> tuple[object, ...]:
    """Return the sort key of layers, before time: places as in the network, other scopes, the loss, the rest."""
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in place.split(".") if part]
    return not parts, parts, {LOSS: 1, UPDATE: 2}.get(name, 0)


def _layer(layers: dict[tuple[str, str], LayerProfile], row: Row, workers: int) -> tuple[LayerProfile, PassTimes]:
    """Return a row's layer, created if new, and its times in the row's pass."""
    key = (row.place, row.name)
    if key not in layers:
        both = PassTimes.none(workers), PassTimes.none(workers)
        layers[key] = LayerProfile(*key, *both, np.zeros((workers, workers)))
    return layers[key], layers[key].backward if row.direction == BACKWARD else layers[key].forward


def _waits(mine: Activities, met: Met, worker: int) -> list[WaitSpan]:
    """Return the times in which a worker waited for another one."""
    pairs = zip(mine.messages, met.until[worker].tolist(), met.waited_for[worker].tolist(), strict=True)
    return [WaitSpan(each.start, until, other) for each, until, other in pairs if until > each.start]


class Span(NamedTuple):
    """A time in which something ran, in ns: the `column` it counts in, and whether it is communication."""

    start: int
    end: int
    column: int
    communicates: bool


class Shares(NamedTuple):
    """The seconds of each column, and idle ones; for communication, those in which arithmetic also ran."""

    seconds: np.ndarray
    idle: float
    hidden: np.ndarray


def shares(spans: Sequence[Span], steps: Sequence[tuple[int, int]], columns: int) -> Shares:
    """Divide the time of all steps.

    A moment belongs to the arithmetic that runs in it, in equal parts if there are several; if there is none, to
    communication; otherwise to nothing.
    """
    seconds, hidden, idle = np.zeros(columns), np.zeros(columns), 0.0
    changes = sorted(
        [(start, 1, number) for number, (start, _) in enumerate(steps)]
        + [(end, -1, number) for number, (_, end) in enumerate(steps)]
        + [(span.start, 2, number) for number, span in enumerate(spans) if span.end > span.start]
        + [(span.end, -2, number) for number, span in enumerate(spans) if span.end > span.start]
    )
    # A sweep over all beginnings and ends; between two of them nothing changes. 1 marks steps, 2 spans.
    inside, before = 0, 0
    computing, communicating = set[int](), set[int]()
    for time, change, number in changes:
        took = (time - before) * 1e-9
        before = time
        if inside and took:
            running = computing or communicating
            for each in running:
                seconds[spans[each].column] += took / len(running)
            for each in communicating if computing else ():
                hidden[spans[each].column] += took
            idle += 0.0 if running else took
        if abs(change) == 1:
            inside += change
            continue
        among = communicating if spans[number].communicates else computing
        (among.add if change > 0 else among.discard)(number)
    return Shares(seconds, idle, hidden)
