"""Compatibility of adjacent layers: the partition of an output against the partition of the next input.

Only misfits that are certain are rejected: between layers of this library, and functions of `jax.nn`, which leave
blocks where they are. Any other function may transpose dimensions, or communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.nn.base.layer import BaseLayer, Ends, Layer, ends_of
from distdl_jax.nn.shape.data_movement import AllReduce, AllSumReduce, ReduceScatter, SumReduce
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.plans.worker_ranks import Workers, union
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.mixed_dimensions import Dim
from distdl_jax.transforms.block_functions import BlockFunction
from distdl_jax.transforms.plain_functions import Function, follow, is_elementwise, refusal
from distdl_jax.transports.agreement import agree


class Seam(NamedTuple):
    """The boundary before a layer: the previous layer leaves its output on `P_y`, layer `place` takes it from `P_x`."""

    place: int
    layer: Any
    P_y: Partition
    P_x: Partition

    def __str__(self) -> str:
        takes = f"`layers[{self.place}]` ({type(self.layer).__name__}) takes its input from {self.P_x.describe()}"
        return f"{takes}, but the previous layer leaves it on {self.P_y.describe()}"

    @property
    def left_out(self) -> set[int]:
        """The workers whose blocks the layer does not use."""
        return set() if self.P_y.ranks == self.P_x.ranks else set(self.P_y.ranks) - set(self.P_x.ranks)


def in_equal_blocks(P: Partition, other: Partition) -> bool:
    """Say whether each worker has the same block of a tensor on both; unsplit dimensions may be missing."""
    alike = P.shape == other.shape if P.dim == other.dim else _cut(P) == _cut(other)
    return P.ranks == other.ranks and alike


def rearranged(P: Partition, other: Partition) -> bool:
    """Say whether both have the same workers, but with different blocks."""
    are_grids = isinstance(P, CartesianPartition) and isinstance(other, CartesianPartition)
    if not are_grids or P.dim != other.dim or in_equal_blocks(P, other):
        return False
    return union(P.ranks) == union(other.ranks)


def _cut(P: Partition) -> tuple[int, ...]:
    return tuple(p for p in P.shape if p > 1)


def seams(layers: Sequence[Callable[..., Any]]) -> list[Seam | None]:
    """Return the seam before each layer; None if too little is certain about the two layers."""
    found: list[Seam | None] = []
    before: Partition | None = None
    for place, layer in enumerate(layers):
        found.append(None)
        if _stays(layer):
            continue
        P_x, P_y = ends_of(layer)
        if before is not None and P_x is not None and before.world is P_x.world:
            found[-1] = Seam(place, layer, before, P_x)
        before = P_y
    return found


def ends_of_chain(layers: Sequence[Any]) -> Ends:
    """Return what is certain of the partitions of a chain of layers."""
    known = [ends_of(layer) for layer in layers if not _stays(layer)]
    return Ends(known[0].P_x, known[-1].P_y) if known else Ends()


def check_arrangement(layers: Sequence[Callable[..., Any]]) -> None:
    """Reject a layer that takes its input from the previous layer's workers, but in different blocks."""
    for seam in seams(layers):
        if seam is not None and rearranged(seam.P_y, seam.P_x):
            raise InvalidArgumentError(f"{seam}: a `Repartition` between them moves it.")


def check_taken(seam: Seam, shapes: Mapping[int, Sequence[int]]) -> None:
    """Reject a layer that would ignore the block of a worker; `shapes` are the blocks' shapes, by world rank."""
    for worker in sorted(seam.left_out & shapes.keys()):
        if 0 not in (shape := tuple(shapes[worker])):
            raise PlanError(
                f"{seam}, a block of {shape_text(shape)} on worker {worker}, too: a `Repartition` between them moves "
                "it."
            )


def spare_copies(layers: Sequence[Any]) -> dict[int, set[int]]:
    """Return, by a layer's place, the workers with copies before it, in whose place it uses another worker's."""
    found: dict[int, set[int]] = {}
    before: Any = None
    for place, layer in enumerate(layers):
        P_x = ends_of(layer).P_x
        if isinstance(before, BaseLayer) and P_x is not None:
            found[place] = _spared(before, P_x)
        if not _stays(layer):
            before = layer
    return found


def _spared(layer: BaseLayer, P_x: Partition) -> set[int]:
    """Return the workers outside of `P_x` whose block of a layer's output is replicated on a worker of `P_x`."""
    P_y: Partition | None = layer.output_partition
    try:
        copied = layer._copied
    except PlanError:  # of a broadcast that transposes a partition, which tells nothing about copies
        return set()
    if P_y is None or not copied:
        return set()
    blocks = np.arange(P_y.size).reshape(P_y.shape)
    first = blocks[tuple(slice(0, 1) if d in copied else slice(None) for d in range(P_y.dim))]
    block_of = dict(zip(P_y.ranks, np.broadcast_to(first, P_y.shape).ravel().tolist(), strict=True))
    taken = {block_of[rank] for rank in P_x.ranks if rank in block_of}
    return {rank for rank, block in block_of.items() if rank not in P_x.ranks and block in taken}


def _stays(layer: Any) -> bool:
    """Say whether a function is known to leave blocks in place."""
    return getattr(jax.nn, getattr(layer, "__name__", ""), None) is layer


