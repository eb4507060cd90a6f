"""Movements under `jax.vmap`, and `jax.jacrev`, which maps: that all who exchange messages map over as many.

n tensors at once travel in one message, n times as long. With another n on the other side, what is received is not
what was sent, or is a part of it; nothing else would say so outside `dj.jit`. So while it is traced or run eagerly the
workers tell each other n: each its partners, and no others, since those apart from them may map over what they like.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax
from jax import Array

from distdl_jax.compat import mapped_sizes
from distdl_jax.errors import MAPPED_OVER, PlanError
from distdl_jax.programs.ir import operations
from distdl_jax.source_lines import user_line
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.watchdog.status import worker_status
from distdl_jax.world import Workers, World


class Runs(Protocol):
    """What of a movement is needed to see whom it talks to."""

    def __hash__(self) -> int: ...

    def run(self, world: World, x: Array) -> Array:
        """Carry it out."""


class _Agreed(threading.local):
    """Of this thread: whether the movement that it runs was agreed on, whatever JAX traces, or has traced, of it."""

    already = False


_agreed = _Agreed()


@contextmanager
def compared_as_a_whole() -> Iterator[None]:
    """Around the trace of a program that is compared with the other workers': no need to agree on anything here.

    Where a worker maps nothing, since JAX made a constant of `y[array]` for a y without elements, it could not know
    that the others agree; the comparison names that constant.
    """
    before, _agreed.already = _agreed.already, True
    try:
        yield
    finally:
        _agreed.already = before


@contextmanager
def agreed_on_sizes(world: World, part: Runs, x: Any) -> Iterator[None]:
    """Around a movement of `x`, by now or one day a tracer of `vmap`'s: its workers agree on over how many it maps.

    **Raises:** `PlanError` where they map over different numbers.
    """
    if (sizes := mapped_sizes(x)) and not _agreed.already:
        _agree(world, part, jax.ShapeDtypeStruct(x.shape, x.dtype), sizes)
    before, _agreed.already = _agreed.already, _agreed.already or bool(sizes)
    try:
        yield
    finally:
        _agreed.already = before


_known: WeakKeyDictionary[World, set[tuple[Workers, int]]] = WeakKeyDictionary()
"""What was agreed on between the workers of a team, in programs that were traced before."""


def agree_on_size(world: World, part: Runs, x: Array, size: int) -> None:
    """The same in a rule of JAX's, for `x` with the mapped dimension in front, of a program that was traced before.

    How often JAX applies such a rule depends on its caches, and in loops on what is constant on this worker. So a team
    agrees once on each size; in what `dj.jit` traces not at all, for that compares the programs.
    """
    if _agreed.already or worker_status().agreements is not None:
        return
    shape_dtype, known = jax.ShapeDtypeStruct(x.shape[1:], x.dtype), _known.setdefault(world, set())
    teams = [team for team in _teams(world, part, shape_dtype) if (team, size) not in known]
    _tell(world, teams, (size,))
    known.update((team, size) for team in teams)


def _agree(world: World, part: Runs, x: jax.ShapeDtypeStruct, sizes: tuple[int, ...]) -> None:
    _tell(world, _teams(world, part, x), sizes)


def _tell(world: World, teams: Sequence[Workers], sizes: tuple[int, ...]) -> None:
    for team in teams:
        told = world.agree(team, MAPPED_OVER, sizes)
        for worker, its in told.items():
            if its != told[team[0]]:
                raise PlanError(
                    f"At {user_line()}: worker {team[0]} maps over {_text(told[team[0]])}, but worker {worker} over "
                    f"{_text(its)}, and data moves between them. Under jax.vmap all of a movement's workers must map "
                    "over as many. jax.jacrev maps over the elements of this worker's block of the output, so the "
                    "blocks must have as many elements; with other blocks take the rows of the whole Jacobian: "
                    "`y, pullback = jax.vjp(f, x)`, and jax.vmap(pullback) of this worker's columns of the n x n "
                    "identity, where n is the length of the whole output."
                )


def _text(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _teams(world: World, part: Runs, x: jax.ShapeDtypeStruct) -> tuple[Workers, ...]:
    """Those that this worker's part has operations with, in an order that is the same on all workers."""
    carrier: Any = world  # it is hashable, as what is cached must be
    return _teams_of(carrier, part, x)


@lru_cache(maxsize=4096)
def _teams_of(world: Any, part: Runs, x: jax.ShapeDtypeStruct) -> tuple[Workers, ...]:
    program = read_program(world.transport, jax.make_jaxpr(lambda x: part.run(world, x))(x).jaxpr)
    teams: set[Workers] = set()
    for operation, _ in operations(program):
        if operation.is_message:
            partners = {operation.dest, operation.source} - {None, world.rank}
            teams.update(tuple(sorted((world.rank, partner))) for partner in partners if partner is not None)
        else:
            teams.add(tuple(sorted(operation.team)))
    return tuple(sorted(team for team in teams if len(team) > 1))
