"""Windows of a split tensor, as in Swin transformers, and shuffles of pixels between features and channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.block_checks import outside, owned_grid
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.plan import ShapeDtypes, plan_and_run
from distdl_jax.functional.reshape import OVER_WORKERS, Rearrangement, Rule, plan_rearrangement
from distdl_jax.partitions.partition import CartesianPartition, Partition, check_partitions
from distdl_jax.plans.decomposition import balanced_range, index_of
from distdl_jax.text import documented
from distdl_jax.transports.agreement import exchange_shapes
from distdl_jax.validation import checked_axes, checked_axis, checked_integers

Sizes = int | Sequence[int]


def checked_dimensions(axes: Sizes | None, default: Sequence[int], P_x: Partition) -> tuple[int, ...]:
    """Return the argument `axes`, one dimension of P_x or more, in the given order."""
    along = tuple(default) if axes is None else checked_integers("axes", axes, or_one=True)
    checked_axes("axes", along, P_x.shape)
    if not along:
        raise InvalidArgumentError(f"`axes` (={axes!r}) must name one or more dimensions of P_x, which has {P_x.dim}.")
    return tuple(d % P_x.dim for d in along)


def checked_per_axis(name: str, values: Sizes, axes: tuple[int, ...], least: int) -> dict[int, int]:
    """Return the argument `name`, one integer or one for each of `axes`, by dimension, ascending."""
    numbers = checked_integers(name, values, or_one=True)
    numbers = numbers * len(axes) if len(numbers) == 1 else numbers
    if len(numbers) != len(axes) or min(numbers, default=least) < least:
        raise InvalidArgumentError(
            f"`{name}` (={values!r}) must be an integer, {least} or more, or one for each of the dimensions {axes}."
        )
    return dict(sorted(zip(axes, numbers, strict=True)))


_SHUFFLED = """
**Arguments:**

- `x`: this worker's block; blocks may be uneven and empty. Zero-volume outside P_x.
- `P_x`: the partition of input and output, with as many dimensions as the tensor.
- `$factor`: r, an integer, or one for each of `axes`. $divides.
- `axes`: the feature dimensions; negative ones count from the end. Default: all but dimension 0 and the channels.
- `channel_axis`: the dimension of the channels, 1 or -1, the last one.

**Returns:** this worker's balanced block of the output, which may be empty; outside P_x, `x`.

**Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; `PlanError`, on
every worker of P_x, if the factor doesn't divide x, or blocks don't form a grid.

