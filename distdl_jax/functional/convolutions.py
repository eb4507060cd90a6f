"""Convolutions, transposed ones, too: the partitions of their operands, and the plan, for any cuts.

The halos of x are fetched, x and the weight move to the workers that convolve, and sums over the input channels to y.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.all_gather import plan_all_gather, plan_reduce_scatter
from distdl_jax.functional.broadcast import plan_broadcast, plan_sum_reduce
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes
from distdl_jax.functional.products import ProductPlan, product_dtype, products
from distdl_jax.functional.sliding_windows import TransposedWindowsPlan, WindowsPlan
from distdl_jax.functional.weights import WeightPlan
from distdl_jax.kernels.convolution import convolution, transposed_convolution
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.kernels.geometry import between_layers
from distdl_jax.kernels.phases import TransposedProblem
from distdl_jax.kernels.problem import Problem
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.alike import ByClass
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_sizes, index_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.plans.worker_ranks import positions
from distdl_jax.tracing.tie import tie

Kind = Literal["feature", "channel", "general"]


@dataclass(frozen=True)
class LocalConvolution:
    """A convolution, or a transposed one, of one worker's copy of x with its block of the weight.

    - `problem`: the computation, on the channels that are read.
    - `channels`: the channels of the copy that are read.
    - `adds_bias`: whether the bias is added here; among workers whose products are summed, one adds it.
    """

    problem: Problem | TransposedProblem
    channels: Range
    adds_bias: bool

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight's block."""
        return self.problem.weight

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the product."""
        return self.problem.y

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """Return the product of x and weight, which have one dtype; depends on both even if it is empty."""
        y = self._product(x, weight)
        return between_layers(y if bias is None else _plus_bias(y, bias))

    def _product(self, x: Array, weight: Array) -> Array:
        if self.problem.is_empty:
            return tie(jnp.zeros(self.problem.y, x.dtype), x, weight)
        start, stop = self.channels
        x = between_layers(x if stop - start == x.shape[1] else lax.slice_in_dim(x, start, stop, axis=1))
        if isinstance(self.problem, TransposedProblem):
            return transposed_convolution(self.problem, x, weight)
        return convolution(self.problem, x, weight)


def _plus_bias(y: Array, bias: Array) -> Array:
    """Add a number for each channel. In float32 for half precision: so the gradient of the bias is summed in it."""
    wide = accumulation_dtype(np.dtype(y.dtype))
    return (y.astype(wide) + bias.astype(wide).reshape(-1, *(1,) * (y.ndim - 2))).astype(y.dtype)


@dataclass(frozen=True)
class Channels:
    """The channels of a convolution of x, n_b x n_in x ..., and their groups, as in PyTorch."""

    inputs: int
    outputs: int
    groups: int = 1

    def of_weight(self, cuts: tuple[int, int], i: int, j: int, transposed: bool) -> tuple[int, int]:
        """Return the channels of the weight's block at (i, j), if it is cut by P_co and P_ci, `cuts`.

        The block is c_out x c_in/groups; `transposed`, c_in x c_out/groups.
        """
        p_co, p_ci = cuts
        if not transposed:
            return balanced_sizes(self.outputs, p_co)[i], balanced_sizes(self.inputs // self.groups, p_ci)[j]
        if self.groups > 1:
            return self.inputs // p_co, self.outputs // self.groups
        return balanced_sizes(self.inputs, p_ci)[j], balanced_sizes(self.outputs, p_co)[i]

    def read(self, cuts: tuple[int, int], i: int, j: int, p_x: int) -> tuple[Range, int]:
        """Return the channels that the worker at (i, j) reads of its copy of x, and the number of its groups.

        `p_x` is the number of workers along the channels of x.
        """
        p_co, p_ci = cuts
        if self.groups == 1:
            return (0, balanced_sizes(self.inputs, p_ci)[j]), 1
        groups, share = self.groups // p_co, self.inputs // p_co
        if p_x > 1:  # its copy has the channels of its groups
            return (0, share), groups
        return (i * share, (i + 1) * share), groups


def plan_convolution(
    x: ShapeDtypes,
    windows: WindowsPlan | TransposedWindowsPlan,
    weights: WeightPlan,
    P_x: Partition,
    P_y: Partition,
    partitions: ConvPartitions,
    channels: Channels,
) -> ProductPlan:
    """Plan a convolution of x on P_x with a weight; with `TransposedWindowsPlan`, a transposed one.

    - `x`: the blocks on P_x, and placeholders on the other workers of the operation.
    - `windows`: the entries of x that each worker's outputs read, from `plan_windows` or `plan_transposed_windows`.
    - `weights`: the movement of weight and bias to the workers that convolve.
    - `partitions`: of x, y and the weight, from `conv_partitions`.

    **Raises:** `PlanError` if blocks of x don't have their balanced share of the channels.
    """
    _check_channels(windows.movement.halos.owned, channels.inputs)
    fetched = windows.after(x)
    to_work: MovementPlan
    # Channels that are cut are gathered (weights whole on every worker) or copied along P_co to those that convolve
    # them.
    if partitions.x is None:
        to_work = plan_all_gather(fetched, P_x, 1)
    else:
        to_work = plan_broadcast(fetched, partitions.x, partitions.work)
    copies = to_work.after(fetched)
    place_of = positions(partitions.work.ranks)

    def local_of(worker: int) -> LocalConvolution:
        _, i, j, *index = index_of(place_of[worker], partitions.work.shape)
        copy, cuts = copies[worker], partitions.channels
        (start, stop), groups = channels.read(cuts, i, j, P_x.shape[1])
        block = ShapeDtype((copy.shape[0], stop - start, *copy.shape[2:]), product_dtype(copy, weights))
        of_weight = channels.of_weight(cuts, i, j, isinstance(windows, TransposedWindowsPlan))
        return LocalConvolution(windows.problem(block, of_weight, groups, index), (start, stop), adds_bias=j == 0)

    batch, _, *features = windows.patterns
    labels = (batch, *map(range, partitions.channels), *features)
    local: Mapping[int, LocalConvolution] = ByClass(partitions.work.ranks, labels, local_of)
    summands = products(copies, weights, local)
    to_y: MovementPlan
    # A cut in input channels leaves each worker a term of every output: they are summed where y is wanted.
    if partitions.y is None:
        to_y = plan_reduce_scatter(summands, P_y, 1)
    else:
        to_y = plan_sum_reduce(summands, partitions.work, partitions.y)
    return ProductPlan(to_work, weights, summands, to_y, local, windows)


def _check_channels(owned: ProductGrid, in_channels: int) -> None:
    """Reject blocks of x, as in the grid `owned`, without their balanced share of the channels."""
    found = tuple(stop - start for start, stop in owned.ranges[1])
    expected = balanced_sizes(in_channels, len(found))
    if sum(found) != in_channels:
        raise PlanError(f"`x` has {sum(found)} channels, but in_channels={in_channels}.")
    if found != expected:
        raise PlanError(
            f"`x` has {found} channels on the workers along the channels, but {in_channels} channels balanced "
            f"over {len(found)} workers are {expected}."
        )


# --- partitions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvPartitions:
    """The partitions of one convolution, in the dimensions P_n x P_co x P_ci x features in which they move data.

    - `kind`: the algorithm.
    - `work`: P_n x P_co x P_ci x features, the workers that convolve.
    - `x`, `y`: P_x's and P_y's teams in shapes that broadcast to `work`; None if x is gathered, or sums are scattered,
      along the channels on its own workers.
    """

    kind: Kind
    work: Partition
    x: Partition | None
    y: Partition | None

    @property
    def channels(self) -> tuple[int, int]:
        """P_co and P_ci."""
        return self.work.shape[1], self.work.shape[2]


def conv_partitions(
    dims: int, P_x: Partition, P_y: Partition | None, P_W: Partition | None, groups: int
) -> ConvPartitions:
    """Choose the algorithm and arrange the teams; reject inconsistent partitions with a message."""
    batch, p_ci, *features = P_x.shape
    if P_y is None or P_W is None:  # channels are whole: only the batch and features are split
        work = P_x.create_cartesian_topology_partition([batch, 1, 1, *features])
        return ConvPartitions("feature", work, work, work)
    p_co = P_y.shape[1]
    # P_W has output channels, input channels and features; with a batch in front, it is the grid of the work itself.
    full = P_W.shape if P_W.dim == dims + 3 else (1, *P_W.shape)
    work = P_W.create_cartesian_topology_partition(full)
    # Split channels of a convolution in groups hold whole groups: no sum is left over input channels.
    split_groups = groups > 1 and p_ci > 1
    is_whole = groups == 1 and work.dim == dims + 3
    gathers, scatters = (is_whole and moves_features(P, 1, work, side) for P, side in ((P_x, 2), (P_y, 1)))
    expected = (batch, 1 if scatters else p_co, 1 if gathers or split_groups else p_ci, *features)
    if full != expected or (split_groups and p_co != p_ci):
        shown = expected if batch > 1 else expected[1:]
        raise InvalidArgumentError(_refusal(P_x, P_y, P_W, groups, shown, split_groups))
    if groups % p_co and groups > 1:
        raise InvalidArgumentError(
            f"`groups` (={groups}) must be divisible by the number of workers along the output channels ({p_co}), so "
            "that each of them has whole groups."
        )
    as_x = [batch, p_ci, 1, *features] if split_groups else [batch, 1, p_ci, *features]
    x = None if gathers else P_x.create_cartesian_topology_partition(as_x)
    y = None if scatters else P_y.create_cartesian_topology_partition([batch, p_co, 1, *features])
    return ConvPartitions("general" if math.prod(features) > 1 else "channel", work, x, y)


def _refusal(
    P_x: Partition, P_y: Partition, P_W: Partition, groups: int, expected: tuple[int, ...], grouped: bool
) -> str:
    given = f"`P_W` ({shape_text(P_W.shape)})"
    if grouped and P_y.shape[1] != P_x.shape[1]:
        return (
            f"With `groups` (={groups}) and input channels split over {P_x.shape[1]} workers, the output channels must "
            f"be split over as many: `P_y` is {shape_text(P_y.shape)}, `P_x` {shape_text(P_x.shape)}."
        )
    why = ": each worker along the channels has whole groups, so the weight's input channels are not split"
    return (
        f"{given} must be {shape_text(expected)}, workers along the output channels, the input channels and the "
        f"features{why if grouped else ''} (P_x is {shape_text(P_x.shape)}, P_y {shape_text(P_y.shape)})."
    )


def moves_features(P: Partition, axis: int, work: Partition, side: int) -> bool:
    """Say whether `P` cuts, along `axis`, the features that `work` does not, on the workers of its other side.

    - `side`: 2 for P_in, the inputs: x is gathered along `axis` before the product. 1 for P_out, the outputs: products
      are summed, and scattered along `axis`.
    """
    return work.shape[side] == 1 < P.shape[axis] == work.shape[3 - side] and P.ranks == work.ranks
