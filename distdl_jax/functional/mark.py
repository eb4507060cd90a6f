"""The mark of a movement in a program that is traced for analysis, and never run."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching


class Mark(NamedTuple):
    """A movement in a traced program.

    - `plan`: of the movement. - `adjoint`: whether it is the adjoint.
    - `moves`: whether this worker takes part. - `copies`: the number of tensors that move together.
    - `of_params`: whether it moves only parameters.
    """

    plan: Any
    adjoint: bool
    moves: bool = True
    copies: int = 1
    of_params: bool = False


def moved(plan: Any, worker: int, x: Array, *, moves: bool) -> Array:
    """Return the substitute for the block of `worker` after the movement of `plan`."""
    y = plan.output(worker)
    same = y == plan.inputs[worker] or not moves
    shapes = (None, None) if same else ((tuple(x.shape), x.dtype), (y.shape, y.dtype))
    result: Array = _moved.bind(x, mark=Mark(plan, False, moves), shapes=shapes, lead=())
    return result


def mark_of(eqn: Any) -> Mark | None:
    """Return the movement in an equation; None if it is not one."""
    mark: Mark | None = eqn.params["mark"] if eqn.primitive is _moved else None
    return mark


def _result(x: Any, *, mark: Mark, shapes: Any, lead: tuple[int, ...]) -> ShapedArray:
    if shapes[1] is None:
        return ShapedArray(x.shape, x.dtype)
    shape, dtype = shapes[1]
    return ShapedArray((*lead, *shape), dtype)


def _transposed(dy: Any, x: Any, *, mark: Mark, shapes: Any, lead: tuple[int, ...]) -> list[Any]:
    if type(dy) is ad.Zero:
        return [ad.Zero(x.aval)]
    back = mark._replace(adjoint=not mark.adjoint)
    return [_moved.bind(dy, mark=back, shapes=shapes[::-1], lead=lead)]


def _batched(args: Any, dims: Any, *, mark: Mark, shapes: Any, lead: tuple[int, ...]) -> tuple[Any, int]:
    x = jnp.moveaxis(args[0], dims[0], 0)
    n = x.shape[0]
    return _moved.bind(x, mark=mark._replace(copies=n * mark.copies), shapes=shapes, lead=(n, *lead)), 0


_moved = Primitive("moved")
_moved.def_abstract_eval(_result)
ad.deflinear2(_moved, _transposed)
batching.primitive_batchers[_moved] = _batched
