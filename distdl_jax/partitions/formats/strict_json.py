"""JSON of files that may be damaged or forged: anything unexpected raises `ValueError`, and nothing else."""

from __future__ import annotations

import json
import reprlib
from typing import Any

LARGEST = 2**63 - 1
"""The largest offset, size or length."""


def parsed(text: bytes) -> Any:
    """Return the value of a text: UTF-8, each name once in an object, and no NaN."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_once_each, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fields(value: Any, *names: str) -> list[Any]:
    """Return the values of an object that has these names, and no others."""
    if not isinstance(value, dict) or value.keys() != {*names}:
        raise ValueError(f"{reprlib.repr(value)} is no object of {', '.join(names)}")
    return [value[name] for name in names]


def integer(value: Any, least: int = 0, most: int = LARGEST) -> int:
    """Return an integer that lies in a range."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{reprlib.repr(value)} is no integer from {least} to {most}")
    return value


def integers(value: Any) -> tuple[int, ...]:
    """Return a list of integers of 0 or more."""
    return tuple(integer(each) for each in typed(value, list))


def typed(value: Any, kind: type) -> Any:
    """Return a value of this very type."""
    if type(value) is not kind:
        raise ValueError(f"{reprlib.repr(value)} is no {kind.__name__}")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")
