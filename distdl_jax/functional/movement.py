"""One differentiable function for every data movement.

A movement is a linear map of all workers' blocks; each worker's part is a hashable value with `run`, `adjoint` and
`batched`. `move` turns any of them into a JAX operation that supports jit, grad of any order in reverse mode, vmap,
checkpoint and control flow. Source: Hewett and Grady (2020), arXiv:2006.03108, the primitives as linear operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap

from distdl_jax.errors import MAPPED_OVER, PlanError
from distdl_jax.jax_compat import mapped_sizes
from distdl_jax.kernels.dtypes import in_own_width
from distdl_jax.partitions.idle_workers import say_who_is_idle
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.source_lines import user_line
from distdl_jax.tracing import cache_keys
from distdl_jax.tracing.adjoint_order import note_anchor, order_after_previous
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.marks import never_transposed, reverse_only
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.tracing.scopes import movement_scope
from distdl_jax.tracing.tie import materialize, nothing, tie
from distdl_jax.transports.agreement import MovesDataError
from distdl_jax.transports.world import Workers, World
from distdl_jax.watchdog.programs.ir import Operation, operations
from distdl_jax.watchdog.watch.status import worker_status

Parts = tuple[Array, ...]
"""An array, or the real and the imaginary part of one."""


class Movement(Protocol):
    """One worker's part of a linear data movement: an immutable, hashable value, independent of its world."""

    def __hash__(self) -> int: ...

    @property
    def differentiable(self) -> bool:
        """Whether the data has derivatives: floating or complex. It is the same on every worker."""

    def run(self, world: World, x: Array) -> Array:
        """Run it over `world`: only messages, in the order of the plan, tied to `x` and to the result."""

    def operations(self, worker: int, x: ShapeDtype) -> tuple[Operation, ...]:
        """Return the communication of `run` on `worker`, whose part it is and whose block is like `x`, in order."""

    def adjoint(self) -> Movement:
        """Return the movement F* with <F x, y> = <x, F* y>, summed over all workers."""

    def batched(self, n: int) -> Movement:
        """Return the same movement for `n` tensors, stacked in front."""


class NonlinearMovement(Movement, Protocol):
    """A nonlinear movement: its derivative depends on the input.

    Backward, its adjoint moves the result of `before_adjoint`, from which `after_adjoint` computes the cotangent.
    """

    def adjoint_input(self, y: ShapeDtype) -> ShapeDtype:
        """Return the shape and dtype of the result of `before_adjoint`, from those of the output."""

    def residual(self, x: Array, y: Array) -> Array:
        """Return the residual of the input and the output, which is batched if x is."""

    def before_adjoint(self, residual: Array, dy: Array) -> Array:
        """Return the array to move, from the cotangent of the output."""

    def after_adjoint(self, residual: Array, moved: Array, dtype: np.dtype) -> Array:
        """Return the cotangent of the input, of its `dtype`, from the moved array."""


def _is_nonlinear(part: Movement) -> TypeGuard[NonlinearMovement]:
    return hasattr(part, "before_adjoint")  # `isinstance` would check every attribute of the protocol each time


to_be_transposed = cache_keys.to_be_transposed
"""Whether the pullback that runs in this thread is itself transposed, for a directional derivative.

Then the adjoint of an adjoint is the original movement. This only matters for `replicated`: a partial gradient is
summed over the copies, and a tangent is copied like its value.
"""


@dataclass(frozen=True)
class _Pullback:
    """The adjoint of a movement, with that movement as its own adjoint."""

    of: Movement

    @property
    def differentiable(self) -> bool:
        return self.of.differentiable

    def run(self, world: World, x: Array) -> Array:
        return self.of.adjoint().run(world, x)

    def operations(self, worker: int, x: ShapeDtype) -> tuple[Operation, ...]:
        return self.of.adjoint().operations(worker, x)

    def adjoint(self) -> Movement:
        return self.of

    def batched(self, n: int) -> Movement:
        return _Pullback(self.of.batched(n))


