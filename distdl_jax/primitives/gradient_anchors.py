"""Gradient anchors: what a differentiated function keeps of each movement, so that all workers run the same adjoints.

JAX runs the adjoint of a movement on a worker only where that worker's result depends on the movement's output. A loss
that is constant on some workers, or leaves an output unused there, would have the others wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

from distdl_jax.primitives.tie import tie


class _Collections(threading.local):
    """Those of this thread: of each function that is differentiated its trace, and the anchors noted so far."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, list[Array]]] = []


_collections = _Collections()


def note_anchor(anchor: Array) -> None:
    """Add the anchor of a movement to the innermost collection, if it was made at the level of its function.

    What is made inside a loop or a nested jit can't be used outside of it.
    """
    if anchors_are_noted():
        _collections.open[-1][1].append(anchor)


def anchors_are_noted() -> bool:
    """Whether what is traced here is at the level of a function whose anchors are collected."""
    return bool(_collections.open) and _collections.open[-1][0] == get_opaque_trace_state()


def depending_on_movements(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """`fun`, whose scalar (the first of its results with `has_aux`) depends on every movement in it, by zero."""

    @wraps(fun)
    def depending(*args: Any, **kwargs: Any) -> Any:
        _collections.open.append((get_opaque_trace_state(), []))
        try:
            result = fun(*args, **kwargs)
        finally:
            _, anchors = _collections.open.pop()
        return depending_on(anchors, result, has_aux)

    return depending


def depending_on(anchors: Sequence[Array], result: Any, has_aux: bool) -> Any:
    """`result`, a scalar (the first of two with `has_aux`), which depends on `anchors`, by zero."""
    value, *rest = result if has_aux else (result,)
    value = jnp.asarray(value)
    if value.shape == () and jnp.issubdtype(value.dtype, jnp.inexact):
        value = tie(value, *anchors)
    return (value, *rest) if has_aux else value
