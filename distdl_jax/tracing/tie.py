"""`tie` and `materialize`: pinning a value for JAX, and for XLA.

A worker's program must not depend on whether its block is empty, constant or unused, or its messages don't match the
others'. An optimisation barrier alone keeps tied values from being dropped. Two more properties must be the same on all
workers: which values carry a derivative, and which carry a batch dimension (`vmap` runs an operation once for the whole
batch or, on a constant, once for one). `tie` ensures that.

XLA recomputes an array for each use if that saves memory traffic, possibly with different rounding: sums of products
once or twice. Two uses that must agree to the last bit, such as a message and the comparison with its answer, need more
than a barrier, which is gone before XLA decides that. `materialize` ensures that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import ad, batching, mlir

from distdl_jax.jax_compat import linearize_at_once
from distdl_jax.kernels.dtypes import in_own_width


def tie(x: Array, *others: Array) -> Array:
    """Return `x`, which from here on depends on `others` too: none of them can be dropped while `x` is used.

    If JAX differentiates one of `others`, it also differentiates `x` (by zero), on this worker as on the others; if it
    batches one of them, it batches `x`. The others' cotangents, zeros, in turn depend on the cotangent of `x`.
    """
    return _tie.bind(x, *others) if others else x


def nothing(dtype: np.dtype) -> Array:
    """Return an empty array, to tie to others.

    `jnp.zeros` takes twice as long to trace, and each movement has four.
    """
    return lax.broadcast(np.zeros((), dtype), (0,))


def _barrier(context: Any, *values: Any) -> Any:
    # `mlir.lower_fun` of `lax.optimization_barrier` would trace it for every shape of values.
    return [hlo.OptimizationBarrierOp(values).results[0]]


@in_own_width
def _differentiated(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    y, tangents = _tie.bind(*primals), list(tangents)
    if all(type(dx) is ad.Zero for dx in tangents) or not jnp.issubdtype(y.dtype, jnp.inexact):
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, _of_tangents(*tangents)


@in_own_width
def _of_tangents(dx: Any, *others: Any) -> Any:
    return tie(ad.instantiate_zeros(dx), *(tangent for tangent in others if type(tangent) is not ad.Zero))


@in_own_width
def _transposed(dy: Any, x: Any, *others: Any) -> list[Any]:
    if type(dy) is ad.Zero:
        return [ad.Zero(arg.aval) if ad.is_undefined_primal(arg) else None for arg in (x, *others)]
    cotangents = [dy if ad.is_undefined_primal(x) else None]
    for other in others:
        cotangents.append(tie(ad.zeros_like_aval(other.aval), dy) if ad.is_undefined_primal(other) else None)
    return cotangents


def _batched(args: Sequence[Any], dims: Sequence[int | None]) -> tuple[Any, int]:
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    return _tie.bind(batching.bdim_at_front(args[0], dims[0], size), *args[1:]), 0


_tie = Primitive("tie")
_tie.def_impl(lambda x, *others: jax.device_put(x))  # untraced values can't be dropped
_tie.def_abstract_eval(lambda x, *others: x)
mlir.register_lowering(_tie, _barrier)
ad.primitive_jvps[_tie] = _differentiated
linearize_at_once(_tie, _of_tangents)
ad.primitive_transposes[_tie] = _transposed
batching.primitive_batchers[_tie] = _batched


@jax.custom_jvp
def materialize(x: Array) -> Array:
    """Return `x` as the result of a loop, which XLA neither splits nor runs twice. The derivative is 1."""
    return _through_a_loop(x)


materialize.defjvp(in_own_width(lambda primals, tangents: (materialize(*primals), *tangents)))


def _loop(x: Array) -> Array:
    # Of two passes, since XLA inlines the body of a single one.
    return lax.fori_loop(0, 2, lambda i, y: jnp.where(i == 0, x, y), jnp.zeros_like(x))


_through_a_loop = jax.jit(_loop, inline=True)
