"""Which operators, worlds, modes, dtypes and transformations meet: all in a long run, or some of each pair.

A test of everything with everything takes hours. Most mistakes need two things at once, say one operator in one mode.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import jax
from launcher.examples import LONG

import distdl_jax as dj
from matrix.case import Case
from matrix.cases import PRIMITIVES
from matrix.transformations import TRANSFORMATIONS

Row = dict[str, Any]
Chosen = Sequence[tuple[Case, str]]
MODES: dict[str, Callable[..., Any] | None] = {"eager": None, "jax.jit": jax.jit, "dj.jit": dj.jit}
WORLDS = (1, 2, 3, 4, 12)
SMALL = WORLDS[:4]
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
INEXACT = ("float16", "bfloat16", "float32", "complex64")
DTYPES = (*INTEGERS, *INEXACT, "float64", "complex128")
KINDS = tuple(dict.fromkeys(case.kind for case in PRIMITIVES))


def takes(case: Case, dtype: str) -> bool:
    """Whether an operator moves numbers of this dtype."""
    return (case.any_dtype or dtype not in INTEGERS) and (case.any_complex or not dtype.startswith("complex"))


def share(cases: Sequence[Case], turn: int, parts: Sequence[int], of: int) -> list[Case]:
    """What falls to some `parts` of a test that has so many: an operator goes to one in this turn, and to the next one
    in the next. In a long run all."""
    return [case for case in cases if LONG > 1 or (KINDS.index(case.kind) + turn) % of in parts]


@cache
def dtypes_in(mode: str, world: int) -> Chosen:
    """The operators, and of which dtype, that this mode is tried with in this world; in a short run in the large one
    only some, since `test_adjoint` has them all there."""
    if world not in SMALL:
        return _chosen(mode, world, "dtype", DTYPES, (world,), (("mode", "world"),))
    return _chosen(mode, world, "dtype", DTYPES, SMALL, (("operator", "mode"), ("mode", "dtype"), ("mode", "world")))


@cache
def transformations_in(mode: str, world: int) -> Chosen:
    """The same for transformations; in a short run of two and of three workers."""
    return _chosen(mode, world, "transformation", tuple(TRANSFORMATIONS), SMALL[1:3], (("transformation", "mode"),))


def in_batches(chosen: Chosen) -> list[Chosen]:
    """The same in lists that have each case once, for results go by name."""
    batches: list[list[tuple[Case, str]]] = []
    seen: Counter[str] = Counter()
    for case, value in chosen:
        if seen[case.name] == len(batches):
            batches.append([])
        batches[seen[case.name]].append((case, value))
        seen[case.name] += 1
    return batches


def _chosen(
    mode: str,
    world: int,
    name: str,
    values: tuple[str, ...],
    worlds: tuple[int, ...],
    pairs: tuple[tuple[str, str], ...],
) -> Chosen:
    if LONG > 1:
        everything = product([case for case in PRIMITIVES if case.world == world], values)
        return tuple((case, value) for case, value in everything if case in _cases({name: value}))
    factors = {"operator": KINDS, "mode": tuple(MODES), "world": worlds, name: values}
    rows = enumerate(covering(factors, pairs, lambda row: bool(_cases(row))))
    here = [(_cases(row), turn, row[name]) for turn, row in rows if (row["mode"], row["world"]) == (mode, world)]
    return tuple(dict.fromkeys((alike[turn % len(alike)], value) for alike, turn, value in here))


def _cases(row: Row) -> list[Case]:
    """Those that a row may take, which need not have all its factors."""
    return [
        case
        for case in PRIMITIVES
        if row.get("world", case.world) == case.world
        and row.get("operator", case.kind) == case.kind
        and ("dtype" not in row or (case.exact and takes(case, row["dtype"])))
    ]


def covering(
    factors: Mapping[str, Sequence[Any]], pairs: Sequence[tuple[str, str]], possible: Callable[[Row], bool]
) -> list[Row]:
    """Rows with one value of each factor, such that every possible pair of values is in one, for the given `pairs` of
    factors. The same on every call.

    `possible` says so of a row that has all its factors, or some.
    """

    def pairs_in(row: Row) -> list[tuple[str, Any, str, Any]]:
        return [(a, row[a], b, row[b]) for a, b in pairs]

    left = {(a, x, b, y): None for a, b in pairs for x, y in product(factors[a], factors[b]) if possible({a: x, b: y})}
    rows: list[Row] = []
    met: Counter[tuple[str, Any]] = Counter()
    while left:
        a, x, b, y = next(iter(left))
        others = [name for name in factors if name not in (a, b)]
        candidates = (
            {a: x, b: y, **dict(zip(others, each, strict=True))} for each in product(*map(factors.get, others))
        )
        # With most pairs that are left, else of what was met least.
        ranked = [
            (sum(pair in left for pair in pairs_in(row)), -sum(met[name, row[name]] for name in others), row)
            for row in candidates
            if possible(row)
        ]
        if not ranked:
            raise ValueError(f"no row has {a} = {x} and {b} = {y}")
        best = max(ranked, key=lambda each: each[:2])[2]
        rows.append({name: best[name] for name in factors})
        for pair in pairs_in(best):
            left.pop(pair, None)
        met.update(best.items())
    return rows
