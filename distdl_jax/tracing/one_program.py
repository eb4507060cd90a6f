"""Functions that, called eagerly, run as one program of their own instead of operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax

from distdl_jax.jax_compat import is_transformed

T = TypeVar("T")


def one_program(static_argnums: tuple[int, ...]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that compiles a function as a whole where it is called eagerly.

    Within another program or a derivative the function is called as it is.
    """

    def decorate(fun: Callable[..., T]) -> Callable[..., T]:
        compiled: Any = jax.jit(fun, static_argnums=static_argnums)

        @wraps(fun)
        def call(*args: Any) -> T:
            result: T = fun(*args) if is_transformed() else compiled(*args)
            return result

        return call

    return decorate
