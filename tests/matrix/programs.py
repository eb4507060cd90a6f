"""Many cases compiled as one program on every worker, and compared with the reference."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from matrix.case import Case, painted, shapes_out
from matrix.dense import Reference, arguments
from matrix.transformations import Transformation

Results = dict[str, Any]
Jit = Callable[..., Any] | None
"""Which jit; None is none: eagerly."""


def run(program: Callable[..., Any], *args: Any, by: Jit = jax.jit, **options: Any) -> Any:
    """Compile `program` on all workers, then run it on all: who waits for a message spins, and the cores are for those
    that still compile."""
    if by is None:
        return jax.block_until_ready(program(*args))
    compiled = by(program, **options)
    compiled.trace(*args).lower().compile()
    dj.Partition().allgather_data(None)  # which waits without spinning
    return jax.block_until_ready(compiled(*args))


def named(case: Case, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`; an error names the case."""
    try:
        return function(*args)
    except Exception as error:
        error.add_note(f"in the case: {case}")
        raise


@dataclass(frozen=True, eq=False)
class OnWorker:
    """The library's operator on this worker."""

    function: Callable[[Any], Any]
    derivatives = dj

    def __call__(self, x: Any) -> Any:
        return self.function(x)

    def coupled(self, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda a: a * (1 + 0.1 * jnp.sum(y)), x)


def library(cases: Iterable[Case]) -> dict[str, OnWorker]:
    """The library's operators on this worker."""
    world = dj.Partition()
    return {case.name: OnWorker(named(case, case.operator, world)) for case in cases}


# --- under a transformation -------------------------------------------------------------------------------------------


def transformed(cases: Sequence[Case], transformation: Transformation, jit: Jit = jax.jit) -> Results:
    """What the library makes of it on this worker."""
    rank = dj.Partition().rank
    operators = library(cases)
    args = {case.name: tuple(part[rank] for part in arguments(case, transformation)) for case in cases}

    def program(args: Any, n: Any) -> Results:
        return {
            case.name: named(case, transformation.function, operators[case.name], *args[case.name], n) for case in cases
        }

    return run(program, jax.device_put(args), 3 if jit else jnp.asarray(3), by=jit)


def expected(cases: Sequence[Case], transformation: Transformation) -> Results:
    """What this worker should get; one worker works it out for all."""
    P = dj.Partition()
    last = P.size - 1
    everyone = Reference(tuple(cases)).results(transformation) if P.rank == last else None
    return P.broadcast_data(everyone, root=last)[P.rank]


# --- forward and back -------------------------------------------------------------------------------------------------


def moved(cases: Sequence[Case], xs: dict[str, Any], dys: dict[str, Any], by: Jit = jax.jit) -> Results:
    """This worker's outputs and, where there are cotangents, its inputs' cotangents, from one program.

    Checks on the way that no argument is overwritten.
    """
    operators = library(cases)
    before = jax.tree.map(np.array, (xs, dys))

    def program(xs: Any, dys: Any) -> Results:
        return {case.name: named(case, _there_and_back, operators[case.name], case.name, xs, dys) for case in cases}

    arrays = jax.device_put((xs, dys))
    results = run(program, *arrays, by=by)
    jax.tree.map(np.testing.assert_array_equal, arrays, before)
    return jax.tree.map(np.asarray, results)


def _there_and_back(F: Callable[[Any], Any], name: str, xs: Any, dys: Any) -> dict[str, Any]:
    if name not in dys:
        return {"y": F(xs[name])}
    y, pullback = jax.vjp(F, xs[name])
    return {"y": y, "dx": pullback(dys[name])[0]}


def wanted(
    cases: Sequence[Case], xs: Mapping[str, tuple[Any, ...]], dys: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """This worker's part of every case's output and, where there are cotangents, of its transposed matrix times all of
    them; each worker works out some for all.

    Of what is not linear: of its derivative at `xs`, all in one compiled program.
    """
    P = dj.Partition()
    own = cases[P.rank :: P.size]
    found = {}
    for case in own:
        if case.linear:
            found[case.name] = {"y": case.dense(list(xs[case.name]))}
            if case.name in dys:
                alone, dy = Reference((case,)), [part.reshape(-1) for part in _wide(dys[case.name])]
                dx = alone.matrix.T @ np.concatenate(dy)
                found[case.name]["dx"] = [alone.inputs[0].of(dx, rank) for rank in range(P.size)]
    others = {case.name: case.dense for case in own if not case.linear}
    xs = {name: _wide(xs[name]) if name in dys else list(xs[name]) for name in others}
    dys = {name: _wide(dys[name]) for name in others if name in dys}
    found |= jax.jit(lambda xs, dys: {name: _there_and_back(others[name], name, xs, dys) for name in xs})(xs, dys)
    everyone = [result for each in P.allgather_data(jax.tree.map(np.asarray, found)) for result in each.items()]
    return {name: {key: parts[P.rank] for key, parts in result.items()} for name, result in everyone}


def _wide(blocks: Sequence[Any]) -> list[Any]:
    return [np.asarray(block).astype(np.complex128 if np.iscomplexobj(block) else np.float64) for block in blocks]


def check_exactly(chosen: Sequence[tuple[Case, str]], by: Jit = jax.jit) -> None:
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


def compare(got: Results, want: Results, tolerance: float) -> None:
    """Fail with the names of all cases that differ."""
    assert got.keys() == want.keys()
    texts = {name: difference(got[name], want[name], tolerance) for name in got}
    wrong = [f"{name}: {text}" for name, text in texts.items() if text]
    assert not wrong, "\n".join(wrong)


def difference(got: Any, want: Any, tolerance: float) -> str:
    """How two pytrees differ in structure, shape or, relative to the largest value, in value; "" where they don't."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"structure {jax.tree.structure(got)}, not {jax.tree.structure(want)}"
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        place = jax.tree_util.keystr(path)
        if np.shape(a) != np.shape(b):
            return f"{place} has shape {np.shape(a)}, not {np.shape(b)}"
        if np.size(a) == 0:
            continue
        exact = np.asarray(b, np.result_type(np.asarray(b).dtype, np.float64))
        error = np.max(np.abs(np.asarray(a).astype(exact.dtype) - exact))
        if not error <= tolerance * max(1.0, float(np.max(np.abs(exact)))):
            return f"{place} is off by {error:.3g}:\n{np.asarray(a)}\nnot\n{np.asarray(b)}"
    return ""
