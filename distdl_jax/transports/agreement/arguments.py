"""Plain arguments of functions, which are the same on all workers: compared wherever the workers agree on shapes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

_OPERANDS = ("Array", "Tree", "Any", "Partition", "Partition | None")
"""Types of arguments that are a worker's own blocks, or that labels of agreements have: rows' numbers, partitions."""


class Call(NamedTuple):
    """A function that a worker is in, and its plain arguments, by name."""

    function: str
    arguments: dict[str, Any]


_calls: ContextVar[tuple[Call, ...]] = ContextVar("calls", default=())


def compared(function: Callable[P, R], *, but: Collection[str] = ()) -> Callable[P, R]:
    """Return a function that refuses plain arguments that differ, wherever the workers agree on something in it.

    `but`: arguments that are a worker's own.
    """
    signature = inspect.signature(function)
    kinds = {name: str(parameter.annotation) for name, parameter in signature.parameters.items()}
    own = {name for name, kind in kinds.items() if kind in _OPERANDS or kind.startswith("Callable")}.union(but)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        plain = {name: _plain(value) for name, value in given.arguments.items() if name not in own}
        token = _calls.set((*_calls.get(), Call(function.__name__, plain)))
        try:
            return function(*args, **kwargs)
        finally:
            _calls.reset(token)

    return call


def calls() -> tuple[Call, ...]:
    """Return the functions that this worker is in, the outermost first."""
    return _calls.get()


def differing_calls(calls_of: Mapping[int, tuple[Call, ...]]) -> str | None:
    """Return a sentence on the first difference between the calls of workers, by world rank; None if there is none."""
    (first, expected), *others = calls_of.items()
    worker, its = next(((worker, its) for worker, its in others if its != expected), (first, expected))
    if worker == first:
        return None
    for one, other in zip(expected, its, strict=False):
        names = [name for name, value in one.arguments.items() if other.arguments.get(name) != value]
        if one.function == other.function and names:
            name = names[0]
            return (
                f"The workers' programs differ: `{name}` of {one.function} is {one.arguments[name]!r} on worker "
                f"{first}, but {other.arguments[name]!r} on worker {worker}. It must be the same on all workers."
            )
    one_in, other_in = (" in ".join(call.function for call in reversed(each)) or "none" for each in (expected, its))
    return (
        f"The workers' programs differ: worker {first} calls {one_in}, but worker {worker} {other_in}. All workers "
        "must call the same function."
    )


def _plain(value: Any) -> Any:
    """Return a value that is equal to all that mean the same: 1 to numpy's, (1,) and [1]."""
    if isinstance(value, tuple | list):
        entries = tuple(map(_plain, value))
        return entries[0] if len(entries) == 1 else entries
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    try:
        return operator.index(value)
    except TypeError:
        return repr(value)  # refused by the function's own check
