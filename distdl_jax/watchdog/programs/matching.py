"""Check that the workers' programs, each blocking at every operation, complete together, or find the mismatch.

The programs are simulated against each other without data. A send waits for its receive, as MPI allows; a collective
waits for its team. No operation can choose its partner, so the order of the simulation doesn't matter: one that
completes shows that every run does, and one that gets stuck shows that every run may. (A receive from any worker can;
programs with such receives are not compared.)

A loop is simulated until its passes repeat; then the remaining equal passes are skipped. For a loop whose length
depends on data, two passes are simulated, assuming that all workers make the same number; for a conditional, each
branch in turn, assuming that all take the same one.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.watchdog.programs.ir import (
    Cursor,
    Flow,
    Operation,
    Pass,
    Program,
    count_operations,
    most_branches,
    operations,
    simplified,
)
from distdl_jax.watchdog.programs.origins import Mixed, Origins, Pairing

MOST_PLAYED = 500_000
"""Simulated operations, beyond a hundred times those in the programs, after which a comparison is abandoned."""


@dataclass(frozen=True)
class Stop:
    """The position of a worker when nothing moves any more: at `operation`, its `place`-th (from 1), or at its end."""

    worker: int
    operation: Operation | None
    place: int
    total: int


@dataclass(frozen=True)
class Mismatch:
    """The first mismatch.

    - `reason`: "amount" (two partners name different lengths, dtypes, roots or reductions), "ended" (the partner's
      program ends without it), "adjoints" (partners run the adjoints of different movements), "partner" (the partner is
      at an operation that doesn't match), "cycle" (each waits for the next), "mixed" (calls of some workers are in
      another order) or "undecided" (loops too long, and too different, to simulate).
    - `stops`: the positions of the workers concerned, the waiting one first.
    - `mixed`: the values that they mix.
    - `branch`: the simulated branch of its conditionals; None if there are none.
    """

    reason: str
    stops: tuple[Stop, ...]
    branch: int | None = None
    mixed: Mixed | None = None


def find_mismatch(programs: Mapping[int, Program], flows: Mapping[int, Flow] | None = None) -> Mismatch | None:
    """Return the reason why the programs (by world rank) don't complete; None if they do, or can't be compared.

    With `flows`, the origins of values, also the values that they mix. Workers with the same program cost little more
    than one of them.
    """
    distinct = {id(program): program for program in programs.values()}
    if any(operation.from_any for program in distinct.values() for operation, _ in operations(program)):
        return None
    if len(distinct) == 1 and all(_is_of_all(program, programs.keys()) for program in distinct.values()):
        return None
    distinct = {key: simplified(program, merge=not flows) for key, program in distinct.items()}
    programs = {worker: distinct[id(program)] for worker, program in programs.items()}
    branches = max((most_branches(program) for program in distinct.values()), default=0)
    branches = max(branches, *(len(flow.branches) for flow in (flows or {}).values()), 0)
    for branch in range(max(branches, 1)):
        if mismatch := Play(programs, branch, flows=flows or {}).run():
            return mismatch if branches else replace(mismatch, branch=None)
    return None


def find_stops(programs: Mapping[int, Program], absent: frozenset[int]) -> list[Stop]:
    """Return where each worker stops if those of `absent` never start; the first branch of every conditional is taken.

    Sends without a partner are assumed to wait, so a worker may be further than reported, not less far.
    """
    play = Play({worker: simplified(program) for worker, program in programs.items()}, 0, absent)
    play.run()
    return [play.stop(worker) for worker in sorted(programs)]


class Happening(NamedTuple):
    """A completed operation, by a sender and a receiver or a team, and its place in the first one's program."""

    operation: Operation
    team: Workers
    place: int


def play_back(programs: Mapping[int, Program]) -> tuple[list[Happening], dict[int, Operation]]:
    """Return the completed operations, in order, up to a mismatch, and those in which workers are left waiting.

    A loop's body is simulated once; for a conditional, the first branch.
    """
    flat = {rank: tuple(op for op, _ in operations(p, first_branch=True)) for rank, p in sorted(programs.items())}
    happened: list[Happening] = []
    play = Play(flat, 0, happened=happened)
    play.run()
    stops = map(play.stop, flat)
    return happened, {stop.worker: stop.operation for stop in stops if stop.operation is not None}


def _is_of_all(program: Program, workers: Set[int]) -> bool:
    """Return whether the program has only collectives of all these workers, which complete if all run it."""
    teams = {() if op.is_message else op.team for op, _ in operations(program)}
    return all(set(team) == workers for team in teams)


class AtOperation(Protocol):
    """A worker at a message, with the halves of it that still wait."""

    rank: int
    operation: Operation | None
    sends: bool
    receives: bool


