"""Many cases compiled as one program on every worker, and compared with the reference."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from matrix.case import Case
from matrix.dense import Reference, arguments
from matrix.transformations import Transformation

Results = dict[str, Any]


def together() -> None:
    """Wait for all workers without spinning: the cores are for those that still compile."""
    dj.Partition().allgather_data(None)


def run(program: Callable[..., Any], *args: Any, by: Callable[..., Any] | None = jax.jit, **options: Any) -> Any:
    """Compile `program` on all workers, `by` which jit, then run it on all: who waits for a message spins. Eagerly,
    without a jit."""
    if by is None:
        return jax.block_until_ready(program(*args))
    compiled = by(program, **options)
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


@dataclass(frozen=True, eq=False)
class OnWorker:
    """The library's operator on this worker."""

    function: Callable[[Any], Any]

    def __call__(self, x: Any) -> Any:
        return self.function(x)

    def coupled(self, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda a: a * (1 + 0.1 * jnp.sum(y)), x)

    @property
    def derivatives(self) -> Any:
        return dj


def library(cases: Iterable[Case]) -> dict[str, OnWorker]:
    """The library's operators on this worker."""
    world = dj.Partition()
    return {case.name: OnWorker(named(case, case.operator, world)) for case in cases}


def transformed(
    cases: Sequence[Case], transformation: Transformation, jit: Callable[..., Any] | None = jax.jit
) -> Results:
    """What the library makes of it on this worker; eagerly, without a `jit`."""
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
    everyone = None
    if P.rank == P.size - 1:
        results = Reference(tuple(cases)).results(transformation)
        everyone = [results(rank) for rank in range(P.size)]
    return P.broadcast_data(everyone, root=P.size - 1)[P.rank]


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
