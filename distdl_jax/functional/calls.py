"""The wrapper of every public function: arguments by name, and tracebacks without the library's frames."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from distdl_jax.validation import bound_arguments
from distdl_jax.watchdog.error_text import hiding_own_lines

P = ParamSpec("P")
R = TypeVar("R")


def function_call(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: it names arguments that it doesn't have, or lacks. Its errors omit frames of the library."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            raised = error
        bound_arguments(function.__name__, signature, args, kwargs)  # outside of the handler, as an error of its own
        raise raised

    return hiding_own_lines(call)
