"""What a function of an array stores for its derivative, once XLA has compiled both passes into one program.

JAX says which arrays the backward pass reads. XLA stores fewer: what additions, comparisons and the like make is
computed again, in the loop that reads it, from the arrays before them. Results of `tanh`, `exp`, divisions, sums and
products of matrices are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
from jax import Array

from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.jaxprs import Call, DataFlow, structure

_COMPUTED_AGAIN = {
    *("abs", "add", "and", "ceil", "clamp", "convert_element_type", "copy", "eq", "floor", "ge", "gt", "integer_pow"),
    *("is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "round", "select_n", "sign", "square"),
    *("stop_gradient", "sub", "xor", "broadcast_in_dim", "expand_dims", "iota", "reshape", "rev", "slice", "squeeze"),
    "transpose",
}
"""JAX's operations whose results XLA computes again for each use; a power to an integer is a product."""


class Residuals(NamedTuple):
    """What is stored from the forward to the backward pass of y = f(x).

    - `x`, `y`: whether these two are.
    - `others`: bytes of other arrays.
    - `y_is_recomputed`: whether XLA computes y again from those where an operation like these reads it.
    """

    x: bool
    y: bool
    others: int
    y_is_recomputed: bool


class _Value(NamedTuple):
    """An array of a program that is stored: its number and its bytes."""

    number: int
    nbytes: int


_Values = frozenset[_Value]


class _Sources(DataFlow[_Values]):
    """From which stored values a value can be computed again."""

    of_literals = of_constants = unknown = frozenset()

    def __init__(self) -> None:
        self._count = 0

    def stored(self, aval: Any) -> _Values:
        """Return a value that is computed from no other."""
        self._count += 1
        return frozenset({_Value(self._count, math.prod(aval.shape) * aval.dtype.itemsize)})

    def equation(self, eqn: Any, args: list[_Values]) -> list[_Values]:
        if isinstance(structure(eqn), Call) and (found := self.through_bodies(eqn, args)) is not None:
            return found
        if eqn.primitive.name in _COMPUTED_AGAIN:
            return [frozenset().union(*args)] * len(eqn.outvars)
        return [self.stored(var.aval) for var in eqn.outvars]

    def join(self, one: _Values, other: _Values) -> _Values:
        return one | other


def residuals(function: Callable[[Array], Array], x: ShapeDtype) -> Residuals:
    """Return what `function` stores of an array like `x`; it is traced, not run."""
    program = jax.make_jaxpr(lambda x: jax.vjp(function, x))(jax.ShapeDtypeStruct(x.shape, x.dtype))
    flow = _Sources()
    of_x = flow.stored(program.in_avals[0])
    of_y, *stored = flow.run(program.jaxpr, [of_x])
    found: _Values = reduce(frozenset.union, stored, frozenset())
    y_is_recomputed = len(of_y) != 1 or of_y == of_x or next(iter(of_y)).nbytes != _nbytes(program.out_avals[0])
    y = not y_is_recomputed and of_y <= found
    others = found - of_x - (of_y if y else frozenset())
    return Residuals(of_x <= found, y, sum(value.nbytes for value in others), y_is_recomputed)


def _nbytes(aval: Any) -> int:
    return int(math.prod(aval.shape) * aval.dtype.itemsize)
