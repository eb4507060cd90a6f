"""Dependencies of a worker's part in a plan: the workers that must take part for it to end, and its partners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distdl_jax.watchdog.programs.ir import Cond, Loop, Operation, Program, operations

_NOBODY: frozenset[int] = frozenset()
_ALL_NEED_ALL = frozenset({"allreduce", "allgather", "alltoall", "barrier"})


@dataclass(frozen=True)
class Dependencies:
    """The workers on which one worker's part in the plan of a function depends.

    - `required`: the workers without which the part can't end, possibly including the worker itself. MPI may buffer a
      sent message, and let a root continue.
    - `partners`: the workers with which it has any operation.
    - `fixed`: whether its operations and partners are independent of the data.
    """

    required: frozenset[int] = _NOBODY
    partners: frozenset[int] = _NOBODY
    fixed: bool = True


def dependencies_of(worker: int, program: Program) -> Dependencies:
    """Return the dependencies of the worker (world rank) with this program."""
    required: set[int] = set()
    partners: set[int] = set()
    fixed = True

    def walk(items: Program, happens: bool) -> None:
        nonlocal fixed
        for item in items:
            match item:
                case Operation():
                    partners.update(item.team if item.from_any else _partners(item))
                    fixed = fixed and not item.from_any
                    if happens:
                        required.update(_required(worker, item))
                # A loop of unknown length may run no pass: what is in it may happen, and isn't required.
                case Loop(length, body):
                    fixed = fixed and (length is not None or not body)
                    walk(body, happens and bool(length))
                case Cond(branches):
                    fixed = fixed and not any(branches)
                    for branch in branches:
                        walk(branch, False)

    walk(program, True)
    return Dependencies(frozenset(required), frozenset(partners), fixed)


def dependencies_of_all(programs: Mapping[int, Program], size: int) -> dict[int, Dependencies]:
    """Return the dependencies of each worker in a plan: the workers' programs.

    Workers with the same program share one result, so each is among its own dependencies.
    """
    known: dict[object, Dependencies] = {}
    roots: dict[int, set[int | None]] = {}

    def of(worker: int, program: Program) -> Dependencies:
        # A reduction treats its root differently, so each root has a separate result.
        if id(program) not in roots:
            roots[id(program)] = {op.root for op, _ in operations(program) if op.kind == "reduce"}
        key = (id(program), worker if worker in roots[id(program)] else None)
        if key not in known:
            known[key] = dependencies_of(worker, program)
        return known[key]

    return {worker: of(worker, programs.get(worker, ())) for worker in range(size)}


def in_both(one: Mapping[int, Dependencies], other: Mapping[int, Dependencies]) -> dict[int, Dependencies]:
    """Return what holds for each worker in either of two plans of a function; equal results are shared."""
    known: dict[tuple[int, int], Dependencies] = {}
    for a, b in ((one[worker], other[worker]) for worker in one):
        if (id(a), id(b)) not in known:
            both = Dependencies(a.required & b.required, a.partners | b.partners, a.fixed and b.fixed)
            known[id(a), id(b)] = both
    return {worker: known[id(one[worker]), id(other[worker])] for worker in one}


def takes_all(programs: Mapping[int, Program]) -> bool:
    """Return whether a function must be called by all workers or by none.

    Then each worker is bound to every other one, by operations of the two or of others in between, independent of the
    data. Operations among some workers may be skipped by the others.
    """
    sharing: dict[int, tuple[Program, set[int]]] = {}
    for worker, program in programs.items():
        sharing.setdefault(id(program), (program, set()))[1].add(worker)
    groups: list[set[int]] = []
    for program, workers in sharing.values():
        if partners := set(_sure_partners(program)):
            bound = workers | partners
            joined = [group for group in groups if not group.isdisjoint(bound)] or [bound]
            joined[0].update(bound, *joined[1:])
            groups = [joined[0], *(group for group in groups if group.isdisjoint(bound))]
    return len(programs) > 1 and len(groups) == 1 and groups[0] >= programs.keys()


Plans = Mapping[str, Mapping[int, Dependencies]]
"""By the function's name and the worker."""


def _sure_partners(program: Program) -> Iterable[int]:
    for item in program:
        match item:
            case Operation():
                yield from _partners(item)
            case Loop(length, body) if length:
                yield from _sure_partners(body)


def _partners(operation: Operation) -> Iterable[int]:
    if operation.is_message:
        return [rank for rank in (operation.dest, operation.source) if rank is not None]
    return operation.team


def _required(worker: int, operation: Operation) -> Iterable[int]:
    if operation.is_message:
        return [] if operation.source is None else [operation.source]
    if operation.kind in _ALL_NEED_ALL:
        return operation.team
    if operation.kind == "bcast" and operation.root is not None:
        return [operation.root]
    return operation.team if operation.kind == "reduce" and operation.root == worker else []
