"""Movements under `jax.vmap`, and `jax.jacrev`, which maps: communicating workers must use the same batch size.

n tensors at once are sent in one message, n times as long. With another n on the other side the received block differs
from the sent one; nothing else would detect that outside `dj.jit`. So while it is traced or run eagerly each worker
exchanges n with its partners, but not with others, which may map over other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax
from jax import Array

from distdl_jax.errors import MAPPED_OVER, PlanError
from distdl_jax.jax_compat import mapped_sizes
from distdl_jax.source_lines import user_line
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.transports.world import Workers, World
from distdl_jax.watchdog.programs.ir import operations
from distdl_jax.watchdog.watch.status import worker_status


class Runs(Protocol):
    """The part of a movement that determines the partners."""

    def __hash__(self) -> int: ...

    def run(self, world: World, x: Array) -> Array:
        """Run it."""


def agreed_on_sizes(world: World, part: Runs, x: Any) -> AbstractContextManager[None]:
    """Surround a movement of `x`, possibly later a tracer of `vmap`'s: its workers agree on the batch size.

    **Raises:** `PlanError` if they map over different numbers.
    """
    agreed, sizes = trace_context.sizes_agreed, mapped_sizes(x)
    if sizes and not agreed:
        _compare(world, _teams(world, part, jax.ShapeDtypeStruct(x.shape, x.dtype)), sizes)
    return trace_context.set(sizes_agreed=agreed or bool(sizes))


_agreed: WeakKeyDictionary[World, set[tuple[Workers, int]]] = WeakKeyDictionary()
"""The sizes that the workers of a team have agreed on in previously traced programs."""


def agree_on_size(world: World, part: Runs, x: Array, size: int) -> None:
    """Agree on a size in a rule of JAX's, for `x` with the mapped dimension in front, of a previously traced program.

    How often JAX applies such a rule depends on its caches, and in loops on the constants on this worker. So a team
    agrees once on each size; when `dj.jit` traces, not at all, since that compares the programs.
    """
    if trace_context.sizes_agreed or worker_status().here.traces:
        return
    shape_dtype, agreed = jax.ShapeDtypeStruct(x.shape[1:], x.dtype), _agreed.setdefault(world, set())
    teams = [team for team in _teams(world, part, shape_dtype) if (team, size) not in agreed]
    _compare(world, teams, (size,))
    agreed.update((team, size) for team in teams)


def _compare(world: World, teams: Sequence[Workers], sizes: tuple[int, ...]) -> None:
    for team in teams:
        sizes_of = world.agree(team, MAPPED_OVER, sizes)
        for worker, other in sizes_of.items():
            if other != sizes_of[team[0]]:
                raise PlanError(
                    f"At {user_line()}: worker {team[0]} maps over {_text(sizes_of[team[0]])}, but worker {worker} "
                    f"over {_text(other)}, and data moves between them. Under jax.vmap all of a movement's workers "
                    "must map over the same number. jax.jacrev maps over the elements of this worker's block of the "
                    "output, so the blocks must have equal numbers of elements; for other blocks use the rows of the "
                    "whole Jacobian: `y, pullback = jax.vjp(f, x)`, and jax.vmap(pullback) of this worker's columns "
                    "of the n x n identity, where n is the length of the whole output."
                )


def _text(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _teams(world: World, part: Runs, x: jax.ShapeDtypeStruct) -> tuple[Workers, ...]:
    """Return the teams of this worker's operations, in the same order on all workers."""
    hashable: Any = world  # which is not in the protocol
    return _read_teams(hashable, part, x)


@lru_cache(maxsize=4096)
def _read_teams(world: Any, part: Runs, x: jax.ShapeDtypeStruct) -> tuple[Workers, ...]:
    program = read_program(world.transport, jax.make_jaxpr(lambda x: part.run(world, x))(x).jaxpr)
    teams: set[Workers] = set()
    for operation, _ in operations(program):
        if operation.is_message:
            partners = {operation.dest, operation.source} - {None, world.rank}
            teams.update(tuple(sorted((world.rank, partner))) for partner in partners if partner is not None)
        else:
            teams.add(tuple(sorted(operation.team)))
    return tuple(sorted(team for team in teams if len(team) > 1))
