"""What a function of an array stores for its derivative, once XLA has compiled both passes into one program.

JAX says which arrays the backward pass reads. XLA stores fewer: what additions, comparisons and the like make is
computed again, in the loop that reads it, from the arrays before them. Results of `tanh`, `exp`, divisions, sums and
products of matrices are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.jaxprs import Call, DataFlow, structure

_COMPUTED_AGAIN = {
    *("abs", "add", "and", "ceil", "clamp", "convert_element_type", "copy", "eq", "floor", "ge", "gt", "integer_pow"),
    *("is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "round", "select_n", "sign", "square"),
    *("stop_gradient", "sub", "xor", "broadcast_in_dim", "expand_dims", "iota", "reshape", "rev", "slice", "squeeze"),
    *("transpose", "one_minus_square"),
}
"""JAX's operations whose results XLA computes again for each use; a power to an integer is a product."""


class Residuals(NamedTuple):
    """What is stored from the forward to the backward pass of y = f(x).

    - `x`, `y`: whether these two are.
    - `others`: bytes of other arrays.
    - `y_is_recomputed`: whether XLA computes y again where an operation like these reads it, from one array. What is
      made of two arrays of y's size is stored.
    """

    x: bool
    y: bool
    others: int
    y_is_recomputed: bool


class _Value(NamedTuple):
    """An array of a program that is stored: its number and its bytes."""

    number: int
    nbytes: int


class _Fact(NamedTuple):
    """From which stored values a value can be computed again, and whether at most one of them is as large as it is."""

    sources: frozenset[_Value]
    is_unary: bool = True


class _Sources(DataFlow[_Fact]):
    """From what each value can be computed again."""

    of_literals = of_constants = unknown = _Fact(frozenset())

    def __init__(self) -> None:
        self._count = 0

    def stored(self, aval: Any) -> _Fact:
        """Return a value that is computed from no other."""
        self._count += 1
        return _Fact(frozenset({_Value(self._count, _nbytes(aval))}))

    def equation(self, eqn: Any, args: list[_Fact]) -> list[_Fact]:
        if isinstance(structure(eqn), Call) and (found := self.through_bodies(eqn, args)) is not None:
            return found
        if eqn.primitive.name not in _COMPUTED_AGAIN:
            return [self.stored(var.aval) for var in eqn.outvars]
        (y,) = eqn.outvars
        large = [arg for arg, var in zip(args, eqn.invars, strict=True) if arg.sources and var.aval.size == y.aval.size]
        is_unary = len(large) <= 1 and all(arg.is_unary for arg in large)
        return [_Fact(frozenset().union(*(arg.sources for arg in args)), is_unary)]

    def join(self, one: _Fact, other: _Fact) -> _Fact:
        return _Fact(one.sources | other.sources, one.is_unary and other.is_unary)


def residuals(function: Callable[[Array], Array], x: ShapeDtype) -> Residuals:
    """Return what `function` stores of an array like `x`; it is traced, not run."""
    program = jax.make_jaxpr(lambda x: jax.vjp(function, x))(jax.ShapeDtypeStruct(x.shape, x.dtype))
    flow = _Sources()
    of_x = flow.stored(program.in_avals[0])
    of_y, *stored = flow.run(program.jaxpr, [of_x])
    found = frozenset[_Value]().union(*(fact.sources for fact in stored))
    is_own = len(of_y.sources) == 1 and of_y.sources != of_x.sources and _is_result(of_y, program.out_avals[0])
    y = is_own and of_y.sources <= found
    others = found - of_x.sources - (of_y.sources if y else frozenset())
    return Residuals(of_x.sources <= found, y, sum(value.nbytes for value in others), of_y.is_unary and not is_own)


def _is_result(fact: _Fact, aval: Any) -> bool:
    return next(iter(fact.sources)).nbytes == _nbytes(aval)


def _nbytes(aval: Any) -> int:
    return int(math.prod(aval.shape) * aval.dtype.itemsize)
