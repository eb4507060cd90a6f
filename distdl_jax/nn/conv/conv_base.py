"""The base of the convolutions: the general algorithm; the feature and channel ones are special cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import cached_property, partial
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.all_gather import plan_all_gather, plan_reduce_scatter
from distdl_jax.functional.broadcast import plan_broadcast, plan_sum_reduce
from distdl_jax.functional.halo_exchange import RangesPlan
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes
from distdl_jax.kernels.convolution import convolution, transposed_convolution
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.kernels.geometry import Placement, between_layers
from distdl_jax.kernels.phases import TransposedProblem
from distdl_jax.kernels.problem import Problem
from distdl_jax.nn.base.input_checks import check_features
from distdl_jax.nn.base.matmul_plan import ProductPlan, product_dtype, products
from distdl_jax.nn.base.parameters import ParamShapeDtypes
from distdl_jax.nn.base.sliding_windows import WindowsPlan, plan_windows
from distdl_jax.nn.base.weighted_layer import WeightedLayer, check_not_split, moves_features, weight_partition
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.alike import ByClass
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_sizes, index_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.plans.windows import PaddingMode, WindowSpec, window_spec
from distdl_jax.plans.worker_ranks import positions
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import Padding, Sizes, is_integer

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


class Fetch(NamedTuple):
    """How each worker of P_x gets the inputs that its outputs read, and the computation on them.

    - `patterns`: for each dimension of P_x and index, the position of the fetched range relative to the computation.
    - `problem`: the arithmetic on a worker's inputs, given the number of groups and the worker's index along P_co and
      P_ci, and along the features.
    """

    plan: WindowsPlan | RangesPlan
    patterns: Sequence[Sequence[Hashable]]
    problem: Callable[[ShapeDtype, int, tuple[int, int], Sequence[int]], Problem | TransposedProblem]


@dataclass(frozen=True)
class DistributedConv(WeightedLayer):
    """The base of the convolutions, of any number of dimensions; see `DistributedConv2d`.

    - `dims`: the number of feature dimensions.
    - `required_kind`: the one algorithm that a class accepts; None for all."""

    dims: ClassVar[int]
    required_kind: ClassVar[Kind | None] = None

    P_x: Partition
    P_y: Partition | None = None
    P_W: Partition | None = None
    _: KW_ONLY
    in_channels: int
    out_channels: int
    kernel_size: Sizes
    stride: Sizes = 1
    padding: Padding = 0
    dilation: Sizes = 1
    groups: int = 1
    bias: bool = True
    padding_mode: PaddingMode = "zeros"
    sharded: bool = False
    split: InitVar[Literal["in_channels", "out_channels"] | None] = None

    def __post_init__(self, split: str | None) -> None:
        w = self._windows
        # The fields, normalised so that equal layers compare equal.
        self._store(kernel_size=w.kernel, stride=w.stride, padding=w.padding, dilation=w.dilation)
        for name in ("groups", "in_channels", "out_channels"):
            number = getattr(self, name)
            if not is_integer(number, least=1):
                raise InvalidArgumentError(f"`{name}` (={number!r}) must be an integer, 1 or more.")
            if number % self.groups:
                raise InvalidArgumentError(f"`{name}` (={number}) must be divisible by `groups` (={self.groups}).")
        channels = {"in_channels": self.in_channels, "out_channels": self.out_channels}
        P_y, P_W = given_or_derived(self.dims, self.P_x, self.P_y, self.P_W, split, channels, self.groups)
        self._store(P_y=P_y, P_W=P_W)
        if self.required_kind not in (None, self.kind):
            raise InvalidArgumentError(
                f"P_x, P_y and P_W need the {self.kind} algorithm, but this class implements the {self.required_kind} "
                "one."
            )

    @cached_property
    def _partitions(self) -> ConvPartitions:
        return conv_partitions(self.dims, self.P_x, self.P_y, self.P_W, self.groups)

    @property
    def _work(self) -> Partition:
        return self._partitions.work

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        weight = (self.out_channels, self.in_channels // self.groups, *self._windows.kernel)
        return {"weight": weight} | ({"bias": (self.out_channels,)} if self.bias else {})

    @cached_property
    def _windows(self) -> WindowSpec:
        return window_spec(self.dims, self.kernel_size, self.stride, self.padding, self.dilation, self.padding_mode)

    @property
    def kind(self) -> Kind:
        """The algorithm that the partitions need."""
        return self._partitions.kind

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> ProductPlan:
        parts = self._partitions
        fetch = self._fetch(x)
        fetched = fetch.plan.after(x)
        to_work: MovementPlan
        if parts.x is None:
            to_work = plan_all_gather(fetched, self.P_x, 1)
        else:
            to_work = plan_broadcast(fetched, parts.x, parts.work)
        copies = to_work.after(fetched)
        of_params = self._parameters.plan(params, self.bias)
        place_of = positions(parts.work.ranks)

        def local_of(worker: int) -> LocalConvolution:
            copy = ShapeDtype(copies[worker].shape, product_dtype(copies[worker], of_params))
            return self._local(fetch, place_of[worker], copy)

        batch, _, *features = fetch.patterns
        labels = (batch, *map(range, parts.channels), *features)
        local: Mapping[int, LocalConvolution] = ByClass(parts.work.ranks, labels, local_of)
        parts_of_y = products(copies, of_params, local)
        to_y: MovementPlan
        if parts.y is None:
            to_y = plan_reduce_scatter(parts_of_y, self.output_partition, 1)
        else:
            to_y = plan_sum_reduce(parts_of_y, parts.work, parts.y)
        return ProductPlan(to_work, of_params, parts_of_y, to_y, local, fetch.plan)

    def _fetch(self, x: ShapeDtypes) -> Fetch:
        windows = plan_windows(x, self.P_x, self._windows)
        self._check_channels(windows.movement.halos.owned)
        return Fetch(windows, windows.patterns, partial(self._ordinary, windows))

    def _check_channels(self, owned: ProductGrid) -> None:
        found = tuple(stop - start for start, stop in owned.ranges[1])
        expected = balanced_sizes(self.in_channels, self.P_x.shape[1])
        if sum(found) != self.in_channels:
            raise PlanError(f"`x` has {sum(found)} channels, but in_channels={self.in_channels}.")
        if found != expected:
            raise PlanError(
                f"`x` has {found} channels on the workers along the channels, but {self.in_channels} channels balanced "
                f"over {self.P_x.shape[1]} workers are {expected}."
            )

    def _local(self, fetch: Fetch, rank: int, copy: ShapeDtype) -> LocalConvolution:
        """Return the product of the worker of `rank` in P_W, from its copy of x in the dtype of the product."""
        _, i, j, *index = index_of(rank, self._partitions.work.shape)
        (start, stop), groups = self._channels_read(i, j)
        x = ShapeDtype((copy.shape[0], stop - start, *copy.shape[2:]), copy.dtype)
        return LocalConvolution(fetch.problem(x, groups, (i, j), index), (start, stop), adds_bias=j == 0)

    def _ordinary(
        self, windows: WindowsPlan, x: ShapeDtype, groups: int, channels: tuple[int, int], index: Sequence[int]
    ) -> Problem:
        (p_co, p_ci), (i, j) = self._partitions.channels, channels
        rows, columns = balanced_sizes(self.out_channels, p_co), balanced_sizes(self.in_channels // self.groups, p_ci)
        w = self._windows
        placement = Placement(w.stride, windows.padding(index), w.dilation)
        return Problem(x.shape, (rows[i], columns[j], *w.kernel), placement, groups, x.dtype.name)

    def _channels_read(self, i: int, j: int) -> tuple[Range, int]:
        """Return the channels that the worker at (i, j) reads of its copy of x, and the number of groups."""
        (p_co, p_ci), p_x = self._partitions.channels, self.P_x.shape[1]
        if self.groups == 1:
            return (0, balanced_sizes(self.in_channels, p_ci)[j]), 1
        groups, share = self.groups // p_co, self.in_channels // p_co
        if p_x > 1:  # its copy has the channels of its groups
            return (0, share), groups
        return (i * share, (i + 1) * share), groups

    def __repr__(self) -> str:
        w = self._windows
        shown = [f"{self.in_channels} -> {self.out_channels}", f"kernel {shape_text(w.kernel)}"]
        steps = {"stride": w.stride, "dilation": w.dilation}
        shown += [f"{name} {values}" for name, values in steps.items() if set(values) != {1}]
        if set(w.padding) != {(0, 0)}:
            shown.append(f"padding {w.padding} {w.mode}")
        if self.groups > 1:
            shown.append(f"groups {self.groups}")
        shown += ["sharded"] * self.sharded
        work = self._partitions.work.shape
        shown += [f"P_x {shape_text(self.P_x.shape)}", f"P_W {shape_text(work if work[0] > 1 else work[1:])}"]
        return f"{type(self).__name__}[{self.kind}]({', '.join(shown)})"


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


def given_or_derived(
    dims: int,
    P_x: Partition,
    P_y: Partition | None,
    P_W: Partition | None,
    split: str | None,
    channels: dict[str, int],
    groups: int,
) -> tuple[Partition, Partition] | tuple[None, None]:
    """Return P_y and P_W, given or derived from P_x; both None if x and y are on one partition that cuts no channels.

    - `split`, `channels`: the side along which a derived weight is cut, "in_channels" or "out_channels"; and the
      numbers of both channels.
    """
    check_features(P_x, dims)
    check_partitions(P_x=P_x, **{name: P for name, P in (("P_y", P_y), ("P_W", P_W)) if P is not None})
    P_y = P_x if P_y is None else P_y
    if P_y.dim != dims + 2 or (P_y.shape[0], *P_y.shape[2:]) != (P_x.shape[0], *P_x.shape[2:]):
        raise InvalidArgumentError(
            f"`P_y` ({shape_text(P_y.shape)}) must split batch and features as `P_x` ({shape_text(P_x.shape)}) does."
        )
    if P_W is not None:
        check_not_split(split)
        return P_y, P_W
    P_W = weight_partition(P_x, P_y, 1, split, channels, grouped=groups > 1 and P_x.shape[1] > 1)
    return (None, None) if P_x.shape[1] == 1 and P_x == P_y else (P_y, P_W)


def conv_partitions(
    dims: int, P_x: Partition, P_y: Partition | None, P_W: Partition | None, groups: int
) -> ConvPartitions:
    """Choose the algorithm and arrange the teams; reject inconsistent partitions with a message."""
    batch, p_ci, *features = P_x.shape
    if P_y is None or P_W is None:
        work = P_x.create_cartesian_topology_partition([batch, 1, 1, *features])
        return ConvPartitions("feature", work, work, work)
    p_co = P_y.shape[1]
    full = P_W.shape if P_W.dim == dims + 3 else (1, *P_W.shape)
    work = P_W.create_cartesian_topology_partition(full)
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
