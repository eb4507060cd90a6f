"""A traced program as one operation without JAX effects.

Messages are ordered by an effect. JAX passes its token from one call of a jitted function to the next in Python, which
takes some 100 us per call and 5 us for each array; a program without effects is called from C++ in a few. So the token
of a whole program is made inside it. Between programs the caller keeps the order: each returns an array that exists
when the program is done, and is called only after the previous one's array exists.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Primitive, Var, jaxpr_as_fun
from jax.interpreters import mlir


def call_without_effect(
    fun: Callable[..., Any], traced: Any, effect: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Array, Any]:
    """Return an array without elements that exists when `fun(*args, **kwargs)` is done, and its result.

    For tracing by a `jax.jit` that is not transformed: it has neither a derivative nor a batching rule.

    - `fun`, `traced`: a jitted function with this one effect, and its program for these arguments.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
    # Unread inputs are not arguments of the program, as with jax.jit: they may be deleted, or donated.
    unread = {places[i] for i in _unread_inputs(traced.jaxpr, len(places))}
    read = [place for place in places if place not in unread]

    def of_read(*arrays: Array) -> list[Array]:
        values = dict(enumerate(leaves)) | {place: jnp.zeros_like(leaves[place]) for place in unread}
        args, kwargs = jax.tree.unflatten(structure, (values | dict(zip(read, arrays, strict=True))).values())
        return jax.tree.leaves(fun(*args, **kwargs))

    arrays = [leaves[place] for place in read]
    # One equation, the call: neither this nor its lowering traces the content of `fun` again.
    call = jax.make_jaxpr(of_read)(*arrays)
    # A function, not the jaxpr: for operations with a jaxpr JAX requires separate rules for what it calls high.
    done, *results = _program.bind(*arrays, call=jaxpr_as_fun(call), outputs=tuple(call.out_avals), effect=effect)
    return done, jax.tree.unflatten(traced.out_tree, results)


def _unread_inputs(jaxpr: ClosedJaxpr, count: int) -> list[int]:
    """Return which of the `count` inputs no operation and no result of a program uses, except random keys."""
    variables = jaxpr.jaxpr.invars
    if len(variables) != count:  # including constants; then none
        return []
    read = {v for v in chain(jaxpr.jaxpr.outvars, *(eqn.invars for eqn in jaxpr.jaxpr.eqns)) if isinstance(v, Var)}
    return [
        i for i, v in enumerate(variables) if v not in read and isinstance(getattr(v.aval, "dtype", None), np.dtype)
    ]


def _abstract(*_: Any, outputs: tuple[Any, ...], **__: Any) -> list[Any]:
    return [ShapedArray((0,), np.dtype(bool)), *outputs]


def _lowered(ctx: Any, *args: Any, call: Callable[..., Any], effect: Any, **_: Any) -> list[Any]:
    with_token = ctx.replace(tokens_in=mlir.TokenSet.create([effect]), tokens_out=None)
    return [mlir.ir_constant(np.zeros(0, bool)), *mlir.lower_fun(call)(with_token, *args)]


_program = Primitive("program_with_messages")
_program.multiple_results = True
_program.def_abstract_eval(_abstract)
mlir.register_lowering(_program, _lowered, cacheable=False)
