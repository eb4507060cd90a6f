"""Distributed convolutions: one algorithm, of which the feature- and channel-distributed ones are cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.nn.conv_partitions import ConvPartitions, Kind, conv_partitions
from distdl_jax.nn.initialization import Initializer, UniformFanIn, initialize_params
from distdl_jax.nn.local.conv import LocalConvolution
from distdl_jax.nn.parameters import Params, check_params
from distdl_jax.nn.windows import (
    PADDING_MODES,
    PaddingMode,
    SlidingPlan,
    SlidingWindows,
    padding_pairs,
    per_feature,
)
from distdl_jax.partition import Partition
from distdl_jax.plans.broadcasting import shape_text
from distdl_jax.plans.decomposition import Range, balanced_sizes
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives import broadcast, sum_reduce
from distdl_jax.primitives.handshake import handshake, shape_dtype_of
from distdl_jax.primitives.tie import tie
from distdl_jax.static import Static
from distdl_jax.tensors import TensorSpec

Padding = int | str | Sequence[int | tuple[int, int]]


@dataclass(frozen=True)
class DistributedConv(Static):
    """A convolution whose input, output and weight are split over workers; use the classes for 1, 2 or 3 dimensions.

    Forward and gradients are block for block those of the sequential layer, for every argument that is accepted.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_{D-1} x ... x n_0 | P_x: P_n x P_ci x P_{D-1} x ... x P_0 |
    | y | n_b x n_co x m_{D-1} x ... x m_0 | P_y: P_n x P_co x P_{D-1} x ... x P_0 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_{D-1} x ... x k_0 | P_W's slice P_co x P_ci x 1 x ... x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x ... x 1 |

    P_W has shape P_co x P_ci x P_{D-1} x ... x P_0, with P_n in front where the batch is split. What is split says
    which algorithm it is, and `repr` shows it:

    - *feature*: no channels are split, and P_y and P_W are not given. Halo exchange; w and b broadcast over P_x.
    - *channel*: only channels (and the batch) are split. x goes along P_co, the products are summed along P_ci. There
      are fewest messages where P_x is P_W's first row and P_y its first column: workers 0 and 1, and 0 and 2, of 2 x 2.
    - *general*: both at once.

    Blocks of x may be unbalanced along the features and the batch; blocks of y are balanced along the features.
    Blocks may be empty, or smaller than the kernel.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: the partitions; teams may be equal, overlap or be disjoint.
    - `in_channels`, `out_channels`: n_ci and n_co.
    - `kernel_size`, `stride`, `dilation`: an integer, or one for each feature dimension, as in PyTorch.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" or "valid".
    - `groups`: as in PyTorch. Where input channels are split, the output channels are split over as many workers, P_W
      does not split the weight's input channels (P_ci is 1 there), and each worker has whole groups.
    - `bias`: whether there is a b.
    - `padding_mode`: "zeros", "circular", "reflect" or "replicate".

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x
    or a parameter doesn't.

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    dims: ClassVar[int]
    required_kind: ClassVar[Kind | None] = None

    P_x: Partition
    P_y: Partition | None = None
    P_W: Partition | None = None
    in_channels: int = field(kw_only=True)
    out_channels: int = field(kw_only=True)
    kernel_size: int | tuple[int, ...] = field(kw_only=True)
    stride: int | tuple[int, ...] = field(default=1, kw_only=True)
    padding: Padding = field(default=0, kw_only=True)
    dilation: int | tuple[int, ...] = field(default=1, kw_only=True)
    groups: int = field(default=1, kw_only=True)
    bias: bool = field(default=True, kw_only=True)
    padding_mode: PaddingMode = field(default="zeros", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("kernel_size", "stride", "dilation"):
            object.__setattr__(self, name, per_feature(name, getattr(self, name), self.dims))
        object.__setattr__(
            self,
            "padding",
            padding_pairs(self.padding, self.kernel_size, self.stride, self.dilation),  # type: ignore[arg-type]
        )
        if self.padding_mode not in PADDING_MODES:
            raise InvalidArgumentError(f"`padding_mode` (={self.padding_mode!r}) must be one of {PADDING_MODES}.")
        for name in ("groups", "in_channels", "out_channels"):
            number = getattr(self, name)
            if not isinstance(number, int | np.integer) or number < 1:
                raise InvalidArgumentError(f"`{name}` (={number!r}) must be an integer, 1 or more.")
            if number % self.groups:
                raise InvalidArgumentError(f"`{name}` (={number}) must be divisible by `groups` (={self.groups}).")
        if self.required_kind not in (None, self.kind):
            raise InvalidArgumentError(
                f"P_x, P_y and P_W ask for the {self.kind} algorithm, but this class is the {self.required_kind} one."
            )

    @cached_property
    def _partitions(self) -> ConvPartitions:
        return conv_partitions(self.dims, self.P_x, self.P_y, self.P_W, self.groups)

    @cached_property
    def _windows(self) -> SlidingWindows:
        return SlidingWindows(self.kernel_size, self.stride, self.dilation, self.padding, self.padding_mode)  # type: ignore[arg-type]

    @property
    def kind(self) -> Kind:
        """The algorithm that the partitions ask for."""
        return self._partitions.kind

    def init(
        self,
        key: Array,
        dtype: DTypeLike = jnp.float32,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ) -> Params:
        """This worker's block of the initial parameters; the same global values for one key whatever the partition.

        **Arguments:**

        - `key`: a JAX random key, the same on every worker.
        - `dtype`: of the parameters.
        - `weight_init`, `bias_init`: functions of (key, global shape, dtype) like those of `jax.nn.initializers`; the
          weight is n_co x n_ci/groups x kernel, so pass `in_axis=1, out_axis=0` to those that count fans. Default:
          uniform in ±1/sqrt(fan_in) with fan_in = n_ci/groups * prod(kernel), as in PyTorch.

        **Returns:** `{"weight": ..., "bias": ...}` (no "bias" without one), zero-volume where this worker holds none.
        """
        default = UniformFanIn(self.in_channels // self.groups * math.prod(self._windows.kernel))
        initializers = {"weight": weight_init or default, "bias": bias_init or default}
        return initialize_params(self.param_specs(), key, dtype, initializers)

    def param_specs(self) -> dict[str, TensorSpec]:
        """The global shape and the partition of each parameter: a pytree like the parameters."""
        shape = (self.out_channels, self.in_channels // self.groups, *self._windows.kernel)
        specs = {"weight": TensorSpec(shape, self._partitions.parameters.weight)}
        if self.bias:
            specs["bias"] = TensorSpec((self.out_channels,), self._partitions.parameters.bias)
        return specs

    def __call__(self, params: Params, x: Array) -> Array:
        """Apply the layer.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block on P_x; a zero-volume array elsewhere.

        **Returns:** this worker's block on P_y (P_x where P_y is not given); elsewhere a zero-volume array.
        """
        parts = self._partitions
        if self.P_x.world.rank not in parts.team:
            return x
        with jax.named_scope(type(self).__name__):
            # One handshake, in which all workers of the layer learn of all mistakes.
            shape_dtypes = handshake(self.P_x.world, parts.team, repr(self), lambda: self._checked(params, x))
            plan = self._plan(shape_dtypes)
            copies = broadcast(plan.exchange(x), parts.x, parts.work)
            weight, bias = parts.parameters.copies(params, self._weight_shape(), self.bias)
            local = self._local(plan)
            part = (
                tie(jnp.zeros((copies.shape[0], 0), jnp.result_type(copies, weight)), copies, weight)
                if local is None
                else local(copies, weight, bias)
            )
            # Every worker's part depends on all that any worker's part depends on, so that whatever is
            # differentiated, all of them carry a derivative into the sum, or none does.
            return sum_reduce(tie(part, *params.values()), parts.work, parts.y)

    apply = __call__

    def _checked(self, params: Params, x: Array) -> ShapeDtype:
        """The shape_dtype of this worker's `x`; refuses parameters that are not its blocks."""
        check_params(params, self.param_specs())
        return shape_dtype_of("x", x)

    def _plan(self, shape_dtypes: dict[int, ShapeDtype]) -> SlidingPlan:
        """Who needs which part of x, from what all workers of the layer hold; raises the same on all of them."""
        plan = SlidingPlan(self.P_x, self._windows, shape_dtypes)
        held = tuple(stop - start for start, stop in plan.owned.ranges[1])
        expected = balanced_sizes(self.in_channels, self.P_x.shape[1])
        if held != expected:
            raise PlanError(
                f"`x` has {held} channels on the workers along the channels, but {self.in_channels} channels balanced "
                f"over {self.P_x.shape[1]} workers are {expected}."
            )
        return plan

    def _weight_shape(self) -> tuple[int, ...]:
        """The shape of the block that this worker convolves with; empty where it does not convolve."""
        if not self._partitions.work.active:
            return (0,)
        _, i, j, *_ = self._partitions.work.index
        p_co, p_ci = self._partitions.channels
        return (
            balanced_sizes(self.out_channels, p_co)[i],
            balanced_sizes(self.in_channels // self.groups, p_ci)[j],
            *self._windows.kernel,
        )

    def _local(self, plan: SlidingPlan) -> LocalConvolution | None:
        """This worker's product; None where it does not convolve."""
        if not self._partitions.work.active:
            return None
        _, i, j, *index = self._partitions.work.index
        channels, groups = self._own_groups(i, j)
        return LocalConvolution(
            self._weight_shape(),
            channels,
            groups,
            self._windows,
            plan.padding(index),
            tuple(stop - start for start, stop in plan.outputs(index)),
            adds_bias=j == 0,
        )

    def _own_groups(self, i: int, j: int) -> tuple[Range, int]:
        """Which channels of its copy of x the worker at (i, j) along the channels reads, and their number of groups."""
        p_co, p_x = self._partitions.channels[0], self.P_x.shape[1]
        if self.groups == 1:
            return (0, balanced_sizes(self.in_channels, p_x)[j]), 1
        groups, share = self.groups // p_co, self.in_channels // p_co
        if p_x > 1:  # its copy is the channels of its groups
            return (0, share), groups
        return (i * share, (i + 1) * share), groups

    def __repr__(self) -> str:
        w = self._windows
        shown = [f"{self.in_channels} -> {self.out_channels}", f"kernel {shape_text(w.kernel)}"]
        shown += [f"{name} {getattr(self, name)}" for name in ("stride", "dilation") if set(getattr(self, name)) != {1}]
        if set(w.padding) != {(0, 0)}:
            shown.append(f"padding {w.padding} {w.mode}")
        if self.groups > 1:
            shown.append(f"groups {self.groups}")
        work = self._partitions.work.shape
        shown += [f"P_x {shape_text(self.P_x.shape)}", f"P_W {shape_text(work if work[0] > 1 else work[1:])}"]
        return f"{type(self).__name__}[{self.kind}]({', '.join(shown)})"


class DistributedConv1d(DistributedConv):
    """`DistributedConv` of N x C x n_0 tensors."""

    dims = 1


class DistributedConv2d(DistributedConv):
    """`DistributedConv` of N x C x n_1 x n_0 tensors."""

    dims = 2


class DistributedConv3d(DistributedConv):
    """`DistributedConv` of N x C x n_2 x n_1 x n_0 tensors."""

    dims = 3


class DistributedFeatureConv1d(DistributedConv1d):
    """`DistributedConv1d` that refuses partitions which ask for another algorithm than the feature one."""

    required_kind = "feature"


class DistributedFeatureConv2d(DistributedConv2d):
    """`DistributedConv2d` that refuses partitions which ask for another algorithm than the feature one."""

    required_kind = "feature"


class DistributedFeatureConv3d(DistributedConv3d):
    """`DistributedConv3d` that refuses partitions which ask for another algorithm than the feature one."""

    required_kind = "feature"


class DistributedChannelConv1d(DistributedConv1d):
    """`DistributedConv1d` that refuses partitions which ask for another algorithm than the channel one."""

    required_kind = "channel"


class DistributedChannelConv2d(DistributedConv2d):
    """`DistributedConv2d` that refuses partitions which ask for another algorithm than the channel one."""

    required_kind = "channel"


class DistributedChannelConv3d(DistributedConv3d):
    """`DistributedConv3d` that refuses partitions which ask for another algorithm than the channel one."""

    required_kind = "channel"


class DistributedGeneralConv1d(DistributedConv1d):
    """`DistributedConv1d` that refuses partitions which ask for another algorithm than the general one."""

    required_kind = "general"


class DistributedGeneralConv2d(DistributedConv2d):
    """`DistributedConv2d` that refuses partitions which ask for another algorithm than the general one."""

    required_kind = "general"


class DistributedGeneralConv3d(DistributedConv3d):
    """`DistributedConv3d` that refuses partitions which ask for another algorithm than the general one."""

    required_kind = "general"