class Play:
    """Programs that are simulated against each other; `happened` gets the completed operations, in order."""

    def __init__(
        self,
        programs: Mapping[int, Program],
        branch: int,
        absent: frozenset[int] = frozenset(),
        flows: Mapping[int, Flow] | None = None,
        happened: list[Happening] | None = None,
    ) -> None:
        self.happened = happened
        self._branch = branch
        self._origins = Origins(programs, flows) if flows else None
        totals = {id(program): count_operations(program) for program in programs.values()}
        self._workers = {rank: Cursor(rank, p, totals[id(p)], branch) for rank, p in programs.items()}
        self._arrived: Counter[Workers] = Counter()
        self._absent = absent
        self._pairings: defaultdict[int, Pairing] = defaultdict(Pairing)  # one for each way to distinguish movements
        self._seen: dict[object, tuple[tuple[int, ...], ...]] = {}

    def run(self) -> Mismatch | None:
        ready = deque(worker for rank, worker in sorted(self._workers.items()) if rank not in self._absent)
        left = MOST_PLAYED + 100 * sum(worker.total for worker in self._workers.values())
        while ready:
            worker = ready.popleft()
            while not worker.waits and worker.advance():
                left -= 1
                if left == 0:
                    return self._mismatch("undecided", worker)
                if worker.new_pass is not None:
                    self._skip_equal_passes(worker, worker.new_pass)
                    worker.new_pass = None
                partners = self._match(worker)
                if isinstance(partners, Mismatch):
                    return partners
                ready.extend(partner for partner in partners if partner is not worker)
        if self._absent:
            return None
        return self._stuck() or self._mixed()

    def _match(self, worker: Cursor) -> list[Cursor] | Mismatch:
        """Match a worker's new operation as far as possible; return the workers that were waiting for it."""
        op = worker.operation
        assert op is not None
        if worker.joins:
            # Workers that wait in a team operation don't move on, so it is enough to count.
            self._arrived[op.team] += worker.rank in op.team
            if self._arrived[op.team] < len(op.team):
                return []
            self._arrived[op.team] = 0
            members = [self._workers[rank] for rank in op.team]
            for other in members:
                if collective(other.operation) != collective(op):
                    return self._mismatch("amount", worker, other)
            if (mismatch := self._met(members)) is not None:
                return mismatch
            self._note(members[0], op.team)
            for other in members:
                other.joins = False
            return members
        moved = []
        for sender, receiver in self._pairs(worker, op):
            if not fit(sender, receiver):
                continue
            partner = receiver if sender is worker else sender
            if sent(sender) != expected(receiver):
                return self._mismatch("amount", worker, partner)
            if (mismatch := self._met([worker, partner])) is not None:
                return mismatch
            self._note(sender, (sender.rank, receiver.rank))
            sender.sends = receiver.receives = False
            moved.append(partner)
        return moved

    def _pairs(self, worker: Cursor, op: Operation) -> Iterator[tuple[Cursor, Cursor]]:
        """Yield the possible senders and receivers of a message in its operation, including this worker."""
        if op.dest in self._workers:
            yield worker, self._workers[op.dest]
        for source in op.team if op.from_any else [op.source]:
            if source in self._workers and worker.receives:
                yield self._workers[source], worker

    def _note(self, worker: Cursor, team: Workers) -> None:
        """Record the operation, in order, if requested."""
        if self.happened is not None and worker.operation is not None:
            self.happened.append(Happening(worker.operation, team, worker.place()))

    def _met(self, workers: Sequence[Cursor]) -> Mismatch | None:
        """Record that the workers' operations have met; a mismatch if they are adjoints of different movements."""
        if self._origins is not None:
            self._origins.meet([(w.rank, w.operation) for w in workers if w.operation is not None])
        known = [(w.rank, w.operation.movements) for w in workers if w.operation is not None and w.operation.movements]
        for way in range(min((len(movements) for _, movements in known), default=0)):
            pairing, parts = self._pairings[way], [(rank, movements[way]) for rank, movements in known]
            if not all(part.is_adjoint for _, part in parts):
                pairing.meet([(rank, part.number) for rank, part in parts])
                continue
            for (one, first), (other, second) in pairwise(parts):
                if pairing.are_apart((one, first.number), (other, second.number)):
                    return self._mismatch("adjoints", self._workers[one], self._workers[other])
        return None

    def _skip_equal_passes(self, worker: Cursor, loop: Pass) -> None:
        """Skip equal passes, when a pass of a loop starts.

        **Lemma.** The workers' next actions depend only on their positions, until a loop has no pass left. So if their
        positions equal those at an earlier time, and since then each worker's pass counts have changed in at most one
        loop, decreasing by `period`, then the same actions repeat as long as each of these loops has `period` passes
        left. All repetitions but one can be skipped: the last one is simulated, so that every loop ends in the
        simulation.
        """
        key = (worker.rank, len(worker.stack), id(loop.items), tuple(w.position() for w in self._workers.values()))
        now = tuple(w.passes_left() for w in self._workers.values())
        before, self._seen[key] = self._seen.get(key), now
        if before is None:
            return
        repeated: list[tuple[Pass, int]] = []
        for w, earlier, left in zip(self._workers.values(), before, now, strict=True):
            changed = [level for level in range(len(left)) if earlier[level] != left[level]]
            if any(earlier[level] < left[level] for level in changed) or len(changed) > 1:
                return
            repeated += [(w.stack[level], earlier[level] - left[level]) for level in changed]
        times = min((level_pass.left // period - 1 for level_pass, period in repeated), default=0)
        for level_pass, period in repeated if times > 0 else ():
            level_pass.left -= times * period

    def stop(self, rank: int) -> Stop:
        worker = self._workers[rank]
        if rank in self._absent:
            return Stop(rank, None, 0, worker.total)
        return (
            Stop(rank, worker.operation, worker.place(), worker.total)
            if worker.waits
            else Stop(rank, None, worker.total, worker.total)
        )

    def _mismatch(self, reason: str, *workers: Cursor) -> Mismatch:
        return Mismatch(reason, tuple(self.stop(worker.rank) for worker in workers), self._branch)

    def _mixed(self) -> Mismatch | None:
        if self._origins is None or (mixed := self._origins.find_mixed(self._branch)) is None:
            return None
        stops = tuple(Stop(at.worker, at.operation, at.place, at.total) for at in mixed[:2])
        return Mismatch("mixed", stops, self._branch, mixed)

    def _partners(self, worker: Cursor) -> list[int]:
        op = worker.operation
        assert op is not None
        if worker.joins:
            return [rank for rank in op.team if not self._at_same_collective(rank, op)]
        waits_for = [op.dest] if worker.sends else []
        return [rank for rank in (*waits_for, op.source if worker.receives else None) if rank is not None]

    def _at_same_collective(self, rank: int, op: Operation) -> bool:
        other = self._workers.get(rank)
        return other is not None and other.joins and other.operation is not None and other.operation.team == op.team

    def _stuck(self) -> Mismatch | None:
        """Return why workers still wait."""
        waiting = {rank: self._partners(worker) for rank, worker in sorted(self._workers.items()) if worker.waits}
        # A partner whose program has ended is more informative than a cycle.
        for rank, partners in waiting.items():
            if ended := [partner for partner in partners if partner not in waiting]:
                stop = self.stop(ended[0]) if ended[0] in self._workers else Stop(ended[0], None, 0, 0)
                return Mismatch("ended", (self.stop(rank), stop), self._branch)
        for rank, partners in waiting.items():
            if mutual := [partner for partner in partners if rank in waiting[partner]]:
                return self._mismatch("partner", self._workers[rank], self._workers[mutual[0]])
        cycle = find_cycle(min(waiting), waiting.__getitem__) if waiting else []
        return self._mismatch("cycle", *(self._workers[rank] for rank in cycle)) if cycle else None


T = TypeVar("T")


def find_cycle(start: T, waits_for: Callable[[T], Iterable[T]]) -> list[T]:
    """Return a cycle of workers each of which waits for the next, and the last one for the first; [] if there is none.

    It is the shortest one through `start`, or otherwise the shortest through a worker reached twice when following
    first partners from `start`.

    >>> waits = {0: [1], 1: [3, 2], 2: [1], 3: [2]}
    >>> find_cycle(1, waits.__getitem__), find_cycle(0, waits.__getitem__), find_cycle(4, lambda worker: [])
    ([1, 2], [1, 2], [])
    """
    met, worker = {start}, start
    while (following := next(iter(waits_for(worker)), None)) is not None:
        worker = following
        if worker in met:
            break
        met.add(worker)
    return _cycle_through(start, waits_for) or _cycle_through(worker, waits_for)


def _cycle_through(start: T, waits_for: Callable[[T], Iterable[T]]) -> list[T]:
    chains, seen = [[start]], {start}
    for chain in chains:
        for following in waits_for(chain[-1]):
            if following == start:
                return chain
            if following not in seen:
                seen.add(following)
                chains.append([*chain, following])
    return []


def fit(sender: AtOperation, receiver: AtOperation) -> bool:
    """Return whether one waits to send the message that the other waits to receive."""
    sent, received = sender.operation, receiver.operation
    if sent is None or received is None or not (sender.sends and receiver.receives):
        return False
    is_expected = received.from_any or (received.source == sender.rank and received.recv_tag in (None, sent.send_tag))
    return is_expected and sent.dest == receiver.rank


def sent(sender: AtOperation) -> tuple[int, str]:
    """Return the length and the dtype of the sent message, which both sides must agree on."""
    assert sender.operation is not None
    return sender.operation.count, sender.operation.dtype


def expected(receiver: AtOperation) -> tuple[int, str]:
    """Return the length and the dtype of the expected message, which both sides must agree on."""
    assert receiver.operation is not None
    return receiver.operation.received, receiver.operation.received_dtype or receiver.operation.dtype


def collective(op: Operation | None) -> tuple[object, ...]:
    """Return the properties of a collective that must be the same on all workers of its team."""
    assert op is not None
    return (op.kind, op.root, op.count, op.dtype, op.op)
