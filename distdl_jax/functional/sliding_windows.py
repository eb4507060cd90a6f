"""Windows that slide over a partitioned tensor, for convolutions, transposed convolutions and poolings.

Each worker's balanced output block needs an input range. The workers exchange entries so that each has that range.
Outside the tensor, the local operation pads with zeros, or fills in entries by the padding mode.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.functional.block_checks import common_dtype, owned_grid
from distdl_jax.functional.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.functional.plan import Plan, ShapeDtypes
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.phases import TransposedProblem
from distdl_jax.kernels.problem import Problem
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.alike import ByClass, derived
from distdl_jax.plans.decomposition import Range, balanced_range, balanced_ranges
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.padding import PaddingMode, filled_from, fills
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.windows import Pairs, WindowedAxis, WindowSpec
from distdl_jax.transports.world import Workers, World

_Ranges = tuple[tuple[Range, ...], ...]  # per feature dimension and index


@dataclass(frozen=True)
class WindowsPlan(Plan):
    """The movement of the inputs that each worker's balanced block of outputs needs.

    - `spec`: the windows; `axes`: the windows along each feature dimension.
    - `wanted`: the ranges that the windows read, which may reach outside the tensor.
    - `movement`: gives each worker the part of the tensor that fills its ranges.
    """

    spec: WindowSpec
    axes: tuple[WindowedAxis, ...]
    wanted: _Ranges
    movement: RangesPlan

    @property
    def workers(self) -> Workers:
        return self.movement.workers

    def output(self, worker: int) -> ShapeDtype:
        """Return the shape and dtype of the inputs of `worker`, without padding by zeros."""
        shape = list(self.movement.output(worker).shape)
        for d, sources in enumerate(self.filling(worker)):
            if sources is not None:
                shape[d + 2] = len(sources)
        return ShapeDtype(tuple(shape), self.movement.dtype)

    @property
    def outputs(self) -> ShapeDtypes:
        return derived(self.output, self.alike)

    @cached_property
    def alike(self) -> ByClass[None]:
        """Equivalence classes of workers: in a class, windows and halos have the same positions in the blocks."""
        return ByClass(self.movement.halos.owned.ranks, self.patterns, lambda worker: None)

    @cached_property
    def patterns(self) -> tuple[Sequence[Hashable], ...]:
        """For each dimension and index, the relative positions of the block, the fetched range, and the windows."""
        batch, channels, *features = self.movement.halos.patterns
        on_features = (
            [(pattern, self._pattern(d, i)) for i, pattern in enumerate(patterns)]
            for d, patterns in enumerate(features)
        )
        return (batch, channels, *on_features)

    def _pattern(self, d: int, i: int) -> tuple[object, ...]:
        """Return the positions of the windows of feature index `i` along `d` relative to the fetched range."""
        axis, ranges = self.axes[d], self.wanted[d]
        start, stop = axis.output_range(len(ranges), i)
        sources = self._sources(d, i)
        filled = None if sources is None else tuple(sources.tolist())
        return stop - start, axis.clipped(ranges[i])[1], filled

    def index(self, worker: int) -> tuple[int, ...]:
        """Return the index of `worker` along the features."""
        owned = self.movement.halos.owned
        return owned.index(owned.cell_of[worker])[2:]

    def output_ranges(self, index: Sequence[int]) -> tuple[Range, ...]:
        """Return the range of outputs of the worker at feature index `index`, per feature dimension."""
        workers = map(len, self.wanted)
        return tuple(axis.output_range(p, i) for axis, p, i in zip(self.axes, workers, index, strict=True))

    def output_counts(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return the number of outputs of the worker at feature index `index`, per feature dimension."""
        return tuple(stop - start for start, stop in self.output_ranges(index))

    def padding(self, index: Sequence[int]) -> Pairs:
        """Return the zeros (low, high) around the exchanged block of the worker at `index`, per feature dimension."""
        if fills(self.spec.mode):
            return ((0, 0),) * len(self.axes)
        along = zip(self.axes, self.wanted, index, strict=True)
        return tuple(axis.clipped(ranges[i])[1] for axis, ranges, i in along)

    def placement(self, index: Sequence[int]) -> Placement:
        """Return the placement of the kernel on the exchanged block of the worker at `index`."""
        return Placement(self.spec.stride, self.padding(index), self.spec.dilation)

    def problem(self, x: ShapeDtype, channels: tuple[int, int], groups: int, index: Sequence[int]) -> Problem:
        """Return the convolution of `x` by the worker at `index`, with a weight of `channels`, c_out x c_in/groups."""
        return Problem(x.shape, (*channels, *self.spec.kernel), self.placement(index), groups, x.dtype.name)

    def filling(self, worker: int) -> tuple[np.ndarray | None, ...]:
        """Return the source of each entry in the exchanged block of `worker`, per feature dimension.

        None if the block needs no filling: everywhere but at the boundary, under reflect or replicate padding.
        """
        return tuple(self._sources(d, i) for d, i in enumerate(self.index(worker)))

    def _sources(self, d: int, i: int) -> np.ndarray | None:
        """Return `filling` along one feature dimension, for the workers at index `i` there."""
        if not fills(self.spec.mode):
            return None
        start, stop = self.movement.halos.needed[d + 2][i]
        sources = filled_from(self.spec.mode, np.arange(*self.wanted[d][i]), self.axes[d].size) - start
        return None if np.array_equal(sources, np.arange(stop - start)) else sources

    def run(self, world: World, x: Array) -> Array:
        """Return the input of this worker's windows, without padding by zeros; on other workers, `x`."""
        block = self.movement.run(world, x)
        if world.rank in self.movement.inputs:
            for d, sources in enumerate(self.filling(world.rank)):
                if sources is not None:
                    block = jnp.take(block, sources, axis=d + 2, mode="clip")
        return block


