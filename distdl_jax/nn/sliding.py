"""Windows that slide over a partitioned tensor: what convolution and pooling share.

A worker's balanced output block needs an input range. The workers exchange so that each has that range, and what lies
outside the tensor is left to the local operation as padding, or filled in by the padding mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.backends.mpi.functional.boxes import owned_grid
from distdl_jax.backends.mpi.functional.halo_exchange import exchange_ranges
from distdl_jax.backends.mpi.partition import MPIPartition
from distdl_jax.backends.mpi.structure import Structure, exchange_structures
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.plans.decomposition import ProductGrid, Range, index_of
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.windows import Windows, same_padding

PaddingMode = Literal["zeros", "circular", "reflect", "replicate"]
PADDING_MODES = ("zeros", "circular", "reflect", "replicate")
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SlidingWindows:
    """The arguments that windows over D feature dimensions have, one entry for each."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Pairs
    mode: PaddingMode = "zeros"

    def along(self, d: int, size: int) -> Windows:
        """The windows along feature dimension `d` of a tensor of `size` there."""
        low, high = self.padding[d]
        limit = {"circular": size, "reflect": max(size - 1, 0), "replicate": (low + high) * min(size, 1)}.get(self.mode)
        if limit is not None and max(low, high) > limit:
            raise PlanError(
                f"`padding` (={self.padding[d]}) in feature dimension {d} must be at most {limit} there: the tensor "
                f"has length {size}, and padding_mode is {self.mode!r}."
            )
        try:
            return Windows(size, self.kernel[d], self.stride[d], self.dilation[d], (low, high), self.mode == "circular")
        except ValueError as error:
            raise PlanError(f"In feature dimension {d}: {error}") from None


@dataclass(frozen=True)
class SlidingPlan:
    """Who needs which input for its balanced block of outputs: the same on every worker that takes part.

    - `P_x`: P_n x P_c x P_{D-1} x ... x P_0, the partition of an N x C x features tensor.
    - `structures`: what each worker holds, by world rank.
    - `owned`: the grid of the blocks on P_x, balanced or not.
    """

    P_x: MPIPartition
    windows: SlidingWindows
    structures: dict[int, Structure]
    owned: ProductGrid

    @cached_property
    def _along(self) -> tuple[Windows, ...]:
        return tuple(self.windows.along(d, size) for d, size in enumerate(self.owned.extent[2:]))

    @cached_property
    def _wanted(self) -> tuple[tuple[Range, ...], ...]:
        return tuple(w.input_ranges(p) for w, p in zip(self._along, self.P_x.shape[2:], strict=True))

    @cached_property
    def _held(self) -> tuple[tuple[Range, ...], ...]:
        mode = self.windows.mode
        return tuple(
            tuple(_source_range(w, mode, wanted) for wanted in ranges)
            for w, ranges in zip(self._along, self._wanted, strict=True)
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """The global lengths of the output's feature dimensions."""
        return tuple(w.outputs for w in self._along)

    def outputs(self, index: Sequence[int]) -> tuple[Range, ...]:
        """The outputs that the worker at feature index `index` computes, per feature dimension."""
        return tuple(w.output_range(p, i) for w, p, i in zip(self._along, self.P_x.shape[2:], index, strict=True))

    def padding(self, index: Sequence[int]) -> Pairs:
        """The zeros (low, high) to put around the exchanged block of the worker at `index`, per feature dimension."""
        if self.windows.mode in ("reflect", "replicate"):
            return ((0, 0),) * len(self._along)
        return tuple(w.clipped(ranges[i])[1] for w, ranges, i in zip(self._along, self._wanted, index, strict=True))

    def exchange(self, x: Array) -> Array:
        """The input that this worker's windows read, without zero padding; outside P_x, `x`."""
        if self.P_x.rank is None:
            return x
        mode = self.windows.mode
        periodic = (False, False) + (mode == "circular",) * len(self._along)
        halos = Halos(self.owned, (*self.owned.ranges[:2], *self._held), periodic)
        block = exchange_ranges("windows", x, self.P_x, self.structures, halos)
        if mode in ("reflect", "replicate"):
            for d, i in enumerate(index_of(self.P_x.rank, self.P_x.shape)[2:]):
                block = _filled(block, d + 2, _sources(self._along[d], mode, self._wanted[d][i]) - self._held[d][i][0])
        return block


def sliding_plan(x: Array, P_x: MPIPartition, windows: SlidingWindows, team: tuple[int, ...]) -> SlidingPlan:
    """The plan for `x` on `P_x`, known to all workers of `team` (world ranks, ascending), which holds P_x's."""
    structures = exchange_structures(P_x.world, team, "x", x)
    owned = owned_grid("x", P_x, {worker: structures[worker].shape for worker in P_x.ranks})
    return SlidingPlan(P_x, windows, {worker: structures[worker] for worker in P_x.ranks}, owned)


def _sources(windows: Windows, mode: PaddingMode, wanted: Range) -> np.ndarray:
    """For each index of a range that may reach outside the tensor, the index inside that fills it."""
    indices = np.arange(*wanted)
    last = windows.size - 1
    if mode == "replicate":
        return np.clip(indices, 0, last)
    return last - np.abs(last - np.abs(indices))


def _source_range(windows: Windows, mode: PaddingMode, wanted: Range) -> Range:
    """The range of the tensor that fills `wanted`."""
    if mode not in ("reflect", "replicate"):
        return windows.clipped(wanted)[0]
    sources = _sources(windows, mode, wanted)
    return (int(sources.min()), int(sources.max()) + 1) if sources.size else windows.clipped(wanted)[0]


def _filled(block: Array, axis: int, sources: np.ndarray) -> Array:
    """The block with its padding filled in from what it holds: entry k is entry `sources[k]` of the block."""
    if np.array_equal(sources, np.arange(block.shape[axis])):
        return block
    return jnp.take(block, sources, axis=axis, mode="clip")


def per_feature(name: str, value: int | Sequence[int], dims: int, least: int = 1) -> tuple[int, ...]:
    """One integer for each of `dims` feature dimensions, from one for all or a sequence."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) != dims or any(not isinstance(v, int) or v < least for v in values):
        raise InvalidArgumentError(f"`{name}` (={value!r}) must be an integer, {least} or more, or {dims} of them.")
    return values


def padding_pairs(padding: Any, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Pairs:
    """The (low, high) padding of each feature dimension, from what a layer takes as `padding`."""
    dims = len(kernel)
    if padding == "valid":
        return ((0, 0),) * dims
    if padding == "same":
        if any(s != 1 for s in stride):
            raise InvalidArgumentError(f"`padding` (='same') takes a stride of 1, but `stride` is {stride}.")
        return tuple(same_padding(k, d) for k, d in zip(kernel, dilation, strict=True))
    entries = (padding,) * dims if isinstance(padding, int) else padding
    if isinstance(entries, Sequence) and not isinstance(entries, str) and len(entries) == dims:
        pairs = tuple((entry, entry) if isinstance(entry, int) else tuple(entry) for entry in entries)
        if all(len(pair) == 2 and all(isinstance(p, int) and p >= 0 for p in pair) for pair in pairs):
            return pairs
    raise InvalidArgumentError(
        f"`padding` (={padding!r}) must be 'same', 'valid', an integer of 0 or more, or for each of {dims} feature "
        "dimensions an integer or a pair (low, high)."
    )
