"""A test of a private part that the library uses says, where it fails, what the part is for."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

tested: set[str] = set()
"""The names of those that tests were made for."""


def what_breaks(item: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that says, where it fails, what `item` is for and what would replace it."""
    tested.add(item.__name__)

    def explained(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                raise AssertionError(f"distdl_jax.compat.{item.__name__}: {inspect.getdoc(item)}") from error

        return run

    return explained
