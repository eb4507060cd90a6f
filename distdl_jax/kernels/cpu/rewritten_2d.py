"""Convolutions in one and two dimensions, written for the library of fast kernels that XLA's CPU compiler knows.

The compiler hands a convolution to that library if it is two-dimensional, has more than 16 channels on one side, and no
more outputs than inputs along each dimension. Others go to an older one, which takes 1.2 to 4 times as long. So, for
float32 with at most 16 channels on both sides, several outputs that stand side by side count as channels, and the
kernel and the stride get larger; sometimes columns of the input do too. Padding that would make the outputs outnumber
the inputs becomes part of the input. So does that around an image of fewer pixels than the kernel has taps: the
compiler would take one for the other, which takes 5 to 25 times as long. In float64, 4 to 16 output channels become 17,
also for the weight's gradient.

The gradient of the weight is a convolution too, whose kernel is dy (or x) and whose input is x (or dy). Here the older
library is fast if nothing is padded, and if samples, which are the channels, are few: so some stand above each other.
The newer one is where its kernel fits the processor's cache: so it gets x and dy in pieces.

Figures: records.json, which benchmarks/local_convolution.py writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.geometry import Pairs, Placement, padded, row_major
from distdl_jax.kernels.xla_conv import conv

LIBRARY_CHANNELS = 17
"""Channels, of the input or the output, from which on XLA hands a convolution to its fast library."""

SIDE_BY_SIDE = 32
"""Output channels to aim at when several outputs count as one."""

WORTH_PADDING = 4
"""float64 output channels from which on it pays to add empty ones."""

FEW_ROWS = 4
"""Rows or columns of outputs to which one more is not added, even where it is computed faster with padding."""

PIECE = 1 << 20
"""Bytes of dy in a piece: half of a common second-level cache."""


def planar(x: Array, weight: Array, window: Placement) -> Array:
    """Return the convolution of `x`, N x C x features, with `weight`, c_out x C x kernel; one or two dimensions."""
    if x.ndim == 3:
        return planar(x[:, :, None], weight[:, :, None], window.with_row())[:, :, 0]
    if math.prod(x.shape[2:]) < math.prod(weight.shape[2:]):
        x, window = padded(x, window.padding), replace(window, padding=((0, 0), (0, 0)))
    x, window = _no_more_outputs_than_inputs(x, weight.shape[2:], window)
    if x.dtype == jnp.float64:
        return _double(x, weight, window)
    in_library = max(weight.shape[:2]) >= LIBRARY_CHANNELS
    if in_library or math.prod(weight.shape[2:]) == 1 or not window.stride[1] == window.dilation[1] == 1:
        return _plain(x, weight, window)
    return _side_by_side(x, weight, window)


def planar_weight_gradient(x: Array, dy: Array, kernel: tuple[int, ...], window: Placement) -> Array:
    """Return the gradient of the weight of `planar`, c_out x C x `kernel`, from x and the cotangent `dy`."""
    if x.ndim == 3:
        gradient = planar_weight_gradient(x[:, :, None], dy[:, :, None], (1, *kernel), window.with_row())
        return gradient[:, :, 0]
    channels = (x.shape[1], dy.shape[1])
    wide = min(channels) >= LIBRARY_CHANNELS
    # The kernel is the side with more channels, unless that is too many for the older library.
    by_dy = channels[0] < LIBRARY_CHANNELS <= channels[1] or channels[1] < channels[0] < LIBRARY_CHANNELS
    if 0 in (*x.shape, *dy.shape):
        weight = jnp.zeros((dy.shape[1], x.shape[1], *kernel), x.dtype)
        return jax.vjp(lambda weight: planar(x, weight, window), weight)[1](dy)[0]
    # Exactly what the windows read.
    padding = window.padding_read(x.shape[2:], kernel, dy.shape[2:])
    if x.dtype == jnp.float64:
        return _double_of_weight(x, dy, kernel, window, padding)
    if wide:
        return _in_pieces(padded(x, padding), dy, kernel, window)
    many = x.shape[0] >= LIBRARY_CHANNELS
    if set(window.stride) != {1} and (many or by_dy):
        return _of_weight(x, dy, window, padding)
    x = padded(x, padding)
    if many:
        x, dy = _stacked(x, dy)
    return _of_weight_by_dy(x, dy, kernel, window) if by_dy else _of_weight(x, dy, window)


def _channels_last(x: Array, weight: Array, window: Placement) -> Array:
    """Return the convolution of N x features x C with kernel x C x c_out.

    That is the order that the compiler computes in. It rearranges other orders by itself, but not inside a loop, where
    it then takes 4 to 10 times as long.
    """
    return conv(x, weight, window.stride, window.padding, dilation=window.dilation, channels_last=True)


def _plain(x: Array, weight: Array, window: Placement) -> Array:
    """Compute the convolution as it is, in the order that the compiler computes in."""
    rows, columns = window.outputs(x.shape[2:], weight.shape[2:])
    weight = jnp.transpose(weight, (2, 3, 1, 0))
    y = _channels_last(row_major(jnp.moveaxis(x, 1, 3)), weight, _with_padding(x.shape[2:], weight.shape, window))
    return row_major(jnp.moveaxis(y, 3, 1))[:, :, :rows, :columns]


def _with_padding(sizes: Sequence[int], kernel: Sequence[int], window: Placement) -> Placement:
    """Return `window` with a row or column of padding at the end where that is faster.

    The fast library takes 1.2 to 3 times as long where nothing is padded. That can add a row or column to the outputs.
    """
    outputs = window.outputs(sizes, kernel[:2])
    if any(map(any, window.padding)) or max(kernel[2:]) < LIBRARY_CHANNELS or min(outputs) < FEW_ROWS:
        return window
    columns, rows = replace(window, padding=((0, 0), (0, 1))), replace(window, padding=((0, 1), (0, 0)))
    for more in (columns, rows):
        if more.outputs(sizes, kernel[:2]) == outputs:
            return more
    return rows if kernel[0] > 1 else columns if kernel[1] > 1 else window


def _no_more_outputs_than_inputs(x: Array, kernel: Sequence[int], window: Placement) -> tuple[Array, Placement]:
    """Pad `x` so far that outputs don't outnumber inputs, and return the window that is left, too."""
    now, later = [], []
    for (low, high), m, n in zip(window.padding, window.outputs(x.shape[2:], kernel), x.shape[2:], strict=True):
        missing = max(m - n, 0)
        at_low = min(max(low, 0), missing)
        now.append((at_low, missing - at_low))
        later.append((low - at_low, high - missing + at_low))
    return padded(x, now), replace(window, padding=tuple(later))


