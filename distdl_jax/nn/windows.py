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

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.partition import Partition
from distdl_jax.plans.decomposition import ProductGrid, Range, index_of
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.windows import Windows, same_padding
from distdl_jax.primitives.halo_exchange import plan_ranges
from distdl_jax.primitives.held import common_dtype, owned_grid

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
    - `shape_dtypes`: by world rank, what each worker that takes part holds; P_x's workers are among them.

    Raises `PlanError`, the same on all of them, where the blocks don't form a grid or the windows don't fit.
    """

    P_x: Partition
    windows: SlidingWindows
    shape_dtypes: dict[int, ShapeDtype]

    def __post_init__(self) -> None:
        common_dtype("x", self.shape_dtypes, self.P_x.ranks)
        _ = self._along  # checks blocks and windows now, on all workers, and not later on some of them

    @cached_property
    def owned(self) -> ProductGrid:
        """The grid of the blocks on P_x, balanced or not."""
        return owned_grid("x", self.P_x, self.shape_dtypes)

    @cached_property
    def _along(self) -> tuple[Windows, ...]:
        return tuple(self.windows.along(d, size) for d, size in enumerate(self.owned.extent[2:]))

    @cached_property
    def _wanted(self) -> tuple[tuple[Range, ...], ...]:
        """Per feature dimension and index, what the windows read, reaching outside the tensor where they do."""
        return tuple(w.input_ranges(p) for w, p in zip(self._along, self.P_x.shape[2:], strict=True))

    @cached_property
    def _fetched(self) -> tuple[tuple[Range, ...], ...]:
        """Per feature dimension and index, the part of the tensor from which that can be made."""
        mode = self.windows.mode
        return tuple(
            tuple(_source_range(w, mode, wanted) for wanted in ranges)
            for w, ranges in zip(self._along, self._wanted, strict=True)
        )

    @cached_property
    def halos(self) -> Halos:
        """The exchange after which every worker of P_x has what its windows read, without what padding fills in."""
        periodic = (False, False) + (self.windows.mode == "circular",) * len(self._along)
        return Halos(self.owned, (*self.owned.ranges[:2], *self._fetched), periodic)

    def outputs(self, index: Sequence[int]) -> tuple[Range, ...]:
        """The outputs that the worker at feature index `index` computes, per feature dimension."""
        return tuple(w.output_range(p, i) for w, p, i in zip(self._along, self.P_x.shape[2:], index, strict=True))

    def padding(self, index: Sequence[int]) -> Pairs:
        """The zeros (low, high) to put around the exchanged block of the worker at `index`, per feature dimension."""
        if self.windows.mode in ("reflect", "replicate"):
            return ((0, 0),) * len(self._along)
        return tuple(w.clipped(ranges[i])[1] for w, ranges, i in zip(self._along, self._wanted, index, strict=True))

    def filling(self, index: Sequence[int]) -> tuple[np.ndarray | None, ...]:
        """Per feature dimension, which entry of the exchanged block goes where, for the worker at `index`.

        None where the block is right as it is: everywhere but at the boundary, under reflect or replicate padding.
        """
        if self.windows.mode not in ("reflect", "replicate"):
            return (None,) * len(self._along)
        found: list[np.ndarray | None] = []
        for w, wanted, fetched, i in zip(self._along, self._wanted, self._fetched, index, strict=True):
            sources = _sources(w, self.windows.mode, wanted[i]) - fetched[i][0]
            found.append(None if np.array_equal(sources, np.arange(fetched[i][1] - fetched[i][0])) else sources)
        return tuple(found)

    def exchange(self, x: Array) -> Array:
        """The input that this worker's windows read, but for padding with zeros; outside P_x, `x`."""
        if self.P_x.rank is None:
            return x
        block = plan_ranges("windows", self.shape_dtypes, self.P_x, self.halos).run(self.P_x.world, x)
        for d, sources in enumerate(self.filling(index_of(self.P_x.rank, self.P_x.shape)[2:])):
            if sources is not None:
                block = jnp.take(block, sources, axis=d + 2, mode="clip")
        return block


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


def per_feature(name: str, value: Any, dims: int) -> tuple[int, ...]:
    """One integer, 1 or more, for each of `dims` feature dimensions, from one for all or a sequence."""
    values = tuple(value) if isinstance(value, Sequence | np.ndarray) else (value,) * dims
    if len(values) != dims or not all(_is_integer(v, least=1) for v in values):
        raise InvalidArgumentError(f"`{name}` (={value!r}) must be an integer, 1 or more, or {dims} of them.")
    return tuple(map(int, values))


def padding_pairs(padding: Any, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Pairs:
    """The (low, high) padding of each feature dimension, from what a layer takes as `padding`."""
    dims = len(kernel)
    if isinstance(padding, str) and padding == "valid":
        return ((0, 0),) * dims
    if isinstance(padding, str) and padding == "same":
        if any(s != 1 for s in stride):
            raise InvalidArgumentError(f"`padding` (='same') takes a stride of 1, but `stride` is {stride}.")
        return tuple(same_padding(k, d) for k, d in zip(kernel, dilation, strict=True))
    entries = padding if isinstance(padding, Sequence | np.ndarray) else (padding,) * dims
    pairs = [entry if isinstance(entry, Sequence | np.ndarray) else (entry, entry) for entry in entries]
    if len(pairs) == dims and all(len(pair) == 2 and all(_is_integer(p, least=0) for p in pair) for pair in pairs):
        return tuple((int(low), int(high)) for low, high in pairs)
    raise InvalidArgumentError(
        f"`padding` (={padding!r}) must be 'same', 'valid', an integer of 0 or more, or for each of {dims} feature "
        "dimensions an integer or a pair (low, high)."
    )


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)
