"""`sent_first`: an array that nobody reads before the messages so far are sent.

XLA runs what is ready in an order of its own, and an optimization barrier is gone before it decides on that. So a
worker that sends an array which it multiplies, too, may multiply first, while the others wait for it.
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from distdl_jax.jax_compat import add_dependency
from distdl_jax.transports.mpi.compat import mpi_effect


def sent_first(x: Array) -> Array:
    """Order the uses of `x` after the messages traced so far; nothing is copied. On CPUs alone."""
    result: Array = _sent_first.bind(x)
    return result


def _on_cpu(context: Any, x: Any) -> list[Any]:
    effect = mpi_effect()
    token = context.tokens_in.get(effect)
    context.set_tokens_out(mlir.TokenSet({effect: token}))
    return [add_dependency(context, x, token)]


def _elsewhere(context: Any, x: Any) -> list[Any]:
    context.set_tokens_out(context.tokens_in)
    return [x]


_sent_first = Primitive("sent_first")
_sent_first.def_impl(lambda x: x)
_sent_first.def_effectful_abstract_eval(lambda x: (x, {mpi_effect()}))
batching.primitive_batchers[_sent_first] = lambda args, dims: (sent_first(*args), *dims)
mlir.register_lowering(_sent_first, _elsewhere)
mlir.register_lowering(_sent_first, _on_cpu, platform="cpu")
