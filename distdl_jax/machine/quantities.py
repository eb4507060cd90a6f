"""Numbers with a unit, as text: "2.4 us", "5.1 GB/s", "80 Gflop/s", "3 %"."""

from __future__ import annotations

import re

_THOUSANDS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BYTES = {f"{prefix}B": factor for prefix, factor in _THOUSANDS.items()} | {
    f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", start=1)
}
UNITS: dict[str, dict[str, float]] = {
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "bytes": _BYTES,
    "bytes per second": {f"{unit}/s": factor for unit, factor in _BYTES.items()},
    "flops per second": {f"{prefix}flop/s": factor for prefix, factor in _THOUSANDS.items()},
    "share": {"%": 0.01},
}
"""The units of each quantity, and how many of its own unit they are."""

_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z%/]+)\s*")


def parse(text: object, quantity: str) -> float:
    """Return the number that a text stands for, in the quantity's own unit.

    - `quantity`: one of the names of `UNITS`.

    Raises `ValueError` with what is accepted.

    >>> parse("64 KiB", "bytes")
    65536.0
    """
    units = UNITS[quantity]
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f'must be a number of {quantity} and a unit, in quotation marks: "1 {next(iter(units))}"; '
                         f"units are {', '.join(units)}")  # fmt: skip
    try:
        number = float(match[1])
    except ValueError:  # "1.2.3"
        raise ValueError(f"must begin with one number, but {match[1]!r} is none") from None
    return number * units[match[2]] if units[match[2]] >= 1 else number / round(1 / units[match[2]])


def write(number: float, quantity: str) -> str:
    """Return a number to six digits, in the largest unit that it fills and in which they are exact.

    >>> write(2.4e-6, "seconds"), write(5.1e9, "bytes per second"), write(65536.0, "bytes")
    ('2.4 us', '5.1 GB/s', '64 KiB')
    """
    units = UNITS[quantity]
    fitting = [unit for unit in units if number >= units[unit] * (1 - 1e-9)] or [min(units, key=units.__getitem__)]
    fitting.sort(key=units.__getitem__, reverse=True)
    exact = [unit for unit in fitting if parse(_with_unit(number, unit, units), quantity) == number]
    return _with_unit(number, exact[0] if exact else fitting[0], units)


def _with_unit(number: float, unit: str, units: dict[str, float]) -> str:
    return f"{number / units[unit]:.6g} {unit}"
