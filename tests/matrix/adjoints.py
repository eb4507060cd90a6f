"""Outputs and input cotangents of many linear operators, against the reference and its transpose."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from matrix.case import Case, outputs_of
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


def adjoint_parts(
    cases: Sequence[Case], xs: Mapping[str, tuple[Any, ...]], dys: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """This worker's part of every case's transposed matrix times all cotangents; each worker works out some for all.

    Of what is not linear: of its derivative at `xs`.
    """
    P = dj.Partition()
    found: list[dict[str, Any]] = [{} for _ in range(P.size)]
    for case in cases[P.rank :: P.size]:
        if not case.linear:
            continue
        reference, blocks = Reference((case,)), dys[case.name]
        wide = _wide(blocks)
        dx = reference.matrix.T @ np.concatenate([np.asarray(dy).astype(wide).reshape(-1) for dy in blocks])
        for rank, parts in enumerate(found):
            parts[case.name] = reference.inputs[0].of(dx, rank)
    others = {case.name: case for case in cases[P.rank :: P.size] if not case.linear}
    given = {name: [[part.astype(_wide(dys[name])) for part in its[name]] for its in (xs, dys)] for name in others}
    for name, dxs in jax.jit(lambda given: {n: _cotangents(others[n], *both) for n, both in given.items()})(
        given
    ).items():
        for parts, dx in zip(found, dxs, strict=True):
            parts[name] = np.asarray(dx)
    return {name: part for parts in P.allgather_data(found) for name, part in parts[P.rank].items()}


def _wide(blocks: Sequence[Any]) -> Any:
    return np.complex128 if np.iscomplexobj(blocks[0]) else np.float64


def _cotangents(case: Case, xs: list[Any], dys: list[Any]) -> list[Any]:
    dxs: list[Any] = jax.vjp(case.dense, xs)[1](dys)[0]
    return dxs


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
    want = {name: {"y": parts[rank]} for name, parts in outputs_of(cases, xs).items()}
    for name, dx in adjoint_parts(inexact, xs, dys).items():
        want[name]["dx"] = dx
    for case in cases:  # what several workers share equally is no integer
        tolerance = 0.0 if case.linear or case not in inexact else 2 * float(jnp.finfo(dtypes[case.name]).eps)
        compare({case.name: got[case.name]}, {case.name: want[case.name]}, tolerance)
    wrong = {name for name, result in got.items() for leaf in jax.tree.leaves(result) if leaf.dtype != dtypes[name]}
    assert not wrong, f"the dtype is not what it was in {wrong}"
