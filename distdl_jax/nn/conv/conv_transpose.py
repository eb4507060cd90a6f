"""Transposed convolutions: the adjoints of the convolutions' windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.functional.sliding_windows import TransposedWindowsPlan, plan_transposed_windows
from distdl_jax.functional.weights import WeightPartitions
from distdl_jax.nn.base.dimensions import in_dimensions
from distdl_jax.nn.conv.conv_base import DistributedConv
from distdl_jax.plans.padding import PaddingMode
from distdl_jax.validation import is_integer


@dataclass(frozen=True, repr=False)
class DistributedConvTranspose(DistributedConv):
    """The base of the transposed convolutions, of any number of dimensions; see `DistributedConvTranspose2d`."""

    padding_mode: PaddingMode = field(default="zeros", init=False)
    output_padding: int | Sequence[int] = field(default=0, kw_only=True)

    def __post_init__(self, split: str | None) -> None:
        if isinstance(self.padding, str):
            raise InvalidArgumentError(f"`padding` (={self.padding!r}) must be numbers in a transposed convolution.")
        super().__post_init__(split)
        self._store(output_padding=self._extra)

    @cached_property
    def _extra(self) -> tuple[int, ...]:
        """The output padding of each feature dimension."""
        given = self.output_padding
        values = tuple(given) if isinstance(given, Sequence | np.ndarray) else (given,) * self.dims
        limits = [max(pair) for pair in zip(self._windows.stride, self._windows.dilation, strict=True)]
        if len(values) != self.dims or not all(
            is_integer(extra, least=0) and extra < limit for extra, limit in zip(values, limits, strict=True)
        ):
            raise InvalidArgumentError(
                f"`output_padding` (={given!r}) must be an integer of 0 or more, below stride or dilation "
                f"({', '.join(map(str, limits))}), or one for each of {self.dims} feature dimensions."
            )
        return tuple(map(int, values))

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        weight = (self.in_channels, self.out_channels // self.groups, *self._windows.kernel)
        return {"weight": weight} | ({"bias": (self.out_channels,)} if self.bias else {})

    @cached_property
    def _parameters(self) -> WeightPartitions:
        # P_ci x P_co; with groups, each worker along the output channels has whole groups, and P_ci is 1.
        return WeightPartitions(self._partitions.work, self.sharded, inputs_first=self.groups == 1)

    def _plan_windows(self, x: ShapeDtypes) -> TransposedWindowsPlan:
        return plan_transposed_windows(x, self.P_x, self._windows, self._extra)


_conv_transpose = in_dimensions(
    """
It is the adjoint of a convolution with respect to its input, and enlarges x if the stride is above 1:

    y[n, o, j] = b[o] + sum over c, i and t with stride i + dilation t - low = j of w[c, o, t] x[n, c, i]

Of n inputs a feature dimension makes (n - 1) stride - low - high + dilation (kernel - 1) + output_padding + 1 outputs.

| tensor | global shape | partition |
|---|---|---|
| x | n_b x n_ci x $n | P_x: P_n x P_ci x $P |
| y | n_b x n_co x $m | P_y: P_n x P_co x $P |
| w (`params["weight"]`) | n_ci x n_co/groups x $k | P_ci x P_co, of P_W's first slice |
| b (`params["bias"]`) | n_co | P_co, the first column of that slice |

Each worker fetches the inputs that its balanced block of outputs reads, and multiplies. If channels are split, x is
broadcast along P_co, and products are summed along P_ci. A single partition P suffices: `$name(P, in_channels=...,
out_channels=...)`; if it splits channels, `split` determines how w is cut. Blocks of x may be uneven along the batch
and the features, and empty; blocks of y are balanced along the features. A worker outside P_x passes a zero-volume
tensor, and one outside P_y gets one. y has the dtype to which those of x and the parameters promote.

**Arguments:**

- `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x $P, with P_n in front if
  the batch is split. They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers
  of P_x or P_y, with one side of w cut if channels are split.
- `in_channels`, `out_channels`: n_ci and n_co.
- `kernel_size`, `stride`, `dilation`: an integer, or one for each feature dimension, as in PyTorch.
- `padding`: an integer, one for each feature dimension, or a list with a pair (low, high) for each: the number of
  outputs omitted at the ends.
- `output_padding`: an integer, or one for each feature dimension, below stride or dilation: the number of outputs added
  at the high end.
- `groups`: as in PyTorch. If input channels are split, the output channels are split over as many workers, P_ci
  is 1 in P_W, and each worker has whole groups.
- `bias`: whether to add b.
- `sharded`: whether w is cut along n_ci, and b along n_co, over all workers that use the same block, along P_n and the
  features, and gathered in each call; otherwise the first of these workers holds them, and they are broadcast.
- `split`: "in_channels" or "out_channels", the channels of w to cut if P_x and P_y both split channels, on the same
  workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker multiplies by its
  output channels of w; with "in_channels" each multiplies by its input channels, and the sums are scattered along y's
  channels. Default: the one that moves less, with ties resolved to the output channels.

**Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if arguments are
inconsistent; when applied, `PlanError` if x or a parameter doesn't fit.

>>> import distdl_jax as dj
>>> P = dj.planning_world(4).grid([1, 1, $grid])
>>> layer = $name(P, in_channels=3, out_channels=8, kernel_size=2, stride=2)
>>> layer.output_spec(dj.TensorSpec((5, 3, $lengths), P)).block_shapes
$blocks

Source: PyTorch's ConvTranspose1d, 2d and 3d; Hewett and Grady (2020), adjoints of convolutions.
""",
    blocks=(
        "{0: (5, 8, 5), 1: (5, 8, 5), 2: (5, 8, 4), 3: (5, 8, 4)}",
        "{0: (5, 8, 9, 8), 1: (5, 8, 9, 8), 2: (5, 8, 9, 8), 3: (5, 8, 9, 8)}",
        "{0: (5, 8, 9, 8, 8), 1: (5, 8, 9, 8, 8), 2: (5, 8, 9, 8, 8), 3: (5, 8, 9, 8, 8)}",
        "{0: (5, 8, 9, 16, 4, 12), 1: (5, 8, 9, 16, 4, 12), 2: (5, 8, 9, 16, 4, 12), 3: (5, 8, 9, 16, 4, 12)}",
    ),
)


@_conv_transpose
class DistributedConvTranspose1d(DistributedConvTranspose):
    """A 1-D transposed convolution, split over workers: PyTorch's ConvTranspose1d, block for block."""

    dims = 1


@_conv_transpose
class DistributedConvTranspose2d(DistributedConvTranspose):
    """A 2-D transposed convolution, split over workers: PyTorch's ConvTranspose2d, block for block."""

    dims = 2


@_conv_transpose
class DistributedConvTranspose3d(DistributedConvTranspose):
    """A 3-D transposed convolution, split over workers: PyTorch's ConvTranspose3d, block for block."""

    dims = 3


@_conv_transpose
class DistributedConvTranspose4d(DistributedConvTranspose):
    """A 4-D transposed convolution, split over workers: PyTorch's ConvTranspose3d with one more dimension."""

    dims = 4
