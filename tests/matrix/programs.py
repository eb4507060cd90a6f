"""Many cases compiled as one program on every worker, and compared with the reference."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matrix.cases import Case
from matrix.painting import painted, smooth
from matrix.transformations import Transformation
from mpi4py import MPI

import distdl_jax as dj

Results = dict[str, Any]


def together() -> None:
    """Wait for all workers without spinning: the cores are for those that still compile."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def run(program: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compile `program` on all workers, then run it on all: a message waits for a compiling worker by spinning."""
    compiled = jax.jit(program, **options)
    compiled.trace(*args).lower().compile()
    together()
    return jax.block_until_ready(compiled(*args))


def named(case: Case, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`; an error names the case."""
    try:
        return function(*args)
    except Exception as error:
        error.add_note(f"in the case: {case}")
        raise


def shapes_out(case: Case) -> tuple[Any, ...]:
    """The shape of each worker's output."""
    return tuple(y.shape for y in case.dense([*painted(case.name, case.shapes, np.float64)]))


def matrix_of(case: Case) -> Callable[[Any], Any]:
    """The reference as a function for JAX, from all workers' inputs to all workers' outputs: a dense matrix."""
    zeros = jax.tree.map(lambda shape: np.zeros(shape), case.shapes, is_leaf=lambda s: isinstance(s, tuple) and _flat(s))
    leaves, structure = jax.tree.flatten(zeros)
    sizes = [leaf.size for leaf in leaves]

    def flat(vector: np.ndarray) -> np.ndarray:
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        blocks = structure.unflatten([part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])
        return np.concatenate([y.reshape(-1) for y in case.dense(list(blocks))])

    constant = flat(np.zeros(sum(sizes)))
    columns = [flat(unit) - constant for unit in np.eye(sum(sizes))]
    matrix = np.stack(columns, axis=1) if columns else np.zeros((constant.size, 0))
    out = shapes_out(case)
    ends = np.cumsum([int(np.prod(shape)) for shape in out])[:-1]

    def dense(blocks: Any) -> Any:
        y = matrix @ jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(blocks)]) + constant
        return tuple(part.reshape(shape) for part, shape in zip(jnp.split(y, ends), out, strict=True))

    return dense


def _flat(shape: tuple[Any, ...]) -> bool:
    return all(isinstance(n, int) for n in shape)


def expected(cases: Sequence[Case], transformation: Transformation) -> Results:
    """This worker's part of the reference. Each worker works out some of the cases for all."""
    comm = MPI.COMM_WORLD
    mine = cases[comm.rank :: comm.size]
    operators = {case.name: matrix_of(case) for case in mine}
    args = {case.name: arguments(case, transformation) for case in mine}

    def program(args: Any, n: Any) -> Results:
        return {name: transformation.function(F, *args[name], n) for name, F in operators.items()}

    results = jax.tree.map(np.asarray, jax.jit(program)(args, 3))
    parts = [{name: [part[rank] for part in result] for name, result in results.items()} for rank in range(comm.size)]
    together()
    return {name: result for some in comm.alltoall(parts) for name, result in some.items()}


def arguments(case: Case, transformation: Transformation) -> tuple[Any, Any]:
    """All workers' inputs and weights."""
    return (
        smooth(f"{case.name} x", case.shapes, transformation.lead),
        smooth(f"{case.name} c", shapes_out(case)),
    )


def transformed(cases: Sequence[Case], transformation: Transformation, jit: bool = True) -> Results:
    """What the library makes of it on this worker."""
    rank = MPI.COMM_WORLD.rank
    operators = library(cases)
    args = {case.name: tuple(part[rank] for part in arguments(case, transformation)) for case in cases}

    def program(args: Any, n: Any) -> Results:
        return {
            case.name: named(case, transformation.function, operators[case.name], *args[case.name], n)
            for case in cases
        }

    args = jax.tree.map(jnp.asarray, args)
    return run(program, args, 3) if jit else program(args, 3)


def library(cases: Iterable[Case]) -> dict[str, Callable[[Any], Any]]:
    """The library's operators on this worker."""
    world = dj.Partition()
    return {case.name: named(case, case.operator, world) for case in cases}


def compare(got: Results, want: Results, tolerance: float) -> None:
    """Fail with the names of all cases that differ."""
    assert got.keys() == want.keys()
    wrong = [text for name in got if (text := difference(got[name], want[name], tolerance))]
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in zip(got, wrong, strict=False))


def difference(got: Any, want: Any, tolerance: float) -> str:
    """How two pytrees differ in structure, shape or, relative to the largest value, in value; "" where they don't."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"structure {jax.tree.structure(got)}, not {jax.tree.structure(want)}"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if np.shape(a) != np.shape(b):
            return f"shape {np.shape(a)}, not {np.shape(b)}"
        if np.size(a) == 0:
            continue
        exact = np.asarray(b, np.result_type(b, np.float64))
        error = np.max(np.abs(np.asarray(a, exact.dtype) - exact))
        if not error <= tolerance * max(1.0, float(np.max(np.abs(exact)))):
            return f"off by {error:.3g}:\n{np.asarray(a)}\nnot\n{np.asarray(b)}"
    return ""
