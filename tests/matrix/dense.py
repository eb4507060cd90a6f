"""The reference for programs: all workers' numbers in one vector, all operators in one matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from matrix.case import Case, outputs_of, shapes_out, smooth, zeros
from matrix.transformations import Transformation


@dataclass(frozen=True)
class Places:
    """Where one case's numbers lie in the vector: all workers' arrays one after the other."""

    start: int
    shapes: tuple[Any, ...]

    @property
    def sizes(self) -> list[int]:
        return [sum(x.size for x in jax.tree.leaves(zeros(shapes))) for shapes in self.shapes]

    @property
    def ends(self) -> list[int]:
        return [self.start, *(self.start + np.cumsum(self.sizes)).tolist()]

    @property
    def whole(self) -> slice:
        return slice(self.start, self.ends[-1])

    def of(self, vector: Any, rank: int) -> Any:
        """The worker's array, or dictionary of arrays; the vector may have dimensions in front."""
        leaves, structure = jax.tree.flatten(zeros(self.shapes[rank]))
        mine = vector[..., self.ends[rank] : self.ends[rank + 1]]
        ends = [0, *np.cumsum([leaf.size for leaf in leaves]).tolist()]
        parts = zip(leaves, pairwise(ends), strict=True)
        return structure.unflatten([mine[..., a:b].reshape(vector.shape[:-1] + leaf.shape) for leaf, (a, b) in parts])


@dataclass(frozen=True, eq=False)
class DenseOperator:
    """y = M x + constant for all workers, and `coupling`, which adds up each worker's y for each number of its x.

    `others` are the operators that are not linear: where their numbers are in x and in y, and the functions.
    """

    matrix: Any
    constant: Any
    coupling: Any
    others: Sequence[tuple[Places, Places, Callable[[list[Any]], list[Any]]]] = ()

    # JAX's own, forward mode included.
    derivatives = SimpleNamespace(
        jvp=jax.jvp,
        linear_transpose=jax.linear_transpose,
        hvp=lambda fun, primals, tangents: jax.jvp(jax.grad(fun), primals, tangents)[1],
    )

    def __call__(self, x: Any) -> Any:
        y = self.matrix @ x + self.constant
        for source, target, function in self.others:
            ys = function([source.of(x, rank) for rank in range(len(source.shapes))])
            y = y.at[target.whole].set(jnp.concatenate([part.reshape(-1) for part in ys]))
        return y

    def coupled(self, x: Any, y: Any) -> Any:
        return x * (1 + 0.1 * (self.coupling @ y))


@dataclass(frozen=True, eq=False)
class Reference:
    """What every worker should get in each of `cases`."""

    cases: tuple[Case, ...]

    def results(self, transformation: Transformation) -> list[dict[str, Any]]:
        """For each worker what it should get: by case and name of the result."""
        parts = list(zip(self.cases, self.inputs, self.outputs, strict=True))
        others = [(source, target, case.dense) for case, source, target in parts if not case.linear]

        def program(operator: tuple[Any, ...], x: Any, c: Any, n: Any) -> dict[str, Any]:
            return transformation.function(DenseOperator(*operator, others), x, c, n)

        xs, cs = zip(*(arguments(case, transformation) for case in self.cases), strict=True)
        vectors = (_vector(xs, len(transformation.lead)), _vector(cs))
        found = jax.jit(program)((self.matrix, self.constant, self.coupling), *vectors, 3)
        found = {name: np.asarray(vector) for name, vector in found.items()}

        def of(rank: int, source: Places, target: Places) -> dict[str, Any]:
            return {name: (source if name.startswith("dx") else target).of(found[name], rank) for name in found}

        return [{case.name: of(rank, *places) for case, *places in parts} for rank in range(self.cases[0].world)]

    @cached_property
    def inputs(self) -> tuple[Places, ...]:
        return _places([case.shapes for case in self.cases])

    @cached_property
    def outputs(self) -> tuple[Places, ...]:
        return _places([shapes_out(case) for case in self.cases])

    @cached_property
    def constant(self) -> np.ndarray:
        outputs = outputs_of(self.cases, {case.name: zeros(list(case.shapes)) for case in self.cases})
        return _vector([outputs[case.name] for case in self.cases])

    @cached_property
    def matrix(self) -> np.ndarray:
        matrix = np.zeros((self.outputs[-1].whole.stop, self.inputs[-1].whole.stop))
        for case, source, target in zip(self.cases, self.inputs, self.outputs, strict=True):
            if case.linear:
                matrix[target.whole, source.whole] = _matrix(case)
        return matrix

    @cached_property
    def coupling(self) -> np.ndarray:
        """Which numbers of x and of y are of one worker, in one case."""
        of_x, of_y = (
            np.concatenate(
                [np.full(n, 1000 * k + rank) for k, each in enumerate(parts) for rank, n in enumerate(each.sizes)]
            )
            for parts in (self.inputs, self.outputs)
        )
        return (of_x[:, None] == of_y[None, :]).astype(float)


@cache
def _matrix(case: Case) -> np.ndarray:
    """One case's, column by column, from unit vectors."""
    alone = Reference((case,))
    (inputs,) = alone.inputs
    columns = [
        _vector([case.dense([inputs.of(unit, rank) for rank in range(case.world)])]) - alone.constant
        for unit in np.eye(inputs.whole.stop)
    ]
    return np.stack(columns, 1) if columns else np.zeros((alone.constant.size, 0))


def _places(shapes: Sequence[tuple[Any, ...]]) -> tuple[Places, ...]:
    places: list[Places] = []
    for each in shapes:
        places.append(Places(places[-1].whole.stop if places else 0, each))
    return tuple(places)


def _vector(blocks: Sequence[Any], lead: int = 0) -> np.ndarray:
    return np.concatenate([x.reshape(*x.shape[:lead], -1) for x in jax.tree.leaves(blocks)], axis=-1)


def arguments(case: Case, transformation: Transformation) -> tuple[Any, Any]:
    """All workers' inputs, and weights of their outputs."""
    x = smooth(f"{case.name} x", case.shapes, transformation.lead)
    return x, smooth(f"{case.name} c", shapes_out(case))