def plan_windows(shape_dtypes: ShapeDtypes, P_x: Partition, spec: WindowSpec) -> WindowsPlan:
    """Plan windows over an N x C x features tensor on P_x, P_n x P_c x P_{D-1} x ... x P_0.

    `shape_dtypes` are the blocks of all workers of the layer, which include those of P_x. Raises `PlanError` if the
    blocks don't form a grid or the windows don't fit.
    """
    common_dtype("x", shape_dtypes, P_x.ranks)
    owned = owned_grid("x", P_x, shape_dtypes)
    axes = tuple(spec.along(d, size) for d, size in enumerate(owned.extent[2:]))
    wanted = tuple(axis.input_ranges(p) for axis, p in zip(axes, P_x.shape[2:], strict=True))
    fetched = (
        tuple(_source_range(axis, spec.mode, each) for each in ranges)
        for axis, ranges in zip(axes, wanted, strict=True)
    )
    periodic = (False, False) + (spec.mode == "circular",) * len(axes)
    halos = Halos(owned, (*owned.ranges[:2], *fetched), periodic)
    return WindowsPlan(spec, axes, wanted, plan_ranges("windows", shape_dtypes, P_x, halos))


def _source_range(axis: WindowedAxis, mode: PaddingMode, wanted: Range) -> Range:
    """Return the range of the tensor that fills `wanted`."""
    if not fills(mode):
        return axis.clipped(wanted)[0]
    sources = filled_from(mode, np.arange(*wanted), axis.size)
    return (int(sources.min()), int(sources.max()) + 1) if sources.size else axis.clipped(wanted)[0]