def _side_by_side(x: Array, weight: Array, window: Placement) -> Array:
    """Make channels of several outputs along the last dimension, with a kernel that reads what all of them read.

    Where x has many of the channels that the library wants, two of its columns are the channels of one as well: then
    two outputs are enough, and fewer of the kernel's entries are zeros.
    """
    c_out, c_in, height, width = weight.shape
    rows, columns = window.outputs(x.shape[2:], (height, width))
    in_pairs = 2 * c_in >= LIBRARY_CHANNELS and 2 * c_out < LIBRARY_CHANNELS
    together = 2 if in_pairs else next(b for b in (8, 4, 2, 1) if b == 1 or b * c_out <= SIDE_BY_SIDE)
    missing = -columns % together
    if c_in > 2:  # the library is fast with multiples of four
        x = jnp.pad(x, ((0, 0), (0, -c_in % 4), (0, 0), (0, 0)))
        weight = jnp.pad(weight, ((0, 0), (0, -c_in % 4), (0, 0), (0, 0)))
    reach = width + together - 1 + (in_pairs and width % 2 == 0)
    weight = jnp.transpose(weight, (2, 3, 1, 0))
    shifted = [jnp.pad(weight, ((0, 0), (i, reach - width - i), (0, 0), (0, 0))) for i in range(together)]
    weight = jnp.concatenate(shifted, axis=3)
    stride, (along_rows, (low, high)) = window.stride[0], window.padding
    if in_pairs:
        x = padded(x, [(0, 0), (low, columns + missing - together + reach - x.shape[3] - low)])
        x = row_major(jnp.moveaxis(x, 1, 3))
        x = x.reshape(*x.shape[:2], x.shape[2] // 2, -1)
        weight = weight.reshape(height, reach // 2, x.shape[3], -1)
        window = replace(window, stride=(stride, 1), padding=(along_rows, (0, 0)))
    else:
        x = row_major(jnp.moveaxis(x, 1, 3))
        window = replace(window, stride=(stride, together), padding=(along_rows, (low, high + missing)))
    y = _channels_last(x, weight, _with_padding(x.shape[1:3], weight.shape, window))
    y = row_major(y.reshape(*y.shape[:2], y.shape[2] * together, c_out))
    return row_major(jnp.moveaxis(y, 3, 1))[:, :, :rows, :columns]


def _double(x: Array, weight: Array, window: Placement) -> Array:
    channels = weight.shape[0]
    if WORTH_PADDING <= channels < LIBRARY_CHANNELS and set(window.stride) == {1}:
        weight = jnp.pad(weight, ((0, LIBRARY_CHANNELS - channels), *((0, 0),) * (weight.ndim - 1)))
    return lax.slice_in_dim(_plain(x, weight, window), 0, channels, axis=1)


def _double_of_weight(x: Array, dy: Array, kernel: Sequence[int], window: Placement, padding: Pairs) -> Array:
    """Return the gradient of the weight in float64, where the fast library pays also for channels that are added."""
    c_in, c_out = x.shape[1], dy.shape[1]
    if c_out < LIBRARY_CHANNELS <= x.shape[0]:
        return _of_weight(x, dy, window, padding)
    x = padded(x, padding)
    if set(window.stride) == {1} and 2 * c_out < LIBRARY_CHANNELS <= c_in:
        return _of_weight_by_dy(x, dy, kernel, window)
    if c_out < WORTH_PADDING:
        return _of_weight(x, dy, window)
    dy = jnp.pad(dy, ((0, 0), (0, max(LIBRARY_CHANNELS - c_out, 0)), (0, 0), (0, 0)))
    return _in_pieces(x, dy, kernel, window)[:c_out]


def _of_weight(x: Array, dy: Array, window: Placement, padding: Pairs = ((0, 0), (0, 0))) -> Array:
    """Return the gradient of the weight: the convolution of x, whose channels are a batch, with dy."""
    simple = not any(map(any, padding)) and window.stride == (1, 1) and window.dilation[1] == 1
    if simple and x.dtype == jnp.float32 and 2 * max(x.shape[1], dy.shape[1]) < LIBRARY_CHANNELS:
        return _of_weight_in_pairs(x, dy, window.dilation[0])
    x, dy = row_major(jnp.transpose(x, (1, 2, 3, 0))), row_major(jnp.transpose(dy, (2, 3, 0, 1)))
    return jnp.transpose(_channels_last(x, dy, Placement(window.dilation, padding, window.stride)), (3, 0, 1, 2))


def _of_weight_in_pairs(x: Array, dy: Array, dilation: int) -> Array:
    """Compute `_of_weight` for few channels: the columns of x and dy go in pairs, and a pair has the channels of both.

    The older library multiplies matrices then that are twice as wide, a third of whose products is not needed.
    """
    width = x.shape[3] - dy.shape[3] + 1
    pairs, taps = (dy.shape[3] + 1) // 2, width // 2 + 1

    def paired(a: Array, pairs: int, order: tuple[int, ...]) -> Array:
        a = padded(a, [(0, 0), (0, 2 * pairs - a.shape[3])])
        return row_major(jnp.transpose(a.reshape(*a.shape[:3], pairs, 2), order))

    images, kernel = paired(x, pairs + taps - 1, (4, 1, 2, 3, 0)), paired(dy, pairs, (2, 3, 0, 4, 1))
    gradient = _channels_last(
        images.reshape(-1, *images.shape[2:]),
        kernel.reshape(*kernel.shape[:3], -1),
        Placement((dilation, 1), ((0, 0), (0, 0)), (1, 1)),
    )
    gradient = gradient.reshape(2, x.shape[1], -1, taps, 2, dy.shape[1])
    # Column i of a pair of dy meets, at tap j of the kernel, the column i + j of x from where the pair stands.
    along = [sum(gradient[(i + j) % 2, :, :, (i + j) // 2, i] for i in range(2)) for j in range(width)]
    return jnp.transpose(jnp.stack(along), (3, 1, 2, 0))


def _of_weight_by_dy(x: Array, dy: Array, kernel: Sequence[int], window: Placement) -> Array:
    """Compute `_of_weight` as the convolution of dy with x, which finds the taps in reverse; stride 1."""
    dy = padded(dy, [(reach, reach) for reach in window.reach(kernel)])
    return jnp.swapaxes(jnp.flip(_of_weight(dy, x, window), (2, 3)), 0, 1)


def _stacked(x: Array, dy: Array) -> tuple[Array, Array]:
    """Put samples above each other, in at most eight stacks, with rows of zeros between dy's; stride 1.

    The samples are the channels of these convolutions' inputs, and of so many the older library would not take them.
    """
    samples, stacks = x.shape[0], max(n for n in range(1, 9) if x.shape[0] % n == 0)
    rows, between = x.shape[2], x.shape[2] - dy.shape[2]

    def stack(a: Array) -> Array:
        a = jnp.swapaxes(a.reshape(stacks, samples // stacks, *a.shape[1:]), 1, 2)
        return a.reshape(stacks, a.shape[1], -1, a.shape[4])

    return stack(x), stack(padded(dy, [(0, between), (0, 0)]))[:, :, : samples // stacks * rows - between]


def _in_pieces(x: Array, dy: Array, kernel: Sequence[int], window: Placement) -> Array:
    """Sum `_of_weight` over pieces of dy: some samples, or some rows of one, and what they read of x."""
    (samples, _, rows, columns), stride = dy.shape, window.stride[0]
    sample = dy.nbytes // samples
    together = max(n for n in range(1, samples + 1) if samples % n == 0 and (n == 1 or n * sample <= PIECE // 4))
    height = -(-rows // min(rows, -(-sample // PIECE)))
    parts = -(-rows // height)
    if parts * samples == together:
        return _of_weight(x, dy, window)
    missing = parts * height - rows
    dy, x = padded(dy, [(0, missing), (0, 0)]), padded(x, [(0, stride * missing), (0, 0)])
    read = stride * (height - 1) + window.reach(kernel)[0] + 1

    def add(total: Array, piece: Array) -> tuple[Array, None]:
        first, row = together * (piece // parts), height * (piece % parts)
        piece_x = lax.dynamic_slice(x, (first, 0, stride * row, 0), (together, x.shape[1], read, x.shape[3]))
        piece_dy = lax.dynamic_slice(dy, (first, 0, row, 0), (together, dy.shape[1], height, columns))
        return total + _of_weight(piece_x, piece_dy, window), None

    zeros = jnp.zeros((dy.shape[1], x.shape[1], *kernel), x.dtype)
    return lax.scan(add, zeros, jnp.arange(samples // together * parts))[0]
