"""The reference for programs: all workers' numbers in one vector, all operators in one matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from matrix.case import Case, outputs_of
from matrix.painting import is_shape, smooth
from matrix.transformations import Transformation


@dataclass(frozen=True, eq=False)
class DenseOperator:
    """y = M x + constant for all workers, and `coupling`, which adds up each worker's y for each number of its x.

    `others` are the operators that are not linear: where their numbers are in x and in y, and the functions.
    """

    matrix: Any
    constant: Any
    coupling: Any
    others: "tuple[tuple[_Part, _Part, Callable[[list[Any]], list[Any]]], ...]" = ()

    def __call__(self, x: Any) -> Any:
        y = self.matrix @ x + self.constant
        for source, target, function in self.others:
            ys = function(
                [x[a:b].reshape(shape) for (a, b), shape in zip(pairwise(source.ends), source.shapes, strict=True)]
            )
            y = y.at[target.start : target.stop].set(jnp.concatenate([part.reshape(-1) for part in ys]))
        return y

    def coupled(self, x: Any, y: Any) -> Any:
        return x * (1 + 0.1 * (self.coupling @ y))

    @property
    def derivatives(self) -> Any:
        return PlainDerivatives


class PlainDerivatives:
    """JAX's own, forward mode included."""

    grad, jvp, linearize, linear_transpose = map(staticmethod, (jax.grad, jax.jvp, jax.linearize, jax.linear_transpose))

    @staticmethod
    def hvp(fun: Any, primals: Any, tangents: Any) -> Any:
        return jax.jvp(jax.grad(fun), primals, tangents)[1]


@dataclass(frozen=True, eq=False)
class Reference:
    """What every worker should get in each of `cases`."""

    cases: tuple[Case, ...]

    def results(self, transformation: Transformation) -> Callable[[int], dict[str, Any]]:
        """From a worker's rank to what it should get: by case and name of the result."""

        def program(operator: tuple[Any, ...], x: Any, c: Any, n: Any) -> dict[str, Any]:
            return transformation.function(DenseOperator(*operator, self.others), x, c, n)

        xs, cs = zip(*(arguments(case, transformation) for case in self.cases), strict=True)
        vectors = (_vector(xs, len(transformation.lead)), _vector(cs))
        found = jax.jit(program)((self.matrix, self.constant, self.coupling), *vectors, 3)

        def of_rank(rank: int) -> dict[str, Any]:
            results: dict[str, Any] = {case.name: {} for case in self.cases}
            for name, vector in found.items():
                parts = self.inputs if name.startswith("dx") else self.outputs
                for case, part in zip(self.cases, parts, strict=True):
                    results[case.name][name] = part.of(np.asarray(vector), rank)
            return results

        return of_rank

    @cached_property
    def inputs(self) -> tuple["_Part", ...]:
        return _parts([case.shapes for case in self.cases])

    @cached_property
    def outputs(self) -> tuple["_Part", ...]:
        return _parts([shapes_out(case) for case in self.cases])

    @cached_property
    def others(self) -> tuple[Any, ...]:
        parts = zip(self.inputs, self.outputs, self.cases, strict=True)
        return tuple((source, target, case.dense) for source, target, case in parts if not case.linear)

    @cached_property
    def constant(self) -> np.ndarray:
        outputs = outputs_of(self.cases, {case.name: _zeros(case) for case in self.cases})
        return _vector([outputs[case.name] for case in self.cases])

    @cached_property
    def matrix(self) -> np.ndarray:
        matrix = np.zeros((self.outputs[-1].stop, self.inputs[-1].stop))
        for case, source, target in zip(self.cases, self.inputs, self.outputs, strict=True):
            if case.linear:
                matrix[target.start : target.stop, source.start : source.stop] = _matrix(case)
        return matrix

    @cached_property
    def coupling(self) -> np.ndarray:
        owner_in, owner_out = (
            np.concatenate([part.owner(n) for n, part in enumerate(parts)]) for parts in (self.inputs, self.outputs)
        )
        return (owner_in[:, None] == owner_out[None, :]).astype(float)


@dataclass(frozen=True)
class _Part:
    """Where one case's numbers lie in the vector: all workers' arrays one after the other."""

    start: int
    shapes: tuple[Any, ...]

    @property
    def ends(self) -> list[int]:
        sizes = [sum(x.size for x in jax.tree.leaves(_zeros_of(shapes))) for shapes in self.shapes]
        return [self.start, *(self.start + np.cumsum(sizes)).tolist()]

    @property
    def stop(self) -> int:
        return self.ends[-1]

    def owner(self, case: int) -> np.ndarray:
        """A number for each worker of each case, for each number of it."""
        return np.concatenate([np.full(b - a, 1000 * case + rank) for rank, (a, b) in enumerate(pairwise(self.ends))])

    def of(self, vector: np.ndarray, rank: int) -> Any:
        """The worker's array, or dictionary of arrays; the vector may have dimensions in front."""
        leaves, structure = jax.tree.flatten(_zeros_of(self.shapes[rank]))
        mine = vector[..., self.ends[rank] : self.ends[rank + 1]]
        parts = np.split(mine, np.cumsum([leaf.size for leaf in leaves])[:-1], axis=-1)
        return structure.unflatten(
            [part.reshape(vector.shape[:-1] + leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        )


@cache
def _matrix(case: Case) -> np.ndarray:
    """One case's, column by column, from unit vectors."""
    (inputs,) = _parts([case.shapes])
    constant = _vector([case.dense(_zeros(case))])
    matrix = np.zeros((constant.size, inputs.stop))
    for column in range(inputs.stop):
        unit = np.zeros(inputs.stop)
        unit[column] = 1
        matrix[:, column] = _vector([case.dense([inputs.of(unit, rank) for rank in range(case.world)])]) - constant
    return matrix


def _parts(shapes: Sequence[tuple[Any, ...]]) -> tuple[_Part, ...]:
    parts: list[_Part] = []
    for each in shapes:
        parts.append(_Part(parts[-1].stop if parts else 0, each))
    return tuple(parts)


def _vector(blocks: Sequence[Any], lead: int = 0) -> np.ndarray:
    return np.concatenate([x.reshape(*x.shape[:lead], -1) for x in jax.tree.leaves(blocks)], axis=-1)


def _zeros_of(shapes: Any) -> Any:
    return jax.tree.map(np.zeros, shapes, is_leaf=is_shape)


def _zeros(case: Case) -> list[Any]:
    return [_zeros_of(shapes) for shapes in case.shapes]


@cache
def shapes_out(case: Case) -> tuple[Any, ...]:
    """The shape of each worker's output."""
    ys = case.dense(_zeros(case)) if case.linear else jax.eval_shape(case.dense, _zeros(case))
    return tuple(y.shape for y in ys)


def arguments(case: Case, transformation: Transformation) -> tuple[Any, Any]:
    """All workers' inputs, and weights of their outputs."""
    x = smooth(f"{case.name} x", case.shapes, transformation.lead)
    return x, smooth(f"{case.name} c", shapes_out(case))
