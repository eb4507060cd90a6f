"""One differentiable function for every data movement.

A movement is a linear map from what one worker holds to what it is to hold, that worker's part of a plan: a hashable
value that knows how to run, its adjoint, and itself over a batch. `move` turns any of them into a JAX operation that
takes jit, grad of any order in reverse mode, vmap, checkpoint and control flow. Source: Hewett and Grady (2020),
arXiv:2006.03108, the primitives as linear operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap

from distdl_jax.tracing.adjoint_order import note_anchor, order_after_previous
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.forward_mode_error import never_transposed, reverse_only
from distdl_jax.tracing.materialize import materialize
from distdl_jax.tracing.program_reader import movement_scope
from distdl_jax.tracing.tie import nothing, tie
from distdl_jax.tracing.vmap_check import agree_on_size, agreed_on_sizes
from distdl_jax.world import World

Parts = tuple[Array, ...]
"""An array, or the real and the imaginary part of one."""


class Movement(Protocol):
    """One worker's part of a linear data movement: an immutable, hashable value, without the world that carries it."""

    def __hash__(self) -> int: ...

    @property
    def differentiable(self) -> bool:
        """Whether the data has derivatives: floating or complex. The same on every worker."""

    def run(self, world: World, x: Array) -> Array:
        """Carry it out over `world`: messages only, in the order of the plan, tied to `x` and to the result."""

    def adjoint(self) -> Movement:
        """The movement F* with <F x, y> = <x, F* y>, summed over all workers."""

    def batched(self, n: int) -> Movement:
        """The same movement of `n` tensors, stacked in front."""


class NonlinearMovement(Movement, Protocol):
    """A movement that is not linear: its derivative depends on where it is taken.

    Backward, its adjoint moves what `before_adjoint` makes of the cotangent, and `after_adjoint` has the last word.
    """

    def kept(self, x: Array, y: Array) -> Array:
        """What the derivative needs of the input and the output: it is batched where x is."""

    def before_adjoint(self, kept: Array, dy: Array) -> Array:
        """What is to move, from the cotangent of the output."""

    def after_adjoint(self, kept: Array, moved: Array, dtype: np.dtype) -> Array:
        """The cotangent of the input, of its `dtype`, from what has moved."""


def _is_nonlinear(part: Movement) -> TypeGuard[NonlinearMovement]:
    return hasattr(part, "before_adjoint")  # `isinstance` would look at all that the protocol has, each time


to_be_transposed = jax.make_user_context(False)
"""Whether the pullback that runs in this thread is to be transposed in its turn, for a derivative along a direction.

Then the adjoint of an adjoint is the movement itself. It makes a difference for `replicated` alone: there a share of a
gradient is summed over the copies, and a tangent is copied like its value.
"""


@dataclass(frozen=True)
class _Pullback:
    """The adjoint of a movement, whose adjoint is that movement."""

    of: Movement

    @property
    def differentiable(self) -> bool:
        return self.of.differentiable

    def run(self, world: World, x: Array) -> Array:
        return self.of.adjoint().run(world, x)

    def adjoint(self) -> Movement:
        return self.of

    def batched(self, n: int) -> Movement:
        return _Pullback(self.of.batched(n))


def move(world: World, part: Movement, x: Array) -> Array:
    """What this worker holds after the movement, given what it holds before."""
    if not part.differentiable:
        return _run(world, part, x)
    with movement_scope():
        parts, anchor, _ = _move(world, part, reverse_only(order_after_previous(x)))
    note_anchor(anchor)
    return never_transposed(_joined(parts))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(world: World, part: Movement, x: Array) -> tuple[Parts, Array, Array | None]:
    """What is held after the movement, an empty anchor of it (whoever uses that has the adjoint run), what it keeps.

    All three are results of one operation, so that a policy of `jax.checkpoint` saves all of them, or none. Complex
    numbers come in two parts, for it can't save those.
    """
    if _is_nonlinear(part):
        # XLA might compute x again for what is kept, an ulp apart.
        x = materialize(x)
    y = _run(world, part, x)
    kept = part.kept(x, y) if _is_nonlinear(part) else None
    return _parts(y), tie(nothing(y.dtype), y), kept


def _parts(y: Array) -> Parts:
    """`y`, or its real and its imaginary part."""
    return (y.real, y.imag) if jnp.issubdtype(y.dtype, jnp.complexfloating) else (y,)


def _joined(parts: Parts) -> Array:
    """The way back."""
    return lax.complex(*parts) if len(parts) == 2 else parts[0]


def _forward(
    world: World, part: Movement, x: Array
) -> tuple[tuple[Parts, Array, Array | None], tuple[Array, Array, Array | None]]:
    # Of `x` is kept that it is there: where it is batched or differentiated, so is what is kept. (An empty slice of `x`
    # would not do: JAX makes a constant of it where `x` is empty.)
    trace_of_x = tie(nothing(x.dtype), x)
    parts, anchor, kept = _move(world, part, x)
    return (parts, anchor, kept), (trace_of_x, nothing(parts[0].dtype), kept)


def _backward(
    world: World, part: Movement, of_x: tuple[Array, Array, Array | None], cotangents: tuple[Parts, Array, Any]
) -> tuple[Array]:
    # A cotangent that is constant on this worker (its output is unused, or empty) is batched as on the others.
    # The adjoint is differentiable in its turn, so that reverse over reverse works.
    trace_of_x, like_y, kept = of_x
    # JAX does not ask a derivative that a user wrote for cotangents of the value's dtype, but messages are in that.
    real, *imaginary = (its.astype(like_y.dtype) for its in cotangents[0])
    # JAX's cotangent of a complex number is the conjugate of those of its parts.
    dy = tie(_joined((real, *(-its for its in imaginary))), cotangents[1], trace_of_x)
    if _is_nonlinear(part):
        assert kept is not None
        moved, anchor, _ = _move(world, part.adjoint(), reverse_only(part.before_adjoint(kept, dy)))
        note_anchor(anchor)
        return (part.after_adjoint(kept, _joined(moved), dy.dtype),)
    adjoint = _Pullback(part) if to_be_transposed.value else part.adjoint()
    dx, anchor, _ = _move(world, adjoint, reverse_only(dy))
    note_anchor(anchor)
    return (_joined(dx),)


_move.defvjp(_forward, _backward)


def _run(world: World, part: Movement, x: Array) -> Array:
    """The movement under jit, so that eager calls with an equal part don't compile again."""
    run = _call if trace_context.calls_kept else _inlined
    with agreed_on_sizes(world, part, x):
        return run(world, part, x)


def _movement(world: World, part: Movement, x: Array) -> Array:
    @custom_vmap
    def run(x: Array) -> Array:
        return part.run(world, x)

    @run.def_vmap
    def batched(axis_size: int, in_batched: list[bool], x: Array) -> tuple[Any, bool]:
        agree_on_size(world, part, x, axis_size)
        return _run(world, part.batched(axis_size), x), True

    return run(jnp.asarray(x))


_call = jax.jit(_movement, static_argnums=(0, 1))
_inlined = jax.jit(_movement, static_argnums=(0, 1), inline=True)