def adjoint_operations(part: Movement, worker: int, y: ShapeDtype) -> tuple[Operation, ...]:
    """Return the communication of a movement's adjoint on `worker`, if the movement's output block was like `y`."""
    if not part.differentiable:
        return ()
    return part.adjoint().operations(worker, part.adjoint_input(y) if _is_nonlinear(part) else y)


def move(world: World, part: Movement, x: Array) -> Array:
    """Return this worker's block after the movement, given its block before."""
    if trace_context.whole_program:
        raise MovesDataError.by("a function or a layer")
    say_who_is_idle(world)
    with movement_scope():
        if not part.differentiable:
            return _run(world, part, reverse_only(x))
        parts, anchor, _ = _move(world, part, reverse_only(order_after_previous(x)))
    note_anchor(anchor)
    return never_transposed(_joined(parts))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(world: World, part: Movement, x: Array) -> tuple[Parts, Array, Array | None]:
    """Return the block after the movement, an empty anchor for it, whose use makes the adjoint run, and the residual.

    All three are results of one operation, so that a policy of `jax.checkpoint` saves either all or none of them.
    Complex numbers are split into two parts, since it can't save them.
    """
    if _is_nonlinear(part):
        # XLA might recompute x for the residual, off by an ulp.
        x = materialize(x)
    y = _run(world, part, x)
    residual = part.residual(x, y) if _is_nonlinear(part) else None
    return _parts(y), tie(nothing(y.dtype), y), residual


def _parts(y: Array) -> Parts:
    """Return `y`, or its real and imaginary parts."""
    return (y.real, y.imag) if jnp.issubdtype(y.dtype, jnp.complexfloating) else (y,)


def _joined(parts: Parts) -> Array:
    """Return the array whose parts `_parts` returned."""
    return lax.complex(*parts) if len(parts) == 2 else parts[0]


@in_own_width
def _forward(
    world: World, part: Movement, x: Array
) -> tuple[tuple[Parts, Array, Array | None], tuple[Array, Array, Array | None]]:
    # The residual depends on `x`: if `x` is batched or differentiated, so is the residual. (An empty slice of `x` would
    # not do: JAX replaces it by a constant if `x` is empty.)
    trace_of_x = tie(nothing(x.dtype), x)
    parts, anchor, residual = _move(world, part, x)
    return (parts, anchor, residual), (trace_of_x, nothing(parts[0].dtype), residual)


@in_own_width
def _backward(
    world: World, part: Movement, of_x: tuple[Array, Array, Array | None], cotangents: tuple[Parts, Array, Any]
) -> tuple[Array]:
    trace_of_x, like_y, residual = of_x
    of_parts, of_anchor, _ = cotangents
    # A cotangent that is constant on this worker (its output is unused, or empty) is batched as on the other workers.
    dy = tie(_cotangent(of_parts, like_y.dtype), of_anchor, trace_of_x)
    if _is_nonlinear(part):
        assert residual is not None
        sums = _moved_back(world, part.adjoint(), part.before_adjoint(residual, dy))
        return (part.after_adjoint(residual, sums, dy.dtype),)
    return (pulled_back(world, part, dy),)


def pulled_back(world: World, part: Movement, dy: Array) -> Array:
    """Return the cotangent of a linear movement's input, from that of its output."""
    return _moved_back(world, _Pullback(part) if to_be_transposed.value else part.adjoint(), dy)


def _cotangent(parts: Parts, dtype: np.dtype) -> Array:
    """Return the cotangent of an array from those of its parts, which are of `dtype`.

    A user-defined derivative may have another dtype, but messages have the value's. JAX's cotangent of a complex number
    is the conjugate of the number formed by its parts' cotangents.
    """
    real, *imaginary = (part.astype(dtype) for part in parts)
    return _joined((real, *(-part for part in imaginary)))


def _moved_back(world: World, adjoint: Movement, dy: Array) -> Array:
    """Return the adjoint of a cotangent, which is itself differentiable, for reverse over reverse."""
    parts, anchor, _ = _move(world, adjoint, reverse_only(dy))
    note_anchor(anchor)
    return _joined(parts)


