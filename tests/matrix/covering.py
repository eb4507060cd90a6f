"""Samples of a product that are small and leave no pair out: each value of a factor meets each of another.

A test of everything with everything takes hours. Most mistakes need two things at once, say one operator in one mode.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

Row = dict[str, Any]


def covering(
    factors: Mapping[str, Sequence[Any]], pairs: Sequence[tuple[str, str]], possible: Callable[[Row], bool]
) -> list[Row]:
    """Rows with one value of each factor, such that every possible pair of values is in one, for the given `pairs` of
    factors. The same on every call.

    `possible` says so of a row that has all its factors, or some.
    """
    left = {(a, x, b, y): None for a, b in pairs for x, y in product(factors[a], factors[b]) if possible({a: x, b: y})}
    rows: list[Row] = []
    met = {(name, value): 0 for name in factors for value in factors[name]}
    while left:
        a, x, b, y = next(iter(left))
        others = [name for name in factors if name not in (a, b)]
        best: tuple[tuple[int, int], Row] | None = None
        for values in product(*(factors[name] for name in others)):
            row = {a: x, b: y, **dict(zip(others, values, strict=True))}
            if possible(row):
                news = sum(pair in left for pair in _pairs(row, pairs))
                rank = (news, -sum(met[name, row[name]] for name in others))  # else what was met least
                if best is None or rank > best[0]:
                    best = rank, row
        if best is None:
            raise ValueError(f"no row has {a} = {x} and {b} = {y}")
        row = {name: best[1][name] for name in factors}
        rows.append(row)
        for pair in _pairs(row, pairs):
            left.pop(pair, None)
        for name, value in row.items():
            met[name, value] += 1
    return rows


def _pairs(row: Row, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, Any, str, Any]]:
    return [(a, row[a], b, row[b]) for a, b in pairs]
