"""One operator of the matrix: as the library builds it, and as the reference does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

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


def outputs_of(cases: Sequence[Case], blocks: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Each case's `dense` of its blocks, by name; what is JAX's in one compiled program."""
    compiled = {case.name: case.dense for case in cases if not case.linear}
    given = {name: list(blocks[name]) for name in compiled}
    found = jax.jit(lambda given: {name: compiled[name](x) for name, x in given.items()})(given) if given else {}
    outputs = {case.name: case.dense(list(blocks[case.name])) for case in cases if case.linear}
    return outputs | jax.tree.map(np.asarray, found)
