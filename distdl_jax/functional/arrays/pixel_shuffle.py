"""From channels to features and back: pixels that are shuffled, depth and space."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.arrays.arguments import Sizes, checked_dimensions, checked_per_axis
from distdl_jax.functional.arrays.rearrangement import OVER_WORKERS, Rearrangement, Rule, plan_rearrangement
from distdl_jax.functional.plan import ShapeDtypes, plan_and_run
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.transports.agreement import compared
from distdl_jax.validation import checked_axis


@compared
def pixel_shuffle(
    x: Array, P_x: Partition, upscale_factor: Sizes, axes: Sizes | None = None, *, channel_axis: int = 1
) -> Array:
    """Turn channels of a tensor on `P_x` into features: `torch.nn.functional.pixel_shuffle`.

    An image N x C r r x H x W becomes N x C x H r x W r, where r is the factor:

        y[n, c, h r + i, w r + j] = x[n, c r r + i r + j, h, w]

    and likewise of any number of feature dimensions. Everything may be split. Nothing moves where every worker has the
    channels of its outputs, and the balanced blocks of the output are made of whole pixels: so where only features are
    split, evenly. Else the entries that are another worker's move, once before and once after.

    **Arguments:**

    - `x`: this worker's block; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition of input and output, of as many dimensions as the tensor.
    - `upscale_factor`: r, an integer, or one for each of `axes`. Its product over them divides the channels.
    - `axes`: the feature dimensions; negative ones count from the end. Default: all but dimension 0 and the channels.
    - `channel_axis`: the dimension of the channels: 1, or -1 where they come last.

    **Returns:** this worker's balanced block of the output, perhaps empty; outside P_x, `x`.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit; `PlanError`,
    on every worker of P_x, where the factor doesn't divide x, or blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> pixel_shuffle(jnp.array([[[1, 2], [3, 4]]]), P, 2).tolist()
    [[[1, 3, 2, 4]]]

    Source: Shi et al. (2016), arXiv:1609.05158; PyTorch's function of the same name.
    """
    return _shuffled("pixel_shuffle", x, P_x, upscale_factor, axes, channel_axis)


@compared
def pixel_unshuffle(
    x: Array, P_x: Partition, downscale_factor: Sizes, axes: Sizes | None = None, *, channel_axis: int = 1
) -> Array:
    """Turn features of a tensor on `P_x` into channels: `torch.nn.functional.pixel_unshuffle`.

    It is the reverse of `pixel_shuffle`: an image N x C x H r x W r becomes N x C r r x H x W. The pixels that lie on
    several workers move to the one that needs them.

    **Arguments:**

    - `x`: this worker's block; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition of input and output, of as many dimensions as the tensor.
    - `downscale_factor`: r, an integer, or one for each of `axes`. It divides the lengths of x along `axes`.
    - `axes`: the feature dimensions; negative ones count from the end. Default: all but dimension 0 and the channels.
    - `channel_axis`: the dimension of the channels: 1, or -1 where they come last.

    **Returns:** this worker's balanced block of the output, perhaps empty; outside P_x, `x`.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit; `PlanError`,
    on every worker of P_x, where the factor doesn't divide x, or blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> pixel_unshuffle(jnp.array([[[1, 3, 2, 4]]]), P, 2).tolist()
    [[[1, 2], [3, 4]]]

    Source: PyTorch's function of the same name.
    """
    return _shuffled("pixel_unshuffle", x, P_x, downscale_factor, axes, channel_axis)


@compared
def depth_to_space(
    x: Array, P_x: Partition, block_size: Sizes, axes: Sizes | None = None, *, channel_axis: int = -1
) -> Array:
    """Turn channels of a tensor on `P_x` into features, as TensorFlow and ONNX order them.

    An image N x H x W x r r C becomes N x H r x W r x C. It differs from `pixel_shuffle` in that the C channels of a
    pixel lie next to each other:

        y[n, h r + i, w r + j, c] = x[n, h, w, (i r + j) C + c]

    Where channels are split, all of x moves between the workers along them.

    **Arguments:**

    - `x`: this worker's block; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition of input and output, of as many dimensions as the tensor.
    - `block_size`: r, an integer, or one for each of `axes`. Its product over them divides the channels.
    - `axes`: the feature dimensions; negative ones count from the end. Default: all but dimension 0 and the channels.
    - `channel_axis`: the dimension of the channels: -1, the last one, or 1.

    **Returns:** this worker's balanced block of the output, perhaps empty; outside P_x, `x`.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit; `PlanError`,
    on every worker of P_x, where the factor doesn't divide x, or blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> depth_to_space(jnp.array([[[1, 2, 3, 4]]]), P, 2).tolist()
    [[[1, 2], [3, 4]]]

    Source: TensorFlow's function of the same name; ONNX's DepthToSpace, mode DCR.
    """
    return _shuffled("depth_to_space", x, P_x, block_size, axes, channel_axis)


@compared
def space_to_depth(
    x: Array, P_x: Partition, block_size: Sizes, axes: Sizes | None = None, *, channel_axis: int = -1
) -> Array:
    """Turn features of a tensor on `P_x` into channels, the reverse of `depth_to_space`.

    An image N x H r x W r x C becomes N x H x W x r r C. Of a Vision Transformer or a ConvNeXt it cuts out the patches:
    `space_to_depth(image, P_x, 16)`.

    **Arguments:**

    - `x`: this worker's block; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition of input and output, of as many dimensions as the tensor.
    - `block_size`: r, an integer, or one for each of `axes`. It divides the lengths of x along `axes`.
    - `axes`: the feature dimensions; negative ones count from the end. Default: all but dimension 0 and the channels.
    - `channel_axis`: the dimension of the channels: -1, the last one, or 1.

    **Returns:** this worker's balanced block of the output, perhaps empty; outside P_x, `x`.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit; `PlanError`,
    on every worker of P_x, where the factor doesn't divide x, or blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> space_to_depth(jnp.array([[[1, 2], [3, 4]]]), P, 2).tolist()
    [[[1, 2, 3, 4]]]

    Source: TensorFlow's function of the same name; ONNX's SpaceToDepth.
    """
    return _shuffled("space_to_depth", x, P_x, block_size, axes, channel_axis)


class _Kind(NamedTuple):
    """One of the functions: the name of its factor, where the factors go, and whether they stand before the
    channels."""

    parameter: str
    to_features: bool
    factors_first: bool


KINDS = {
    "pixel_shuffle": _Kind("upscale_factor", to_features=True, factors_first=False),
    "pixel_unshuffle": _Kind("downscale_factor", to_features=False, factors_first=False),
    "depth_to_space": _Kind("block_size", to_features=True, factors_first=True),
    "space_to_depth": _Kind("block_size", to_features=False, factors_first=True),
}


def plan_pixels(
    kind: str,
    shape_dtypes: ShapeDtypes,
    P_x: Partition,
    factor: Sizes,
    axes: Sizes | None = None,
    channel_axis: int = 1,
) -> Rearrangement:
    """Plan the function `kind`, from the shapes and dtypes on the workers of P_x, and perhaps of more."""
    return plan_rearrangement(shape_dtypes, P_x, _rule(KINDS[kind], *_checked(kind, P_x, factor, axes, channel_axis)))


def _shuffled(kind: str, x: Array, P_x: Partition, factor: Sizes, axes: Sizes | None, channel_axis: int) -> Array:
    factors, channel, _ = _checked(kind, P_x, factor, axes, channel_axis)
    label = f"{kind} by {factors}, channels in {channel}, on {P_x.describe()}"
    with jax.named_scope(kind):
        return plan_and_run(
            P_x.world,
            tuple(sorted(P_x.ranks)),
            label,
            lambda blocks: plan_pixels(kind, blocks, P_x, tuple(factors.values()), tuple(factors), channel),
            x,
        )


def _rule(kind: _Kind, factors: dict[int, int], channel: int, dim: int) -> Rule:
    """Return what becomes of the dimensions: for a function to channels, what `kind` to features does backwards."""
    # Before, the channels' factors stand in dimension `channel`; afterwards, each stands behind its feature dimension.
    many = len(factors)
    behind = {d: channel + (not kind.factors_first) + place for place, d in enumerate(factors)}
    order: list[int] = []
    for d in range(dim):
        own = d + many * (d > channel or (d == channel and kind.factors_first))
        order += [own, behind[d]] if d in factors else [own]
    if kind.to_features:
        together = (*factors.values(), OVER_WORKERS) if kind.factors_first else (OVER_WORKERS, *factors.values())
        split = tuple(together if d == channel else (OVER_WORKERS,) for d in range(dim))
        return Rule(split, tuple(order), tuple(2 if d in factors else 1 for d in range(dim)), kind.parameter)
    split = tuple((OVER_WORKERS, factors[d]) if d in factors else (OVER_WORKERS,) for d in range(dim))
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    return Rule(split, back, tuple(1 + many * (d == channel) for d in range(dim)), kind.parameter)


def _checked(
    kind: str, P_x: Partition, factor: Sizes, axes: Sizes | None, channel_axis: int
) -> tuple[dict[int, int], int, int]:
    """Return the factor of each feature dimension, ascending, the dimension of the channels, and how many there are."""
    check_partitions(P_x=P_x)
    channel = checked_axis("channel_axis", channel_axis, P_x.shape)
    along = checked_dimensions(axes, [d for d in range(1, P_x.dim) if d != channel], P_x)
    if channel in along:
        raise InvalidArgumentError(f"`axes` (={axes!r}) must not name the dimension of the channels, {channel}.")
    return checked_per_axis(KINDS[kind].parameter, factor, along, 1), channel, P_x.dim
