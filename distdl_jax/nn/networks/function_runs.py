"""Plain functions between the layers of a network: of whole arrays, whose blocks the workers have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from distdl_jax.distribute.inner import ON_BLOCKS, InnerDoor
from distdl_jax.distribute.map_blocks import Local
from distdl_jax.distribute.mixing import is_elementwise
from distdl_jax.errors import DistDLError
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.nn.base.layer import BaseLayer, Layer, ends_of
from distdl_jax.nn.shape.data_movement import AllReduce, AllSumReduce, ReduceScatter, SumReduce
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.decomposition import index_of
from distdl_jax.plans.worker_ranks import Workers, union
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.scopes import place_scope
from distdl_jax.transforms.block_functions import BlockFunction

Function = Callable[..., Any]


class Composed:
    """Plain functions, and networks of them, one after the other: pairs of a name in the network and a function."""

    def __init__(self, parts: Sequence[tuple[Any, Function]]) -> None:
        self.parts = tuple(parts)
        self.__qualname__ = ", ".join(function_name(part) for _, part in self.parts)  # in messages

    def __call__(self, x: Array) -> Any:
        """Return the last function's result."""
        for name, part in self.parts:
            with place_scope(name, part):
                x = applied(part, x)
        return x


def applied(part: Function, x: Array) -> Any:
    """Return a plain function's result, in a scope of its name."""
    with jax.named_scope(getattr(part, "__name__", type(part).__name__)):
        return part(x)


@dataclass(frozen=True)
class DistributedFunctions:
    """Plain functions for which data moves, as a layer without parameters."""

    door: InnerDoor

    def init(self, key: Array, dtype: Any = None) -> dict[str, Array]:
        """Return the empty dictionary, since there are no parameters."""
        return {}

    def __call__(self, params: dict[str, Array], x: Array) -> Any:
        """Return this worker's block of the result."""
        return self.door(x, tuple(range(self.door.P.world.size)))


@dataclass(frozen=True)
class FunctionsPlan(BlocksPlan):
    """The plan of consecutive functions for which data moves: of all of them, in place of the first one's."""

    functions: DistributedFunctions | None = None


@dataclass(frozen=True)
class FunctionRun:
    """Consecutive plain functions on blocks on `P`, in places up to `stop`, and what follows, if anything.

    `takes_as_given`: whether it is only certain that the result is to be on P.
    """

    composed: Composed
    P: Partition
    stop: int
    following: Any
    takes_as_given: bool

    @property
    def is_elementwise(self) -> bool:
        """Whether all functions are known to be elementwise: then they are called on the blocks."""
        return all(is_elementwise(part, self.P.dim) for _, part in self.composed.parts)

    @property
    def door(self) -> InnerDoor:
        """The functions as one of whole arrays."""
        following, P_x = self.following, ends_of(self.following).P_x
        if isinstance(following, BlockFunction):
            P_x = following.P
        adds = isinstance(following, AllReduce | AllSumReduce | ReduceScatter | SumReduce)
        reduces_otherwise = isinstance(following, AllReduce) and following.op != "sum"
        target = P_x if P_x is not None and not adds and union(P_x.ranks) == union(self.P.ranks) else None
        return InnerDoor(
            self.composed, self.P, target, "terms" if adds else "blocks", reduces_otherwise, self.takes_as_given
        )

    def __call__(self, x: Array, team: Workers) -> Any:
        """Return this worker's block of the result; or `ON_BLOCKS`: each function is to be called on the block."""
        if self.is_elementwise:
            return ON_BLOCKS
        team = union(team, self.P.ranks)
        if self.P.world.rank in team:
            return self.door(x, team)
        return self._outside(x)

    def _outside(self, x: Array) -> Any:
        """Return the result on a worker outside of the network: of its zero-volume array, if the functions take one."""
        try:
            y = self.composed(x)
        except DistDLError:
            raise
        except Exception:
            return x
        return y if np.size(y) == 0 or np.ndim(y) == 0 else x

    def planned(self, x: ShapeDtypes) -> FunctionsPlan | None:
        """Plan all functions together; None if each is planned by what it makes of each block."""
        blocks = None if self.is_elementwise else self.door.planned(x)
        return None if blocks is None else FunctionsPlan(blocks, DistributedFunctions(self.door))


def function_runs(parts: Sequence[tuple[Any, Any]], P_x: Partition | None = None) -> dict[Any, FunctionRun]:
    """Return the runs of plain functions among the parts of a network, by the name of the first.

    These are the runs whose input is known to be split. `P_x` is the partition of the network's input, if certain.
    """
    if trace_context.whole_program:
        return {}
    runs: dict[Any, FunctionRun] = {}
    before, place = P_x, 0
    while place < len(parts):
        stop = next((n for n in range(place, len(parts)) if not is_plain(parts[n][1])), len(parts))
        following = parts[stop][1] if stop < len(parts) else None
        P = before or ends_of(following).P_x
        if stop > place and P is not None and max(P.shape, default=1) > 1:
            runs[parts[place][0]] = FunctionRun(Composed(parts[place:stop]), P, stop, following, before is None)
        before, place = P if isinstance(following, Local) else ends_of(following).P_y, stop + 1
    return runs


def is_plain(part: Any) -> bool:
    """Say whether it is a plain function, or a network of plain functions only."""
    if isinstance(part, Layer):
        return isinstance(part, BaseLayer) and part.input_partition is None
    return not isinstance(part, BlockFunction | Local)


def activated(function: Function, P: Partition, x: Array, copied: tuple[int, ...] = ()) -> Any:
    """Return a layer's function of the block `x` on P, along whose dimensions `copied` workers hold copies."""
    if P.size == 1 or trace_context.whole_program or isinstance(function, Local) or is_elementwise(function, P.dim):
        return function(x)
    if copied:  # each copy by its own team
        assert P.rank is not None
        index = index_of(P.rank, P.shape)
        P = P.slice(copied, [index[d] for d in copied])
    y = InnerDoor(function, P, P)(x, union(P.ranks))
    return function(x) if y is ON_BLOCKS else y


def team_of(layers: Sequence[Any]) -> Workers:
    """Return the workers of those layers that know their partitions."""
    return union(*_teams(layers))


def _teams(layers: Sequence[Any]) -> Iterator[Workers]:
    for layer in layers:
        if (parts := getattr(layer, "_parts", None)) is not None:
            yield from _teams([part for _, part in parts])
        elif hasattr(layer, "_team"):
            yield layer._team
        else:
            ends = (getattr(layer, f"{end}_partition", None) for end in ("input", "output"))
            yield from (P.ranks for P in ends if isinstance(P, Partition))