# --- plain functions between layers ---------------------------------------------------------------------------------


class FunctionRun(NamedTuple):
    """Consecutive plain functions, and the layer after them, if any.

    `P` is the partition of their input block or, if only that is certain (`is_after`), of their output; workers hold
    copies along its dimensions `copied`.
    """

    functions: tuple[Function, ...]
    P: Partition
    is_after: bool
    following: Any
    copied: tuple[int, ...] = ()

    def check(self, x: Any, team: Workers) -> None:
        """Reject, on all of `team`, functions that mix a split dimension of a block `x`; see `nn.Local`."""
        if all(is_elementwise(function, self.P.dim) for function in self.functions):
            return
        followed = follow(self.functions, x)  # everywhere, since it might move data
        team = union(team, self.P.ranks)

        def contribute() -> None:
            if self.P.active and followed is not None:
                reduces = isinstance(self.following, AllReduce | AllSumReduce | ReduceScatter | SumReduce)
                result = followed.result.dims if followed.result else ()
                split = self._split(result, len(x.shape))
                text = refusal(followed, split, may_be_partial=reduces, may_merge=self.following is None)
                text = text or self._turned(result, split)
                if text is not None:
                    raise InvalidArgumentError(text)

        if self.P.world.rank in team:
            agree(self.P.world, team, f"functions of blocks on {self.P.describe()}", contribute)

    def _turned(self, result: Sequence[Dim], split: Mapping[int, int]) -> str | None:
        """Return why the following layer can't take the result: a split dimension has moved."""
        P_x = ends_of(self.following).P_x
        if self.is_after or P_x is None or P_x.dim != len(result) or union(P_x.ranks) != union(self.P.ranks):
            return None
        for place, (((label, _), *_), p) in enumerate(zip(result, P_x.shape, strict=True)):
            if label is not None and split.get(label, p) != p:
                return (
                    f"{function_name(self.functions[-1])} leaves dimension {label} of the block, which is split over "
                    f"{split[label]} workers, as dimension {place} of its result, but {type(self.following).__name__} "
                    f"takes its input from {P_x.describe()}: transpose the result back, or give it a partition that is "
                    "split there."
                )
        return None

    def _split(self, result: Sequence[Any], dims: int) -> dict[int, int]:
        """Return the number of workers along each split dimension of the block."""
        if not self.is_after:
            return {d: p for d, p in enumerate(_counts(self.P, dims)) if p > 1 and d not in self.copied}
        counts = zip(result, _counts(self.P, len(result)), strict=False)
        return {dim[0][0]: p for dim, p in counts if p > 1 and dim[0][0] is not None}


def _counts(P: Partition, dims: int) -> tuple[int, ...]:
    """Return the number of workers along each dimension of a tensor; nothing if the partition doesn't fit."""
    shape = (1,) * (dims - P.dim) + P.shape
    return shape[:dims] if all(p == 1 for p in shape[dims:]) else ()


def check_activation(function: Function, P: Partition, x: Any, copied: tuple[int, ...] = ()) -> None:
    """Reject, on all workers of `P`, a layer's function that mixes entries along a split dimension of the block `x`."""
    if P.size > 1:
        FunctionRun((function,), P, False, function, copied).check(x, P.ranks)


def function_runs(layers: Sequence[Any], P_x: Partition | None = None) -> dict[int, FunctionRun]:
    """Return the runs of plain functions among layers, by the place of the first: those for which a split is known.

    `P_x` is the partition of the first layer's input, if certain.
    """
    runs: dict[int, FunctionRun] = {}
    before, place = P_x, 0
    while place < len(layers):
        stop = next((n for n in range(place, len(layers)) if not _is_plain(layers[n])), len(layers))
        following = layers[stop] if stop < len(layers) else None
        P = before or ends_of(following).P_x
        if stop > place and P is not None and max(P.shape, default=1) > 1:
            functions = tuple(_functions(layers[place:stop]))
            runs[place] = FunctionRun(functions, P, before is None, following if isinstance(following, Layer) else None)
        before, place = ends_of(following).P_y, stop + 1
    return runs


def _is_plain(layer: Any) -> bool:
    """Say whether it is a plain function, or a network of plain functions only."""
    if isinstance(layer, Layer):
        return isinstance(layer, BaseLayer) and layer.input_partition is None
    return not isinstance(layer, BlockFunction)


def _functions(layers: Iterable[Any]) -> Iterator[Function]:
    for layer in layers:
        if (parts := getattr(layer, "_layers", None)) is not None:
            yield from _functions(parts)
        else:
            yield partial(layer) if isinstance(layer, Layer) else layer  # of x alone


def team_of(layers: Iterable[Any]) -> Workers:
    """Return the workers of those layers that know their partitions."""
    return union(*_teams(layers))


def _teams(layers: Iterable[Any]) -> Iterator[Workers]:
    for layer in layers:
        if (parts := getattr(layer, "_parts", None)) is not None:
            yield from _teams(part for _, part in parts)
        elif hasattr(layer, "_team"):
            yield layer._team
        else:
            ends = (getattr(layer, f"{end}_partition", None) for end in ("input", "output"))
            yield from (P.ranks for P in ends if isinstance(P, Partition))
