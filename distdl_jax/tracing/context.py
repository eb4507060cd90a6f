"""The context of the current trace, for code that runs while JAX traces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array

_F = TypeVar("_F", bound=Callable[..., Any])

WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))
"""The dtypes that JAX would replace by half as wide ones outside of `jax.enable_x64`."""


@dataclass
class Anchors:
    """The anchors of a differentiated function: its trace, its movements' anchors so far, its chain if any."""

    trace: Any
    found: list[Array]
    link: Array | None


class TraceContext(threading.local):
    """The state of this thread's trace.

    - `anchors`: of the innermost function whose adjoints are ordered; see `adjoint_order`.
    - `movements_as_calls`: whether movements stay calls of a jitted function; otherwise they are inlined.
    - `sizes_agreed`: whether workers need not agree on the size of a `jax.vmap`, as in a program that is compared with
      the others'. A worker that maps nothing, since JAX replaced `y[array]` for an empty y by a constant, could not
      know that the others agree; the comparison names that constant.
    - `compared`: whether the program is compared between the workers as a whole, so that its parts need not be.
    - `called_with`: the arguments of the outermost call of a checked function, which its trace sees as tracers.
    - `to_compile`: whether all workers have agreed on the plan of a call that has yet to compile its program;
      `handled`: the exception that was being handled when they did.
    """

    anchors: Anchors | None = None
    movements_as_calls = False
    sizes_agreed = False
    compared = False
    called_with: Any = None
    to_compile = False
    handled: BaseException | None = None

    @contextmanager
    def set(self, **values: Any) -> Iterator[None]:
        """Set attributes inside."""
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(before)


trace_context = TraceContext()


def wide_as(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """Inside, JAX has 64-bit numbers if one of these arrays, or shapes and dtypes, has them."""
    if jax.config.jax_enable_x64 or not any(getattr(x, "dtype", None) in WIDE for x in values):  # type: ignore[attr-defined, unused-ignore]
        return nullcontext()
    return jax.enable_x64(True)


def in_own_width(rule: _F) -> _F:
    """Decorate a rule of a function: JAX calls it later than the function, outside of a user's `jax.enable_x64`."""

    @wraps(rule)
    def wide(*args: Any) -> Any:
        with wide_as(jax.tree.leaves(args)):
            return rule(*args)

    return wide  # type: ignore[return-value]