_move.defvjp(_forward, _backward)


def _run(world: World, part: Movement, x: Array) -> Array:
    """Run the movement under jit, so that eager calls with an equal part don't recompile."""
    run = _call if trace_context.movements_as_calls else _inlined
    with _agreed_on_sizes(world, part, x):
        return run(world, part, x)


def _movement(world: World, part: Movement, x: Array) -> Array:
    @custom_vmap
    def run(x: Array) -> Array:
        return part.run(world, x)

    @run.def_vmap
    @in_own_width
    def batched(axis_size: int, in_batched: list[bool], x: Array) -> tuple[Any, bool]:
        _agree_on_size(world, part, x, axis_size)
        return _run(world, part.batched(axis_size), x), True

    return run(jnp.asarray(x))


_call = jax.jit(_movement, static_argnums=(0, 1))
_inlined = jax.jit(_movement, static_argnums=(0, 1), inline=True)


# --- under vmap -------------------------------------------------------------------------------------------------------

# n tensors at once, under `jax.vmap` or `jax.jacrev`, are sent in one message, n times as long. With another n on the
# other side the received block differs from the sent one; nothing else would detect that outside `dj.jit`. So while it
# is traced or run eagerly each worker exchanges n with its partners, but not with others, which may map over other
# numbers.


def _agreed_on_sizes(world: World, part: Movement, x: Any) -> AbstractContextManager[None]:
    """Surround a movement of `x`, possibly later a tracer of `vmap`'s: its workers agree on the batch size.

    **Raises:** `PlanError` if they map over different numbers.
    """
    agreed, sizes = trace_context.sizes_agreed, mapped_sizes(x)
    if sizes and not agreed:
        _compare_sizes(world, _teams(world, part, jax.ShapeDtypeStruct(x.shape, x.dtype)), sizes)
    return trace_context.set(sizes_agreed=agreed or bool(sizes))


_agreed: WeakKeyDictionary[World, set[tuple[Workers, int]]] = WeakKeyDictionary()
"""The sizes that the workers of a team have agreed on in previously traced programs."""


def _agree_on_size(world: World, part: Movement, x: Array, size: int) -> None:
    """Agree on a size in a rule of JAX's, for `x` with the mapped dimension in front, of a previously traced program.

    How often JAX applies such a rule depends on its caches, and in loops on the constants on this worker. So a team
    agrees once on each size; when `dj.jit` traces, not at all, since that compares the programs.
    """
    if trace_context.sizes_agreed or worker_status().here.traces:
        return
    shape_dtype, agreed = jax.ShapeDtypeStruct(x.shape[1:], x.dtype), _agreed.setdefault(world, set())
    teams = [team for team in _teams(world, part, shape_dtype) if (team, size) not in agreed]
    _compare_sizes(world, teams, (size,))
    agreed.update((team, size) for team in teams)


def _compare_sizes(world: World, teams: Sequence[Workers], sizes: tuple[int, ...]) -> None:
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


def _teams(world: World, part: Movement, x: jax.ShapeDtypeStruct) -> tuple[Workers, ...]:
    """Return the teams of this worker's operations, in the same order on all workers."""
    hashable: Any = world  # which is not in the protocol
    return _read_teams(hashable, part, x)


@lru_cache(maxsize=4096)
def _read_teams(world: Any, part: Movement, x: jax.ShapeDtypeStruct) -> tuple[Workers, ...]:
    program = read_program(world.transport, jax.make_jaxpr(lambda x: part.run(world, x))(x).jaxpr)
    teams: set[Workers] = set()
    for operation, _ in operations(program):
        if operation.is_message:
            partners = {operation.dest, operation.source} - {None, world.rank}
            teams.update(tuple(sorted((world.rank, partner))) for partner in partners if partner is not None)
        else:
            teams.add(tuple(sorted(operation.team)))
    return tuple(sorted(team for team in teams if len(team) > 1))
