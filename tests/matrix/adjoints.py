"""Outputs and input cotangents of many linear operators, against the reference and its transpose."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from matrix.case import Case
from matrix.dense import Reference, shapes_out
from matrix.painting import painted
from matrix.programs import compare, library, named, run


def moved(
    cases: Sequence[Case], xs: dict[str, Any], dys: dict[str, Any], by: Callable[..., Any] | None = jax.jit
) -> dict[str, Any]:
    """This worker's outputs and, where there are cotangents, its inputs' cotangents, from one program.

    Checks on the way that no argument is overwritten. `by`: which jit; None runs it eagerly.
    """
    operators = library(cases)
    before = jax.tree.map(np.array, (xs, dys))

    def one(case: Case, xs: Any, dys: Any) -> dict[str, Any]:
        if case.name not in dys:
            return {"y": operators[case.name](xs[case.name])}
        y, pullback = jax.vjp(operators[case.name], xs[case.name])
        return {"y": y, "dx": pullback(dys[case.name])[0]}

    def program(xs: Any, dys: Any) -> dict[str, Any]:
        return {case.name: named(case, one, case, xs, dys) for case in cases}

    arrays = jax.device_put((xs, dys))
    results = run(program, *arrays, by=by)
    jax.tree.map(np.testing.assert_array_equal, arrays, before)
    return jax.tree.map(np.asarray, results)


def wanted(
    cases: Sequence[Case], xs: Mapping[str, tuple[Any, ...]], dys: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """This worker's part of every case's output and, where there are cotangents, of its transposed matrix times all of
    them; each worker works out some for all.

    Of what is not linear: of its derivative at `xs`, all in one compiled program.
    """
    P = dj.Partition()
    found: list[dict[str, Any]] = [{} for _ in range(P.size)]

    def keep(name: str, key: str, parts: Sequence[Any]) -> None:
        for mine, part in zip(found, parts, strict=True):
            mine.setdefault(name, {})[key] = jax.tree.map(np.asarray, part)

    others = {}
    for case in cases[P.rank :: P.size]:
        name = case.name
        if not case.linear:
            others[name] = case
            continue
        keep(name, "y", case.dense(list(xs[name])))
        if name in dys:
            (inputs,) = Reference((case,)).inputs
            dy = np.concatenate([np.asarray(part).astype(_wide(dys[name])).reshape(-1) for part in dys[name]])
            dx = Reference((case,)).matrix.T @ dy
            keep(name, "dx", [inputs.of(dx, rank) for rank in range(P.size)])
    given = {}
    for name in others:
        dtype = _wide(dys[name]) if name in dys else xs[name][0].dtype
        given[name] = [[part.astype(dtype) for part in arrays[name]] for arrays in (xs, dys) if name in arrays]
    program = jax.jit(lambda given: {name: _there_and_back(others[name], *both) for name, both in given.items()})
    for name, results in (program(given) if given else {}).items():
        for key, parts in results.items():
            keep(name, key, parts)
    return {name: part for parts in P.allgather_data(found) for name, part in parts[P.rank].items()}


def _wide(blocks: Sequence[Any]) -> Any:
    return np.complex128 if np.iscomplexobj(blocks[0]) else np.float64


def _there_and_back(case: Case, xs: list[Any], dys: list[Any] | None = None) -> dict[str, list[Any]]:
    if dys is None:
        return {"y": case.dense(xs)}
    ys, pullback = jax.vjp(case.dense, xs)
    return {"y": ys, "dx": pullback(dys)[0]}


def check_exactly(chosen: Sequence[tuple[Case, str]], by: Callable[..., Any] | None = jax.jit) -> None:
    """Small integers of a dtype through each operator, and back where there are derivatives: values, shapes and dtypes,
    with nothing rounded where it is linear."""
    rank, cases = dj.Partition().rank, [case for case, _ in chosen]
    dtypes = {case.name: jnp.dtype(dtype) for case, dtype in chosen}
    inexact = [case for case in cases if jnp.issubdtype(dtypes[case.name], jnp.inexact)]
    xs = {case.name: painted(case.name, case.shapes, dtypes[case.name]) for case in cases}
    dys = {case.name: painted(f"{case.name} dy", shapes_out(case), dtypes[case.name]) for case in inexact}
    mine, mine_back = ({name: each[rank] for name, each in part.items()} for part in (xs, dys))
    got = moved(cases, mine, mine_back, by)
    want = wanted(cases, xs, dys)
    for case in cases:  # what several workers share equally is no integer
        tolerance = 0.0 if case.linear or case not in inexact else 2 * float(jnp.finfo(dtypes[case.name]).eps)
        compare({case.name: got[case.name]}, {case.name: want[case.name]}, tolerance)
    wrong = {name for name, result in got.items() for leaf in jax.tree.leaves(result) if leaf.dtype != dtypes[name]}
    assert not wrong, f"the dtype is not what it was in {wrong}"
