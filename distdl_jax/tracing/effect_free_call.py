"""A traced program as one operation without JAX effects.

Messages are ordered by an effect. JAX hands its token from one call of a jitted function to the next in Python, which
takes some 100 us a call and 5 us for each array; a program without effects it calls from C++ in a few. So the token of
a whole program is made inside it. Between programs the caller keeps the order: each returns an array that is there when
the program is done, and is not called before the array of the one before it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, Var, jaxpr_as_fun
from jax.interpreters import mlir


def call_without_effect(jaxpr: ClosedJaxpr, effect: Any, args: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Return an array without elements that is there when a program with this one effect is done, and its results.

    To be traced by a `jax.jit` that nothing transforms: it has neither a derivative nor a batched form.
    """
    # A function, not the jaxpr: of operations that hold one JAX wants rules of their own for what it calls high.
    done, *results = _program.bind(*args, of=jaxpr_as_fun(jaxpr), outputs=tuple(jaxpr.out_avals), effect=effect)
    return done, results


def unread_inputs(jaxpr: ClosedJaxpr, count: int) -> list[int]:
    """Return which of the `count` inputs no operation and no result of a program has, random keys left out."""
    variables = jaxpr.jaxpr.invars
    if len(variables) != count:  # with constants among them; then none
        return []
    read = {v for v in chain(jaxpr.jaxpr.outvars, *(eqn.invars for eqn in jaxpr.jaxpr.eqns)) if isinstance(v, Var)}
    return [
        i for i, v in enumerate(variables) if v not in read and isinstance(getattr(v.aval, "dtype", None), np.dtype)
    ]


def _abstract(*_: Any, of: Callable[..., Any], outputs: tuple[Any, ...], effect: Any) -> list[Any]:
    return [ShapedArray((0,), np.dtype(bool)), *outputs]


def _lowered(ctx: Any, *args: Any, of: Callable[..., Any], outputs: tuple[Any, ...], effect: Any) -> list[Any]:
    with_token = ctx.replace(tokens_in=mlir.TokenSet.create([effect]), tokens_out=None)
    results = mlir.lower_fun(of)(with_token, *args)
    return [mlir.ir_constant(np.zeros(0, bool)), *results]


_program = Primitive("program_with_messages")
_program.multiple_results = True
_program.def_abstract_eval(_abstract)
mlir.register_lowering(_program, _lowered, cacheable=False)