@dataclass(frozen=True)
class TransposedWindowsPlan(Plan):
    """The movement of the inputs that each worker's balanced block of outputs of a transposed convolution reads.

    - `spec`: the windows of the convolution whose adjoint it is; `lengths`: of the outputs, per feature dimension.
    - `movement`: gives each worker the range of inputs that its outputs read.
    """

    spec: WindowSpec
    lengths: tuple[int, ...]
    movement: RangesPlan

    @property
    def workers(self) -> Workers:
        return self.movement.workers

    def output(self, worker: int) -> ShapeDtype:
        return self.movement.output(worker)

    @property
    def outputs(self) -> ShapeDtypes:
        return self.movement.outputs

    @cached_property
    def patterns(self) -> tuple[Sequence[Hashable], ...]:
        """For each dimension and index, the relative positions of the block, the fetched range, and the outputs."""
        batch, channels, *features = self.movement.halos.patterns
        on_features = (
            [(pattern, self.ranges(d, i)) for i, pattern in enumerate(patterns)] for d, patterns in enumerate(features)
        )
        return (batch, channels, *on_features)

    def ranges(self, d: int, i: int) -> tuple[Range, Range]:
        """Return the ranges of inputs and outputs at index `i` along feature dimension `d`, shifted to start at 0.

        Both are shifted by the same number of strides, so workers inside a tensor have the same problem.
        """
        s, (low, _) = self.spec.stride[d], self.spec.padding[d]
        needed = self.movement.halos.needed[d + 2]
        first, last = needed[i]
        start, stop = balanced_range(self.lengths[d], len(needed), i)
        by = (start + low) // s
        return (first - by, last - by), (start - by * s, stop - by * s)

    def problem(self, x: ShapeDtype, channels: tuple[int, int], groups: int, index: Sequence[int]) -> TransposedProblem:
        """Return the computation on `x` by the worker at `index`, with a weight of `channels`, c_in x c_out/groups."""
        w = self.spec
        inputs, outputs = zip(*(self.ranges(d, i) for d, i in enumerate(index)), strict=True)
        return TransposedProblem(
            x.shape,
            (*channels, *w.kernel),
            groups,
            x.dtype.name,
            w.stride,
            w.dilation,
            inputs=inputs,
            outputs=outputs,
            low=tuple(low for low, _ in w.padding),
        )

    def run(self, world: World, x: Array) -> Array:
        """Return the inputs that this worker's outputs read; on other workers, `x`."""
        return self.movement.run(world, x)


def plan_transposed_windows(
    shape_dtypes: ShapeDtypes, P_x: Partition, spec: WindowSpec, output_padding: Sequence[int]
) -> TransposedWindowsPlan:
    """Plan the inputs of a transposed convolution over an N x C x features tensor on P_x.

    - `output_padding`: the number of outputs added at the high end, per feature dimension.

    **Raises:** `PlanError` if the blocks don't form a grid or there are no outputs.
    """
    owned = owned_grid("x", P_x, shape_dtypes)
    lengths, inputs = [], []
    windows = zip(spec.kernel, spec.stride, spec.dilation, spec.padding, output_padding, strict=True)
    along = zip(owned.extent[2:], P_x.shape[2:], windows, strict=True)
    for d, (n, p, (k, s, dilation, (low, high), extra)) in enumerate(along):
        reach = dilation * (k - 1)
        total = (n - 1) * s - low - high + reach + extra + 1
        if n == 0 or total < 1:
            raise PlanError(
                f"In feature dimension {d}: `x` has length {n}, which with stride {s}, `padding` (={(low, high)}) "
                f"and a kernel of {k} gives no outputs."
            )
        # Input i reaches the outputs i * stride - low + dilation * (0 ... kernel - 1).
        read = ((-((reach - low - start) // s), (stop - 1 + low) // s + 1) for start, stop in balanced_ranges(total, p))
        clipped = (tuple(min(max(bound, 0), n) for bound in bounds) for bounds in read)
        lengths.append(total)
        inputs.append(tuple((a, b) if a < b else (0, 0) for a, b in clipped))
    movement = plan_ranges("windows", shape_dtypes, P_x, Halos(owned, (*owned.ranges[:2], *inputs)))
    return TransposedWindowsPlan(spec, tuple(lengths), movement)
