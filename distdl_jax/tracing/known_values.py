"""The values of traced arguments, where the outermost call of `dj.jit` has them: what is traced then can compare them.

Arguments of a compiled function are tracers, whose values are unknown. But the call that makes JAX trace it has values,
and each tracer on the way from there is noted here.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

from distdl_jax.tracing.context import trace_context


def know_arguments(args: Any) -> None:
    """Note that `args` have the values with which the outermost call was called, if they are its arguments."""
    known, values = trace_context.values, jax.tree.leaves(trace_context.called_with)
    leaves = jax.tree.leaves(args)
    if known is None or known or len(values) != len(leaves):  # an inner function's arguments come later
        return
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(leaf, Tracer) and not isinstance(value, Tracer):
            known[id(leaf)] = leaf, value  # with the tracer, so that no other gets its number


def know_same(old: Any, new: Any) -> None:
    """Note that a tracer has the value of another one, or that array."""
    known = trace_context.values
    if known is None or not isinstance(new, Tracer):
        return
    if id(old) in known:
        known[id(new)] = new, known[id(old)][1]
    elif not isinstance(old, Tracer):
        known[id(new)] = new, old


def known_value(x: Any) -> Any:
    """Return the value of a tracer, or the array itself; None if it isn't known."""
    if not isinstance(x, Tracer):
        return x
    return (trace_context.values or {}).get(id(x), (x, None))[1]
