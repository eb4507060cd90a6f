"""Distributed convolutions over 1 to 4 feature dimensions: for all partitions, and for a single algorithm."""

from __future__ import annotations

from distdl_jax.nn.base.dimensions import in_dimensions
from distdl_jax.nn.conv.conv_base import DistributedConv

_CONV = """
    y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

| tensor | global shape | partition |
|---|---|---|
| x | n_b x n_ci x $n | P_x: P_n x P_ci x $P |
| y | n_b x n_co x $m | P_y: P_n x P_co x $P |
| w (`params["weight"]`) | n_co x n_ci/groups x $k | P_W's slice P_co x P_ci x $ones |
| b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x $ones |

The split dimensions determine the communication; `repr` shows which of three algorithms is used:

- *feature*: no channels are split, and P_y and P_W are not given. Halos are exchanged along the features; w and b
  are broadcast over P_x.
- *channel*: only channels (and the batch) are split. x is broadcast along P_co, and the products are summed along P_ci.
  The number of messages is smallest if P_x is P_W's first row and P_y its first column: workers 0 and 1, and 0 and 2,
  of 2 x 2.
- *general*: both.

A single partition P suffices: `$name(P, in_channels=..., out_channels=...)`; if it splits channels, `split` determines
how w is cut. Blocks of x may be uneven along the batch and the features, empty, or smaller than the kernel; blocks of y
are balanced along the features. A worker outside P_x passes a zero-volume tensor, and one outside P_y gets one. y has
the dtype to which those of x and the parameters promote.

**Arguments:**

- `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x $P, with P_n in front if
  the batch is split. They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers
  of P_x or P_y, with one side of w cut if channels are split.
- `in_channels`, `out_channels`: n_ci and n_co.
- `kernel_size`, `stride`, `dilation`: an integer, or one for each feature dimension, as in PyTorch.
- `padding`: an integer, one for each feature dimension, a list with a pair (low, high) for each, "same" (with a
  stride of 1) or "valid".
- `groups`: as in PyTorch. If input channels are split, the output channels are split over as many workers, P_ci
  is 1 in P_W, and each worker has whole groups.
- `bias`: whether to add b.
- `padding_mode`: "zeros", "circular", "reflect" or "replicate".
- `sharded`: whether w and b are cut along n_co over all workers that use the same block, along P_n and the features,
  and gathered in each call; otherwise the first of these workers holds them, and they are broadcast.
- `split`: "in_channels" or "out_channels", the side of w to cut if P_x and P_y both split channels, on the same
  workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker multiplies by its
  rows of w; with "in_channels" each multiplies by its columns, and the sums are scattered along y's channels. Default:
  the one that moves less, with ties resolved to the output channels.

**Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if arguments are
inconsistent; when applied, `PlanError` if x or a parameter doesn't fit.

>>> import distdl_jax as dj
>>> P = dj.planning_world(4).grid([1, 1, $grid])
>>> layer = $name(P, in_channels=3, out_channels=8, kernel_size=3, padding=1)
>>> layer.output_spec(dj.TensorSpec((5, 3, $lengths), P)).block_shapes
$blocks

Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
"""
_conv = in_dimensions(
    _CONV,
    blocks=(
        "{0: (5, 8, 3), 1: (5, 8, 2), 2: (5, 8, 2), 3: (5, 8, 2)}",
        "{0: (5, 8, 5, 4), 1: (5, 8, 5, 4), 2: (5, 8, 4, 4), 3: (5, 8, 4, 4)}",
        "{0: (5, 8, 5, 4, 4), 1: (5, 8, 5, 4, 4), 2: (5, 8, 4, 4, 4), 3: (5, 8, 4, 4, 4)}",
        "{0: (5, 8, 5, 8, 2, 6), 1: (5, 8, 5, 8, 2, 6), 2: (5, 8, 4, 8, 2, 6), 3: (5, 8, 4, 8, 2, 6)}",
    ),
)


@_conv
class DistributedConv1d(DistributedConv):
    """A 1-D convolution whose input, output and weight are split over workers: PyTorch's Conv1d, block for block."""

    dims = 1


@_conv
class DistributedConv2d(DistributedConv):
    """A 2-D convolution whose input, output and weight are split over workers: PyTorch's Conv2d, block for block."""

    dims = 2


@_conv
class DistributedConv3d(DistributedConv):
    """A 3-D convolution whose input, output and weight are split over workers: PyTorch's Conv3d, block for block."""

    dims = 3


@_conv
class DistributedConv4d(DistributedConv):
    """A 4-D convolution whose input, output and weight are split over workers: space and time, as Conv3d."""

    dims = 4


CONVOLUTIONS = {
    layer.dims: layer for layer in (DistributedConv1d, DistributedConv2d, DistributedConv3d, DistributedConv4d)
}
"""The class of each number of feature dimensions."""

