"""Check that the workers pass the same values to the same calls, by the origins of matched inputs and of results.

Calls of one kind whose order differs between workers, as in a loop over a set, complete, but mix their values. But
values need not have the same origin everywhere: a worker may hold a constant, or choose by its rank what to pass. So
two workers are said to mix calls only if each passes, in another call of the same kind, what the other passes here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate, combinations
from operator import or_
from typing import NamedTuple

from distdl_jax.watchdog.programs.ir import Flow, Operation, Origin, Program, operations

Movement = tuple[int, int]
"""A worker, and the number of a movement in its program."""


class Pairing:
    """The movements that have met, in the forward pass.

    Two movements of equal plans have equal messages. If some workers omit the adjoint of one, and others the adjoint of
    the other, the remaining two match, and each worker gets another one's gradient.
    """

    def __init__(self) -> None:
        self._met: dict[Movement, dict[int, set[Movement]]] = {}  # by worker; one dictionary for all that have met

    def meet(self, movements: Sequence[Movement]) -> None:
        """Record that operations of these have met: they are one movement."""
        known = {id(met): met for met in map(self._of, movements)}
        if len(known) == 1:
            return
        together: dict[int, set[Movement]] = {}
        for each in known.values():
            for worker, of_worker in each.items():
                together.setdefault(worker, set()).update(of_worker)
        for of_worker in together.values():
            for movement in of_worker:
                self._met[movement] = together

    def are_apart(self, one: Movement, other: Movement) -> bool:
        """Return whether adjoints of these must not meet: one has met another movement of that worker."""
        of_one, of_other = self._met.get(one, {}), self._met.get(other, {})
        return of_one is not of_other and (other[0] in of_one or one[0] in of_other)

    def one_of_each(self) -> list[dict[int, int]]:
        """Return the movements by their numbers on the workers that have one of each."""
        found = {id(met): met for met in self._met.values()}.values()
        numbers = [{worker: [n for _, n in of_worker] for worker, of_worker in met.items()} for met in found]
        return [
            {worker: n[0] for worker, n in each.items()} for each in numbers if all(len(n) == 1 for n in each.values())
        ]

    def _of(self, movement: Movement) -> dict[int, set[Movement]]:
        return self._met.get(movement) or {movement[0]: {movement}}


class Passed(NamedTuple):
    """What a worker passes, or returns, as text; for a movement, in its first operation, the `place`-th (from 1)."""

    worker: int
    what: str
    operation: Operation | None = None
    place: int = 0
    total: int = 0


class Mixed(NamedTuple):
    """Two workers that mix calls of movements or of a layer, or results: `layer` or `result` tells which."""

    one: Passed
    other: Passed
    layer: str = ""
    result: str = ""


class _Row(NamedTuple):
    """The values that workers pass in one call, or return at one place, by world rank: their origins and kinds.

    - `groups`: the workers to compare with one another.
    """

    origins: Mapping[int, Origin]
    kinds: Mapping[int, object]
    groups: Sequence[Sequence[int]]


class Origins:
    """The calls of movements that have met, and the values that the workers pass in them."""

    def __init__(self, programs: Mapping[int, Program], flows: Mapping[int, Flow]) -> None:
        self._listed = {rank: [op for op, _ in operations(program)] for rank, program in programs.items()}
        self._flows = flows
        self._pairing = Pairing()
        self._meetings: dict[tuple[Movement, ...], None] = {}

    def meet(self, operations: Sequence[tuple[int, Operation]]) -> None:
        """Record that these operations, by world rank, have met."""
        calls = tuple((rank, op.call) for rank, op in operations if op.call is not None)
        if len(calls) > 1 and calls not in self._meetings:
            self._meetings[calls] = None
            self._pairing.meet(calls)

    def find_mixed(self, branch: int = 0) -> Mixed | None:
        """Return the first calls that two workers mix, whatever conditionals deliver, or if all take this branch; if
        there are none, the first results."""
        first, *others = self._flows.values()
        if any(flow.arguments != first.arguments for flow in others):
            return None
        taken = {rank: flow.where(branch) for rank, flow in self._flows.items()}
        for flows in (self._flows, taken)[: 1 + (taken != self._flows)]:
            comparison = _ValueComparison(self._listed, flows, self._pairing.one_of_each())
            found = comparison.mixed_layers() or comparison.mixed_movements(self._meetings)
            if (found := found or comparison.mixed_results()) is not None:
                return found
        return None


class _ValueComparison:
    """The values that workers pass: bit i stands for the argument or constant `names[i]`, and after these n, bit n + k
    for a movement, `calls[k]`, by its numbers on its workers."""

    def __init__(
        self, listed: Mapping[int, list[Operation]], flows: Mapping[int, Flow], calls: list[dict[int, int]]
    ) -> None:
        self._listed, self._flows, self._calls = listed, flows, calls
        arguments = next(iter(flows.values())).arguments
        constants = dict.fromkeys(path for flow in flows.values() for _, path in flow.constants)
        self._names = [*arguments, *constants]
        self._leaves = len(self._names)
        bits = {movement: 1 << self._leaves + k for k, call in enumerate(calls) for movement in call.items()}
        places = {path: n for n, path in enumerate(constants, len(arguments))}
        bits |= {(rank, number): 1 << places[path] for rank, flow in flows.items() for number, path in flow.constants}
        self._closures = {rank: _Closure(rank, flow, bits) for rank, flow in flows.items()}
        self._leaf_mask = (1 << self._leaves) - 1
        # Two workers can compare only constants that both have, and movements in which both take part.
        self._known = dict.fromkeys(flows, (1 << len(arguments)) - 1)
        for (rank, _), bit in bits.items():
            self._known[rank] |= bit

    def mixed_layers(self) -> Mixed | None:
        """Compare the parameters that workers pass to the calls of each layer, in order."""
        for layer in dict.fromkeys(call.layer for flow in self._flows.values() for call in flow.layers):
            calls = {rank: [call for call in flow.layers if call.layer == layer] for rank, flow in self._flows.items()}
            calls = {rank: found for rank, found in calls.items() if found}
            if len(set(map(len, calls.values()))) > 1:
                continue
            rows = [
                _Row(
                    {rank: self._closures[rank].of(call.origin) for rank, call in zip(calls, row, strict=True)},
                    dict.fromkeys(calls, layer),
                    [tuple(calls)],
                )
                for row in zip(*calls.values(), strict=True)
            ]
            if (found := self._mixed(rows, self._leaf_mask)) is not None:
                n, one, other = found
                return Mixed(one, other, f"{layer.partition('(')[0]}, {calls[one.worker][n].line}")
        return None

    def mixed_movements(self, meetings: Mapping[tuple[Movement, ...], None]) -> Mixed | None:
        """Compare the values passed in matched calls: leaves, and if these are inconclusive, earlier movements, and
        which leaves are new there, for sums of values."""
        operations: defaultdict[Movement, list[Operation]] = defaultdict(list)
        for rank, listed in self._listed.items():
            for op in listed:
                if op.call is not None:
                    operations[rank, op.call].append(op)
        place = {movement: n for n, call in enumerate(self._calls) for movement in call.items()}
        groups: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for meeting in meetings:
            if meeting[0] in place:
                groups[place[meeting[0]]].append(tuple(rank for rank, _ in meeting))
        rows = [
            _Row(
                {rank: self._closures[rank].before[number] for rank, number in call.items()},
                {movement[0]: operations[movement] for movement in call.items()},
                groups[n],
            )
            for n, call in enumerate(self._calls)
        ]
        new = [
            row._replace(origins={rank: self._closures[rank].new[number] for rank, number in call.items()})
            for row, call in zip(rows, self._calls, strict=True)
        ]
        known = self._leaf_mask
        # Leaves first: they have names. Then movements, which tell sums of values apart that have the same leaves.
        found = self._mixed(rows, known) or self._mixed(rows, ~known) or self._mixed(new, known, are_permuted=True)
        if found is not None:
            n, *passed = found
            one, other = (
                each._replace(
                    operation=(op := operations[each.worker, self._calls[n][each.worker]][0]),
                    place=self._place(each.worker, op),
                    total=len(self._listed[each.worker]),
                )
                for each in passed
            )
            return Mixed(one, other)
        return None

    def mixed_results(self) -> Mixed | None:
        """Compare the movements from which results come."""
        rows = [
            _Row(
                {rank: self._closures[rank].of(result.origin) for rank, result in zip(self._flows, row, strict=True)},
                {rank: result.kind for rank, result in zip(self._flows, row, strict=True)},
                [tuple(self._flows)],
            )
            for row in zip(*(flow.results for flow in self._flows.values()), strict=False)
        ]
        if (found := self._mixed(rows, ~self._leaf_mask)) is None:
            return None
        n, one, other = found
        return Mixed(one, other, result=self._flows[one.worker].results[n].path)

    def _mixed(
        self, rows: Sequence[_Row], mask: Origin, *, are_permuted: bool = False
    ) -> tuple[int, Passed, Passed] | None:
        """Return the first place at which each of two workers passes what the other passes elsewhere, and the values.

        `are_permuted`: only if both pass the same values in total, unlike in a reduce-scatter written by hand.
        """
        for n, row in enumerate(rows):
            for one, other in dict.fromkeys(pair for group in row.groups for pair in _different(group, row.origins)):
                # A value that one of the two doesn't know by this name can't have been mixed up with another.
                masks = mask & self._known[other], mask & self._known[one]
                first, second = row.origins[one] & masks[0], row.origins[other] & masks[1]
                only_first, only_second = first & ~second, second & ~first
                if not (only_first and only_second):
                    continue  # one passes more than the other, as where a block is empty: nothing is swapped
                # Where the other passes what is missing here: only calls that could be confused, of the same kind.
                same_kind = [
                    (call.origins[one] & masks[0], call.origins[other] & masks[1])
                    for call in rows
                    if all(rank in call.kinds and call.kinds[rank] == row.kinds[rank] for rank in (one, other))
                ]
                if are_permuted and reduce(or_, (a for a, _ in same_kind)) != reduce(or_, (b for _, b in same_kind)):
                    continue
                swapped = [(a, b) for a, b in same_kind if _both_have_more(a, b)]
                if any(b & only_first and not _both_have_more(first, b) for _, b in swapped) and any(
                    a & only_second and not _both_have_more(a, second) for a, _ in swapped
                ):
                    return n, Passed(one, self._words(one, only_first)), Passed(other, self._words(other, only_second))
        return None

    def _words(self, rank: int, origin: Origin) -> str:
        names = [name for leaf, name in enumerate(self._names) if origin >> leaf & 1]
        for n, call in enumerate(self._calls):
            if not names and origin >> self._leaves + n & 1:
                op = next(op for op in self._listed[rank] if op.call == call[rank])
                names = [f"the result of operation {self._place(rank, op)}, {op.place.line}"]
        return ", ".join(names[:MOST]) + (", ..." if len(names) > MOST else "")

    def _place(self, rank: int, operation: Operation) -> int:
        return next(n for n, op in enumerate(self._listed[rank], 1) if op is operation)


MOST = 3
"""The number of leaves that are named."""


def _different(group: Sequence[int], origins: Mapping[int, Origin]) -> list[tuple[int, int]]:
    """Return, for each two origins in a group of workers, the first workers that have them."""
    first = {origins[rank]: rank for rank in sorted(group, reverse=True)}
    return list(combinations(sorted(first.values()), 2))


def _both_have_more(one: Origin, other: Origin) -> bool:
    """Return whether each of two origins has something that the other lacks."""
    return bool(one & ~other and other & ~one)


class _Closure:
    """All origins of the values in a worker's program, including the inputs of movements.

    - `before`: of the input of each call of a movement; `new`: the part of it that no earlier call was given.
    """

    def __init__(self, rank: int, flow: Flow, bits: Mapping[Movement, Origin]) -> None:
        self._leaves = len(flow.arguments)
        self._bits = [bits.get((rank, number), 0) for number in range(len(flow.movements))]
        self.before: list[Origin] = [0] * len(flow.movements)
        changed = True
        while changed:  # twice only for loops: inputs of movements come from earlier ones
            changed = False
            for number, origin in enumerate(flow.movements):
                if (found := self.of(origin)) != self.before[number]:
                    self.before[number], changed = found, True
        before = accumulate(self.before, or_, initial=0)
        self.new = [origin & ~earlier for origin, earlier in zip(self.before, before, strict=False)]

    def of(self, origin: Origin) -> Origin:
        """Return the origins of a value with this origin, through all movements."""
        found, movements = origin & (1 << self._leaves) - 1, origin >> self._leaves
        while movements:
            number = (movements & -movements).bit_length() - 1
            found |= self._bits[number] | self.before[number]
            movements &= movements - 1
        return found
