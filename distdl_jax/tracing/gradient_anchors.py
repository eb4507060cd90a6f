"""Gradient anchors: what a differentiated function keeps of each movement, so that all workers run the same adjoints.

JAX runs the adjoint of a movement on a worker only where that worker's result depends on the movement's output. A loss
that is constant on some workers, or leaves an output unused there, would have the others wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

from distdl_jax.tracing.gradient_chain import begun
from distdl_jax.tracing.tie import tie


@dataclass
class _Collection:
    """Of a function that is differentiated its trace, the anchors noted so far, and their chain, if it has one."""

    trace: Any
    anchors: list[Array]
    link: Array | None


class _Collections(threading.local):
    """Those of this thread."""

    def __init__(self) -> None:
        self.open: list[_Collection] = []


_collections = _Collections()


def note_anchor(anchor: Array) -> None:
    """Add the anchor of a movement to the innermost collection, if it was made at the level of its function.

    What is made inside a loop or a nested jit can't be used outside of it.
    """
    if anchors_are_noted():
        collection = _collections.open[-1]
        collection.anchors.append(anchor)
        if collection.link is not None:
            collection.link = tie(collection.link, anchor)


def anchors_are_noted() -> bool:
    """Whether what is traced here is at the level of a function whose anchors are collected."""
    return bool(_collections.open) and _collections.open[-1].trace == get_opaque_trace_state()


def after_the_one_before(x: Array) -> Array:
    """`x`, which is to move: where anchors make a chain, it depends on the movement before."""
    link = _collections.open[-1].link if anchors_are_noted() else None
    return x if link is None else tie(x, link)


def depending_on_movements(
    fun: Callable[..., Any], has_aux: bool, chained_from: Sequence[int] | None = None
) -> Callable[..., Any]:
    """`fun`, whose scalar (the first of its results with `has_aux`) depends on every movement in it, by zero.

    With `chained_from`, the places of arguments that are differentiated, every movement at the level of `fun` itself
    depends on the one before it, too.
    """

    @wraps(fun)
    def depending(*args: Any, **kwargs: Any) -> Any:
        args, link = (args, None) if chained_from is None else _with_link(args, chained_from)
        collection = _Collection(get_opaque_trace_state(), [], link)
        _collections.open.append(collection)
        try:
            result = fun(*args, **kwargs)
        finally:
            _collections.open.pop()
        return depending_on(collection.anchors, result, has_aux)

    return depending


def _with_link(args: tuple[Any, ...], places: Sequence[int]) -> tuple[tuple[Any, ...], Array | None]:
    """The arguments, and the first link of a chain, which is differentiated as one of those at `places` is."""
    leaves, structure = jax.tree.flatten([args[place] for place in places])
    inexact = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    if not inexact:
        return args, None
    first = min(inexact, key=lambda i: jnp.size(leaves[i]))
    leaves[first], link = begun(jnp.asarray(leaves[first]))
    given = dict(zip(places, jax.tree.unflatten(structure, leaves), strict=True))
    return tuple(given.get(place, arg) for place, arg in enumerate(args)), link


def depending_on(anchors: Sequence[Array], result: Any, has_aux: bool) -> Any:
    """`result`, a scalar (the first of two with `has_aux`), which depends on `anchors`, by zero."""
    value, *rest = result if has_aux else (result,)
    value = jnp.asarray(value)
    if value.shape == () and jnp.issubdtype(value.dtype, jnp.inexact):
        value = tie(value, *anchors)
    return (value, *rest) if has_aux else value