_ONE_ALGORITHM = """
    y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

| tensor | global shape | partition |
|---|---|---|
| x | n_b x n_ci x $n | $on_x |
| y | n_b x n_co x $m | $on_y |
| w (`params["weight"]`) | n_co x n_ci/groups x $k | $on_w |
| b (`params["bias"]`) | n_co | $on_b |

$text

**Arguments:** all as in `DistributedConv${D}d`: `P_x`, `P_y`, `P_W`, in the shapes above, `in_channels`,
`out_channels`, `kernel_size`, `stride`, `padding`, `dilation`, `groups`, `bias`, `padding_mode`, `sharded`, `split`.

**Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if arguments are
inconsistent, or the partitions need another algorithm; when applied, `PlanError` if x or a parameter doesn't fit.

>>> import distdl_jax as dj
>>> P = dj.planning_world($workers).grid([1, $split])
>>> layer = $name(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
>>> layer.param_specs()["weight"].block_shapes
$blocks

Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
"""

_feature_conv = in_dimensions(
    _ONE_ALGORITHM,
    text="""
Rejects partitions that split channels; everything else is as in `DistributedConv${D}d`. Halos are exchanged along the
features, and w and b, on the first worker, are broadcast over P_x. In the backward pass, halos are added, and the
gradients of w and b are summed.
""",
    on_x="P_x: P_n x 1 x $P",
    on_y="P_x",
    on_w="the first worker of P_x",
    on_b="the first worker of P_x",
    workers="4",
    split="1, $grid",
    blocks="{0: (8, 4, $threes)}",
)


@_feature_conv
class DistributedFeatureConv1d(DistributedConv1d):
    """A 1-D convolution on a partition that splits features, not channels: PyTorch's Conv1d, block for block."""

    _required_kind = "feature"


@_feature_conv
class DistributedFeatureConv2d(DistributedConv2d):
    """A 2-D convolution on a partition that splits features, not channels: PyTorch's Conv2d, block for block."""

    _required_kind = "feature"


@_feature_conv
class DistributedFeatureConv3d(DistributedConv3d):
    """A 3-D convolution on a partition that splits features, not channels: PyTorch's Conv3d, block for block."""

    _required_kind = "feature"


@_feature_conv
class DistributedFeatureConv4d(DistributedConv4d):
    """A 4-D convolution on a partition that splits features, not channels."""

    _required_kind = "feature"


_channel_conv = in_dimensions(
    _ONE_ALGORITHM,
    text="""
Rejects partitions that split features, and a P_x of whole channels if P_W is not given. Everything else is as in
`DistributedConv${D}d`. x is broadcast along P_co, and the products are summed along P_ci. The number of messages is
smallest if P_x is P_W's first row and P_y its first column: workers 0 and 1, and 0 and 2, of 2 x 2. On one partition, x
is gathered or sums are scattered along the channels, depending on `split`.
""",
    on_x="P_x: P_n x P_ci x $ones",
    on_y="P_y: P_n x P_co x $ones",
    on_w="P_W's slice P_co x P_ci x $ones",
    on_b="P_W's slice P_co x 1 x $ones",
    workers="2",
    split="2, $unit",
    blocks="{0: (4, 4, $threes), 1: (4, 4, $threes)}",
)


@_channel_conv
class DistributedChannelConv1d(DistributedConv1d):
    """A 1-D convolution on partitions that split channels, not features: PyTorch's Conv1d, block for block."""

    _required_kind = "channel"


@_channel_conv
class DistributedChannelConv2d(DistributedConv2d):
    """A 2-D convolution on partitions that split channels, not features: PyTorch's Conv2d, block for block."""

    _required_kind = "channel"


@_channel_conv
class DistributedChannelConv3d(DistributedConv3d):
    """A 3-D convolution on partitions that split channels, not features: PyTorch's Conv3d, block for block."""

    _required_kind = "channel"


@_channel_conv
class DistributedChannelConv4d(DistributedConv4d):
    """A 4-D convolution on partitions that split channels, not features."""

    _required_kind = "channel"


_general_conv = in_dimensions(
    _ONE_ALGORITHM,
    text="""
Rejects partitions that split no features, and a P_x of whole channels if P_W is not given. Everything else is as in
`DistributedConv${D}d`. Halos are exchanged along the features, x is broadcast along P_co, and the products are summed
along P_ci. On one partition, x is gathered or sums are scattered along the channels, depending on `split`.
""",
    on_x="P_x: P_n x P_ci x $P",
    on_y="P_y: P_n x P_co x $P",
    on_w="P_W's slice P_co x P_ci x $ones",
    on_b="P_W's slice P_co x 1 x $ones",
    workers="8",
    split="2, $grid",
    blocks="{0: (4, 4, $threes), 4: (4, 4, $threes)}",
)


@_general_conv
class DistributedGeneralConv1d(DistributedConv1d):
    """A 1-D convolution on partitions that split both channels and features: PyTorch's Conv1d, block for block."""

    _required_kind = "general"


@_general_conv
class DistributedGeneralConv2d(DistributedConv2d):
    """A 2-D convolution on partitions that split both channels and features: PyTorch's Conv2d, block for block."""

    _required_kind = "general"


@_general_conv
class DistributedGeneralConv3d(DistributedConv3d):
    """A 3-D convolution on partitions that split both channels and features: PyTorch's Conv3d, block for block."""

    _required_kind = "general"


@_general_conv
class DistributedGeneralConv4d(DistributedConv4d):
    """A 4-D convolution on partitions that split both channels and features."""

    _required_kind = "general"
