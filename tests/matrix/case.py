"""One operator of the matrix: as the library builds it, as the reference does, and the numbers that both get."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import distdl_jax as dj
from distdl_jax.functional.plan import Plan

Operator = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Case:
    """One operator on one choice of partitions and shapes.

    - `world`: the number of workers.
    - `shapes`: for each worker the shape of its input, or a dictionary of shapes.
    - `operator`: from the partition of the whole world to the library's operator, a function of this worker's input.
    - `dense`: from all workers' inputs to all workers' outputs, in numpy. Linear, up to a constant; where it is not
      `linear`, in jax.numpy, so that JAX differentiates it.
    - `plan`: from that partition and what all workers hold, by world rank (as `shapes`), to the library's plan.
    - `any_dtype`, `any_complex`: whether integers and booleans move too; whether complex numbers do.
    - `exact`: whether small integers go through it without rounding.
    - `silent`: whether it has to do without any message; so does everything on one worker.
    """

    name: str
    world: int
    shapes: tuple[Any, ...]
    operator: Callable[[dj.Partition], Operator]
    dense: Callable[[list[Any]], list[Any]]
    plan: Callable[[dj.Partition, dict[int, Any]], Plan]
    any_dtype: bool = True
    silent: bool = False
    linear: bool = True
    any_complex: bool = True
    exact: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def kind(self) -> str:
        """Which operator it is, whatever the partitions."""
        return self.name.split(" ", 1)[0]


def is_shape(shape: Any) -> bool:
    """Whether this is a shape, for pytrees of shapes."""
    return isinstance(shape, tuple)


def zeros(shapes: Any) -> Any:
    """An array, or a dictionary of arrays, for a pytree of shapes."""
    return jax.tree.map(np.zeros, shapes, is_leaf=is_shape)


@cache
def shapes_out(case: Case) -> tuple[Any, ...]:
    """The shape of each worker's output."""
    xs = [zeros(shapes) for shapes in case.shapes]
    return tuple(y.shape for y in (case.dense(xs) if case.linear else jax.eval_shape(case.dense, xs)))


def outputs_of(cases: Sequence[Case], blocks: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Each case's `dense` of its blocks, by name; what is JAX's in one compiled program."""
    compiled = {case.name: case.dense for case in cases if not case.linear}
    given = {name: list(blocks[name]) for name in compiled}
    found = jax.jit(lambda given: {name: compiled[name](x) for name, x in given.items()})(given) if given else {}
    outputs = {case.name: case.dense(list(blocks[case.name])) for case in cases if case.linear}
    return outputs | jax.tree.map(np.asarray, found)


def painted(name: str, shapes: Sequence[Any], dtype: Any, lead: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """For each worker an array of its shape, or a dictionary of arrays, which every worker can paint from a name alone:
    small integers, so that sums are exact in every dtype; with imaginary parts where there are any."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {dtype} {lead}".encode()))
    dtype = np.dtype(dtype)

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        drawn = rng.integers(0 if dtype.kind in "ub" else -3, 4, lead + shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return (drawn + 1j * rng.integers(-3, 4, lead + shape)).astype(dtype)
        return (drawn % 2 if dtype.kind == "b" else drawn).astype(dtype)

    return tuple(jax.tree.map(numbers, each, is_leaf=is_shape) for each in shapes)


def smooth(name: str, shapes: Sequence[Any], lead: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """The same in float64 and not integers, for programs that are not linear."""
    return tuple(
        jax.tree.map(lambda x: np.sin(1.7 * x + np.arange(x.size).reshape(x.shape)), each)
        for each in painted(name, shapes, np.float64, lead)
    )
