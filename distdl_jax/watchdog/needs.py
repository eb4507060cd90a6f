"""What a worker's part in a plan needs of others: which of them must take part for it to end, and whom it talks to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distdl_jax.programs.ir import Cond, Loop, Operation, Program

_NOBODY: frozenset[int] = frozenset()
_ALL_NEED_ALL = frozenset({"allreduce", "allgather", "alltoall", "barrier"})


@dataclass(frozen=True)
class Needs:
    """One worker's part in the plan of a function.

    - `needs`: the workers without which it can't end. MPI may keep a message that is sent, and let a root go.
    - `talks`: the workers that it has any operation with.
    - `fixed`: whether its operations are the same whatever the data say.
    """

    needs: frozenset[int] = _NOBODY
    talks: frozenset[int] = _NOBODY
    fixed: bool = True


def needs_of(worker: int, program: Program) -> Needs:
    """Those of the worker (world rank) with this program."""
    needs: set[int] = set()
    talks: set[int] = set()
    fixed = True

    def walk(items: Program, happens: bool) -> None:
        nonlocal fixed
        for item in items:
            match item:
                case Operation():
                    talks.update(_partners(item))
                    if happens:
                        needs.update(_needed(worker, item))
                case Loop(length, body):
                    fixed = fixed and (length is not None or not body)
                    walk(body, happens and bool(length))
                case Cond(branches):
                    fixed = fixed and not any(branches)
                    for branch in branches:
                        walk(branch, False)

    walk(program, True)
    mine = {worker}
    return Needs(frozenset(needs - mine), frozenset(talks - mine), fixed)


def in_every(versions: Iterable[Needs]) -> Needs:
    """What holds for each of several versions of a plan."""
    first, *others = versions
    needs, talks, fixed = first.needs, first.talks, first.fixed
    for other in others:
        needs, talks, fixed = needs & other.needs, talks | other.talks, fixed and other.fixed
    return Needs(needs, talks, fixed)


def takes_all(programs: Mapping[int, Program]) -> bool:
    """Whether a function must be called by all workers or by none: each is bound to every other one, by operations of
    the two or of others in between, whatever the data say. What some workers do among themselves the others may skip.
    """
    bound = {worker: set(_sure_partners(program)) for worker, program in programs.items()}
    for worker, partners in bound.items():
        for partner in partners:
            bound.get(partner, set()).add(worker)
    seen: set[int] = set()
    ahead = [min(bound)]
    while ahead:
        if (worker := ahead.pop()) not in seen:
            seen.add(worker)
            ahead.extend(bound.get(worker, ()))
    return len(bound) > 1 and seen.issuperset(bound)


Plans = Mapping[str, Mapping[int, Needs]]
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


def _needed(worker: int, operation: Operation) -> Iterable[int]:
    if operation.is_message:
        return [] if operation.source is None else [operation.source]
    if operation.kind in _ALL_NEED_ALL:
        return operation.team
    if operation.kind == "bcast" and operation.root is not None:
        return [operation.root]
    return operation.team if operation.kind == "reduce" and operation.root == worker else []