>>> import jax.numpy as jnp, distdl_jax as dj
>>> P = dj.Partition().grid([1, 1, 1])
>>> $name(jnp.array($example
"""
_DIVIDES_CHANNELS = "Its product over `axes` divides the channels"
_DIVIDES_LENGTHS = "It divides the lengths of x along `axes`"


@function_call
@documented(
    _SHUFFLED,
    factor="upscale_factor",
    divides=_DIVIDES_CHANNELS,
    example="[[[1, 2], [3, 4]]]), P, 2).tolist()\n[[[1, 3, 2, 4]]]",
)
def pixel_shuffle(
    x: Array, P_x: Partition, upscale_factor: Sizes, axes: Sizes | None = None, *, channel_axis: int = 1
) -> Array:
    """Turn channels of a tensor on `P_x` into features: `torch.nn.functional.pixel_shuffle`.

    An image N x C r r x H x W becomes N x C x H r x W r, where r is the factor:

        y[n, c, h r + i, w r + j] = x[n, c r r + i r + j, h, w]

    and likewise for any number of feature dimensions. All dimensions may be split. There is no communication if every
    worker has the channels of its outputs, and the balanced blocks of the output consist of whole pixels: if only
    features are split, evenly. Otherwise entries that change owners move, once before and once after.

    Source: Shi et al. (2016), arXiv:1609.05158; PyTorch's function of the same name.
    """
    return _shuffled("pixel_shuffle", x, P_x, upscale_factor, axes, channel_axis)


@function_call
@documented(
    _SHUFFLED,
    factor="downscale_factor",
    divides=_DIVIDES_LENGTHS,
    example="[[[1, 3, 2, 4]]]), P, 2).tolist()\n[[[1, 2], [3, 4]]]",
)
def pixel_unshuffle(
    x: Array, P_x: Partition, downscale_factor: Sizes, axes: Sizes | None = None, *, channel_axis: int = 1
) -> Array:
    """Turn features of a tensor on `P_x` into channels: `torch.nn.functional.pixel_unshuffle`.

    The inverse of `pixel_shuffle`: an image N x C x H r x W r becomes N x C r r x H x W. Pixels that lie on several
    workers are sent to the one that needs them.
    """
    return _shuffled("pixel_unshuffle", x, P_x, downscale_factor, axes, channel_axis)


@function_call
@documented(
    _SHUFFLED,
    factor="block_size",
    divides=_DIVIDES_CHANNELS,
    example="[[[1, 2, 3, 4]]]), P, 2).tolist()\n[[[1, 2], [3, 4]]]",
)
def depth_to_space(
    x: Array, P_x: Partition, block_size: Sizes, axes: Sizes | None = None, *, channel_axis: int = -1
) -> Array:
    """Turn channels of a tensor on `P_x` into features, in the order of TensorFlow and ONNX (DepthToSpace, mode DCR).

    An image N x H x W x r r C becomes N x H r x W r x C. Unlike in `pixel_shuffle`, the C channels of a pixel are
    adjacent:

        y[n, h r + i, w r + j, c] = x[n, h, w, (i r + j) C + c]

    If channels are split, all of x moves between the workers along them.
    """
    return _shuffled("depth_to_space", x, P_x, block_size, axes, channel_axis)


@function_call
@documented(
    _SHUFFLED,
    factor="block_size",
    divides=_DIVIDES_LENGTHS,
    example="[[[1, 2], [3, 4]]]), P, 2).tolist()\n[[[1, 2, 3, 4]]]",
)
def space_to_depth(
    x: Array, P_x: Partition, block_size: Sizes, axes: Sizes | None = None, *, channel_axis: int = -1
) -> Array:
    """Turn features of a tensor on `P_x` into channels, the inverse of `depth_to_space`: ONNX's SpaceToDepth.

    An image N x H r x W r x C becomes N x H x W x r r C. For a Vision Transformer or a ConvNeXt it cuts patches:
    `space_to_depth(image, P_x, 16)`.
    """
    return _shuffled("space_to_depth", x, P_x, block_size, axes, channel_axis)


class _Kind(NamedTuple):
    """A function: the name of its factor, the destination of the factors, and whether they precede the channels."""

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
    """Plan the function `kind`, from the shapes and dtypes on at least the workers of P_x."""
    return plan_rearrangement(shape_dtypes, P_x, _rule(KINDS[kind], *_checked(kind, P_x, factor, axes, channel_axis)))


def _shuffled(kind: str, x: Array, P_x: Partition, factor: Sizes, axes: Sizes | None, channel_axis: int) -> Array:
    factors, channel, _ = _checked(kind, P_x, factor, axes, channel_axis)
    with jax.named_scope(kind):
        return plan_and_run(
            f"{kind} by {factors}, channels in {channel},",
            lambda blocks: plan_pixels(kind, blocks, P_x, tuple(factors.values()), tuple(factors), channel),
            x,
            P_x,
        )


def _rule(kind: _Kind, factors: dict[int, int], channel: int, dim: int) -> Rule:
    """Return the rearrangement of the dimensions: for a function to channels, the inverse of that to features."""
    # Before, the channels' factors are in dimension `channel`; afterwards, each follows its feature dimension.
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
    """Return the factors of feature dimensions, ascending, the dimension of channels, and the number of dimensions."""
    check_partitions(P_x=P_x)
    channel = checked_axis("channel_axis", channel_axis, P_x.shape)
    along = checked_dimensions(axes, [d for d in range(1, P_x.dim) if d != channel], P_x)
    if channel in along:
        raise InvalidArgumentError(f"`axes` (={axes!r}) must not include the dimension of the channels, {channel}.")
    return checked_per_axis(KINDS[kind].parameter, factor, along, 1), channel, P_x.dim


@function_call
def window_partition(x: Array, P_x: Partition, window_size: Sizes, axes: Sizes | None = None) -> Array:
    """Cut a tensor on `P_x` into windows that don't overlap, with whole windows on every worker.

    An image N x H x W x C, on P_n x P_h x P_w x P_c, becomes N x H/h x W/w x h x w x C, on P_n x P_h x P_w x 1 x 1 x
    P_c, for windows of h x w:

        y[n, i, j, a, b, c] = x[n, i h + a, j w + b, c]

    The numbers of windows follow dimension 0, the batch (or precede it, if it is one of `axes`), and the positions in a
    window replace the dimensions: N x C x H x W becomes N x H/h x W/w x C x h x w. So on each worker `y.reshape(-1, h *
    w, C)` has its windows as entries of a batch, on which attention needs no communication.

    Only the entries of windows that cross a block boundary move, to the worker that needs them; if all blocks hold
    whole windows, there is no communication. The adjoint moves them back. To shift windows, use `roll(x, P_x, -shift,
    axes)` before, and a roll by `shift` after `window_reverse`; `window_mask` tells which tokens are then neighbours.

    **Arguments:**

    - `x`: this worker's block; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition, with as many dimensions as the tensor.
    - `window_size`: the lengths of a window, an integer, or one for each of `axes`. They divide the lengths of x.
    - `axes`: the dimensions to cut; negative ones count from the end. Default: all but the first and the last.

    **Returns:** this worker's balanced block of the windows, which may be empty; outside P_x, `x`.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; `PlanError`, on
    every worker of P_x, if windows don't divide x (pad it with `nn.DistributedPad`), or blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1, 1])
    >>> image = jnp.arange(16).reshape(1, 4, 4, 1)
    >>> windows = window_partition(image, P, 2)
    >>> windows.shape, windows.reshape(-1, 4).tolist()
    ((1, 2, 2, 2, 2, 1), [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])

    Source: Liu et al. (2021), arXiv:2103.14030.
    """
    check_partitions(P_x=P_x)
    sizes = _window(window_size, axes, P_x)
    plan = partial(plan_window_partition, P_x=P_x, window_size=tuple(sizes.values()), axes=tuple(sizes))
    with jax.named_scope("window_partition"):
        return plan_and_run(f"window_partition into {sizes}", plan, x, P_x)


def plan_window_partition(
    shape_dtypes: ShapeDtypes, P_x: Partition, window_size: Sizes, axes: Sizes | None = None
) -> Rearrangement:
    """Plan `window_partition` from the shapes and dtypes on at least the workers of P_x."""
    return plan_rearrangement(shape_dtypes, P_x, _partition_rule(_window(window_size, axes, P_x), P_x.dim))


@function_call
def window_reverse(x: Array, P_x: Partition, axes: Sizes | None = None) -> Array:
    """Reassemble the windows of `window_partition` into balanced blocks on `P_x`.

    **Arguments:**

    - `x`: this worker's windows, in the shape and on the workers of `window_partition`'s output; the lengths of
      channels may differ. Zero-volume outside P_x.
    - `P_x`, `axes`: as for `window_partition`: the partition and the dimensions of the original tensor.

    **Returns:** this worker's balanced block of the whole tensor; outside P_x, `x`.

    **Raises:** as in `window_partition`; `PlanError` also if x does not have two dimensions for each of `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1, 1])
    >>> image = jnp.arange(16).reshape(1, 4, 4, 1)
    >>> bool((window_reverse(window_partition(image, P, 2), P) == image).all())
    True
    """
    check_partitions(P_x=P_x)
    along = tuple(sorted(_axes(axes, P_x)))
    with jax.named_scope("window_reverse"):
        plan = partial(plan_window_reverse, P_x=P_x, axes=along)
        return plan_and_run(f"window_reverse along {along}", plan, x, P_x)


def plan_window_reverse(shape_dtypes: ShapeDtypes, P_x: Partition, axes: Sizes | None = None) -> Rearrangement:
    """Plan `window_reverse` from the shapes and dtypes on at least the workers of P_x."""
    along = tuple(sorted(_axes(axes, P_x)))
    order = _partition_rule(dict.fromkeys(along, 1), P_x.dim).order
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    groups = tuple(2 if d in along else 1 for d in range(P_x.dim))
    return plan_rearrangement(
        shape_dtypes, partition_of_windows(P_x, along), Rule(((OVER_WORKERS,),) * len(order), back, groups, "x")
    )


def partition_of_windows(P_x: Partition, axes: Sequence[int]) -> CartesianPartition:
    """Return the partition of the output of `window_partition` for a tensor on P_x and the dimensions `axes`."""
    return _partition_rule(dict.fromkeys(axes, 1), P_x.dim).partitions(P_x)[1]


@function_call
def window_mask(x: Array, P_x: Partition, window_size: Sizes, shift: Sizes, axes: Sizes | None = None) -> Array:
    """Say which tokens of this worker's windows were neighbours before the tensor was rolled back by `shift`.

    In a window at the end of a dimension some tokens have wrapped around from its beginning. Attention lets tokens see
    each other if they wrapped around along the same dimensions. There is no communication.

    **Arguments:**

    - `x`, `P_x`, `window_size`, `axes`: as for `window_partition`; only the lengths of x matter.
    - `shift`: by how much x was rolled back, an integer, 0 or more, or one for each of `axes`.

    **Returns:** bools, B x L x L, for the B windows of this worker, in the order of `window_partition(...).reshape(-1,
    ...)`, and the L tokens of a window: True where the one may see the other, as `jax.nn.dot_product_attention` takes
    it. Outside P_x, B is 0.

    **Raises:** as in `window_partition`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> window_mask(jnp.zeros((1, 4, 1)), P, 2, shift=1).tolist()
    [[[True, True], [True, True]], [[True, False], [False, True]]]

    Source: Liu et al. (2021), arXiv:2103.14030, section 3.2.
    """
    check_partitions(P_x=P_x)
    sizes = _window(window_size, axes, P_x)
    by = checked_per_axis("shift", shift, _axes(axes, P_x), 0)
    tokens = int(np.prod(tuple(sizes.values())))
    if not P_x.active:
        outside(P_x.world, x)
        return jnp.zeros((0, tokens, tokens), bool)
    label = f"window_mask of {sizes} shifted by {by} on {P_x.describe()}"
    blocks = exchange_shapes(P_x.world, tuple(sorted(P_x.ranks)), label, x)
    windows = plan_window_partition(blocks, P_x, tuple(sizes.values()), tuple(sizes)).output(P_x.world.rank).shape
    extent = owned_grid("x", P_x, blocks).extent
    regions = _regions(P_x, extent, sizes, by)
    same = jnp.asarray(regions)[..., :, None] == regions[..., None, :]
    if 0 not in sizes:
        same = jnp.broadcast_to(same, (windows[0], *same.shape))
    return same.reshape(-1, tokens, tokens) if same.size else jnp.zeros((0, tokens, tokens), bool)


def _regions(P_x: Partition, extent: tuple[int, ...], sizes: Mapping[int, int], by: Mapping[int, int]) -> np.ndarray:
    """Return a number for each token of this worker's windows: a bit for each dimension that it wrapped around."""
    assert P_x.rank is not None
    index = index_of(P_x.rank, P_x.shape)
    dims = len(sizes)
    total = np.zeros((1,) * (2 * dims), np.int32)
    for k, (d, size) in enumerate(sizes.items()):
        start, stop = balanced_range(extent[d] // size, P_x.shape[d], index[d])
        places = np.arange(start * size, stop * size).reshape(-1, size)
        shape = [places.shape[0] if e == k else size if e == dims + k else 1 for e in range(2 * dims)]
        total = total + ((places + by[d] >= extent[d]).astype(np.int32) << k).reshape(shape)
    return total.reshape(*total.shape[:dims], int(np.prod(total.shape[dims:])))


def _partition_rule(sizes: Mapping[int, int], dim: int) -> Rule:
    """Return the rule that cuts a tensor of `dim` dimensions into windows of `sizes`, by dimension."""
    factors = tuple((OVER_WORKERS, sizes[d]) if d in sizes else (OVER_WORKERS,) for d in range(dim))
    first = [sum(len(parts) for parts in factors[:d]) for d in range(dim)]
    front = [] if 0 in sizes else [0]
    counts = [first[d] for d in sizes]
    rest = [first[d] + (d in sizes) for d in range(len(front), dim)]
    order = (*front, *counts, *rest)
    return Rule(factors, order, (1,) * len(order), "window_size")


def _window(window_size: Sizes, axes: Sizes | None, P_x: Partition) -> dict[int, int]:
    """Return the length of a window along each cut dimension, ascending."""
    return checked_per_axis("window_size", window_size, _axes(axes, P_x), 1)


def _axes(axes: Sizes | None, P_x: Partition) -> tuple[int, ...]:
    return checked_dimensions(axes, range(1, P_x.dim - 1), P_x)
