"""JSON of files that may be damaged or forged: what is not as it must be raises `ValueError`, and nothing else."""

from __future__ import annotations

import json
import reprlib
from typing import Any

LARGEST = 2**63 - 1
"""The largest offset, size or length."""


def parsed(text: bytes) -> Any:
    """Return what a text says: UTF-8, each name once in an object, and no NaN."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_once_each, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fields(said: Any, *names: str) -> list[Any]:
    """Return the values of an object that has these names, and no others."""
    if not isinstance(said, dict) or said.keys() != {*names}:
        raise ValueError(f"{reprlib.repr(said)} is no object of {', '.join(names)}")
    return [said[name] for name in names]


def integer(said: Any, least: int = 0, most: int = LARGEST) -> int:
    """Return an integer that lies in a range."""
    if type(said) is not int or not least <= said <= most:
        raise ValueError(f"{reprlib.repr(said)} is no integer from {least} to {most}")
    return said


def integers(said: Any) -> tuple[int, ...]:
    """Return a list of integers of 0 or more."""
    return tuple(integer(each) for each in typed(said, list))


def typed(said: Any, kind: type) -> Any:
    """Return a value of this very type."""
    if type(said) is not kind:
        raise ValueError(f"{reprlib.repr(said)} is no {kind.__name__}")
    return said


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")
