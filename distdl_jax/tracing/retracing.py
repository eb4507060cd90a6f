"""What decides whether JAX traces a function again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

import jax


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return what a trace depends on: equal for calls that JAX traces once; None where that can't be told."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined, unused-ignore]
        return None  # nothing is traced
    leaves, structure = jax.tree.flatten((args, kwargs))
    try:
        hash(signature := (structure, tuple(jax.typeof(x) if hasattr(x, "dtype") else x for x in leaves)))
    except TypeError:  # of something that is static, and a key for JAX by other means
        return None
    return signature


def unequal(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same, but is equal to none.

    Equal ones, as layers are, share JAX's traces until one of them is gone, which is sooner on some workers; and a
    worker whose block of a larger tensor has the shape of one before would not trace what the others do.
    """

    @wraps(fun)
    def other(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    return other
