"""Quantities with a unit, such as "10 GB/s"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from math import inf

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.text import quoted

BANDWIDTHS = {
    "B/s": 1.0,
    "kB/s": 1e3,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "GiB/s": 2.0**30,
    "Mbit/s": 1e6 / 8,
    "Gbit/s": 1e9 / 8,
}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
"""Units in bytes per second, and in seconds."""


def quantity(name: str, text: object, units: Mapping[str, float], example: str) -> float:
    """Return the value of a positive number with a unit, such as "10 GB/s", in the unit whose factor is 1."""
    if not isinstance(text, str):
        raise InvalidTypeError(f"`{name}` (={text!r}) must be a string like {example!r}.")
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\D+?)\s*", text)
    with suppress(ValueError):
        if match and match[2] in units and 0 < (value := float(match[1]) * units[match[2]]) < inf:
            return value
    raise InvalidArgumentError(
        f"`{name}` (={quoted(text)}) must be a positive number with a unit, like {example!r}; units are "
        f"{', '.join(units)}."
    )
