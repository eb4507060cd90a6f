"""Convolutional LSTM cells with the batch and the features split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.plan import BlocksPlan, Plan, ShapeDtypes
from distdl_jax.nn.base.dimensions import in_dimensions
from distdl_jax.nn.base.input_checks import check_features, real_grid
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes
from distdl_jax.nn.conv.conv import CONVOLUTIONS
from distdl_jax.nn.conv.conv_base import DistributedConv
from distdl_jax.nn.recurrent.cells import Parts, Recurrent, lstm_step
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.padding import PaddingMode
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import Sizes, checked_integer


@dataclass(frozen=True)
class ConvLSTMPlan(BlocksPlan):
    """The plan of a step: the joint convolution of x and h, and the shape of each part of the carry."""

    convolution: Plan
    carry: Mapping[int, tuple[int, ...]] = field(hash=False)


@dataclass(frozen=True, repr=False)
class DistributedConvLSTMCell(Recurrent):
    """The base of the convolutional LSTM cells, of any number of dimensions; see `DistributedConvLSTMCell2d`.

    - `dims`: the number of feature dimensions."""

    dims: ClassVar[int]
    _carried = ("h", "c")

    P_x: Partition
    in_channels: int
    hidden_channels: int
    kernel_size: Sizes
    dilation: Sizes = 1
    bias: bool = True
    padding_mode: PaddingMode = "zeros"
    sharded: bool = False

    def __post_init__(self) -> None:
        check_features(self.P_x, self.dims)
        if self.P_x.shape[1] != 1:
            raise InvalidArgumentError(f"`P_x` ({shape_text(self.P_x.shape)}) must have one worker along the channels.")
        for name in ("in_channels", "hidden_channels"):
            checked_integer(name, getattr(self, name), 1)
        # Normalised so that equal layers compare equal.
        self._store(kernel_size=self._convolution.kernel_size, dilation=self._convolution.dilation)

    @cached_property
    def _convolution(self) -> DistributedConv:
        return CONVOLUTIONS[self.dims](
            self.P_x,
            in_channels=self.in_channels + self.hidden_channels,
            out_channels=4 * self.hidden_channels,
            kernel_size=self.kernel_size,
            padding="same",
            dilation=self.dilation,
            bias=self.bias,
            padding_mode=self.padding_mode,
            sharded=self.sharded,
        )

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of the convolution's weight and bias."""
        return self._convolution.param_specs()

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """Return this worker's blocks of the convolution's initial parameters, PyTorch's for a convolution."""
        return self._convolution.init(key, dtype)

    def _carry_spec(self, x_spec: TensorSpec) -> TensorSpec:
        n_b, _, *features = x_spec.global_shape
        return TensorSpec((n_b, self.hidden_channels, *features), self.P_x)

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> ConvLSTMPlan:
        real_grid("x", x, self.P_x, {1: self.in_channels} | dict.fromkeys(range(2, self.P_x.dim)))
        channels = self.in_channels + self.hidden_channels
        joined = {w: ShapeDtype((block.shape[0], channels, *block.shape[2:]), block.dtype) for w, block in x.items()}
        plan = self._convolution.plan(joined, params)
        y = {w: (block.shape[0], self.hidden_channels, *block.shape[2:]) for w, block in x.items()}
        self._check_carry(params, y)
        return ConvLSTMPlan({w: ShapeDtype(shape, plan.output(w).dtype) for w, shape in y.items()}, plan, y)

    def _advance(self, plan: ConvLSTMPlan, params: Params, x: Array, parts: Parts) -> tuple[Array, Parts]:
        dtype: np.dtype = plan.output(self.P_x.world.rank).dtype
        h, c = (part.astype(dtype) for part in parts)
        gates = self._convolution(params, tie(jnp.concatenate([x.astype(dtype), h], axis=1), x, h))
        h, c = lstm_step(*jnp.split(gates, 4, axis=1), c=c)
        return h, (h, c)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.in_channels} -> {self.hidden_channels}, kernel "
            f"{shape_text(self._convolution._shapes['weight'][2:])}, P_x {shape_text(self.P_x.shape)})"
        )


_conv_lstm = in_dimensions(
    """
    i, f, o = sigmoid(w * [x, h] + b) of their channels; g = tanh of the same for its channels
    c' = f c + i g
    h' = o tanh(c')

with one convolution of x and h, concatenated along the channels, that keeps the features' lengths, and without
peepholes (as in most networks; Shi's sigmoids read c, too).

| tensor | global shape | partition |
|---|---|---|
| x | n_b x n_in x $n | P_x: P_n x 1 x $P |
| h and c, the carry; y, which is h' | n_b x n_h x $n | P_x |
| w (`params["weight"]`) | 4 n_h x (n_in + n_h) x $k | the first worker; all, if `sharded` |
| b (`params["bias"]`) | 4 n_h | as w |

The convolution is a `DistributedConv${D}d`: in each step halos of x and h move in one exchange, and the parameters are
broadcast. The channels of w are the gates i, f, g and o, in this order, as in PyTorch's LSTM. Channels of x are not
split; blocks are balanced along the features, and of any length along the batch. x holds real floating-point numbers; y
has the dtype to which those of x and the parameters promote, and the carry keeps its dtype. A worker outside P_x passes
zero-volume tensors, and gets them back.

**Arguments:**

- `P_x`: the partition of input, carry and output, with one worker along the channels.
- `in_channels`, `hidden_channels`: n_in and n_h.
- `kernel_size`, `dilation`: an integer, or one for each feature dimension.
- `bias`: whether to add b.
- `padding_mode`: "zeros", "circular", "reflect" or "replicate".
- `sharded`: whether w and b are cut over the workers that use them, and gathered in each step.

**Call:** `y, carry = cell(params, x, carry=carry)`, where the carry is the tuple (h, c), from `cell.init_carry(x_spec)`
or the previous call, as `jax.lax.scan` expects. `y = cell(params, x)` is a step from zeros.

**Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are inconsistent, or channels
are split; a call raises `PlanError`, on every worker of P_x, if x, a parameter or the carry does not fit.

>>> import distdl_jax as dj
>>> P = dj.planning_world(4).grid([1, 1, $grid])
>>> cell = $name(P, in_channels=3, hidden_channels=6, kernel_size=3)
>>> cell.output_spec(dj.TensorSpec((5, 3, $lengths), P)).block_shapes
$blocks

Source: Shi et al. (2015), arXiv:1506.04214.
""",
    blocks=(
        "{0: (5, 6, 3), 1: (5, 6, 2), 2: (5, 6, 2), 3: (5, 6, 2)}",
        "{0: (5, 6, 5, 4), 1: (5, 6, 5, 4), 2: (5, 6, 4, 4), 3: (5, 6, 4, 4)}",
        "{0: (5, 6, 5, 4, 4), 1: (5, 6, 5, 4, 4), 2: (5, 6, 4, 4, 4), 3: (5, 6, 4, 4, 4)}",
    ),
)


@_conv_lstm
class DistributedConvLSTMCell1d(DistributedConvLSTMCell):
    """One step of a convolutional LSTM over 1 feature dimension, with samples and features split."""

    dims = 1


@_conv_lstm
class DistributedConvLSTMCell2d(DistributedConvLSTMCell):
    """One step of a convolutional LSTM over 2 feature dimensions, with samples and features split."""

    dims = 2


@_conv_lstm
class DistributedConvLSTMCell3d(DistributedConvLSTMCell):
    """One step of a convolutional LSTM over 3 feature dimensions, with samples and features split."""

    dims = 3
