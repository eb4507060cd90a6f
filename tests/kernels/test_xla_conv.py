"""XLA's convolution as the library calls it, forward and gradients, is that of numpy, whatever the padding.

Integers in float32: every comparison is exact. Left to itself XLA reads beyond the array in some of these.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import direct

from distdl_jax.kernels.problem import conv

# Taps, padding, stride, dilation of the kernel and of x. The first seven XLA gets wrong, or did.
KNOWN = [
    (2, (-2, 1), 1, 1, 1),
    (2, (-2, 2), 1, 1, 1),
    (2, (-1, 1), 1, 1, 1),
    (3, (-2, 2), 1, 1, 1),
    (4, (-2, 1), 1, 1, 1),
    (4, (-2, 2), 1, 1, 1),
    (4, (-1, 1), 1, 1, 1),
    (2, (2, 0), 1, 1, 1),  # as are its input's gradient,
    (3, (4, 1), 1, 1, 1),
    (1, (3, 2), 2, 1, 1),
    (2, (5, 1), 2, 2, 1),
    (2, (2, 2), 1, 1, 3),  # and these with a stride on the way back
    (1, (1, 3), 1, 1, 2),
    (3, (-1, 2), 2, 1, 2),
]
RANGES = [1, -3, -1, 1, 1, 1], [5, 6, 4, 3, 3, 4]
DRAWN = [
    (taps, (low, high), stride, dilation, spread)
    for taps, low, high, stride, dilation, spread in np.random.default_rng(5).integers(*RANGES, (24, 6)).tolist()
    if 8 * spread + 1 + low + high > dilation * (taps - 1)
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("taps", "padding", "stride", "dilation", "spread"), KNOWN + DRAWN)
def test_conv(taps, padding, stride, dilation, spread, channels_last):
    rng = np.random.default_rng(taps)
    x = rng.integers(-4, 5, (2, 4, 9)).astype(np.float32)
    kernel = rng.integers(-4, 5, (3, 4, taps)).astype(np.float32)
    (low, high), length = padding, 8 * spread + 1
    spread_x = np.zeros((2, 4, length), np.float32)
    spread_x[..., ::spread] = x
    around = np.zeros((2, 4, length + low + high), np.float32)
    inside = slice(max(0, -low), length + min(0, high))
    around[..., max(0, low) : length + low + min(0, high)] = spread_x[..., inside]
    y = direct.convolve(around, kernel, (stride,), (dilation,), 1)
    dy = rng.integers(-4, 5, y.shape).astype(np.float32)
    d_around, d_kernel = direct.convolve_adjoint(dy, around, kernel, (stride,), (dilation,), 1)
    d_spread = np.zeros_like(spread_x)
    d_spread[..., inside] = d_around[..., max(0, low) : length + low + min(0, high)]

    @jax.jit
    def ours(x, kernel, dy):
        def forward(x, kernel):
            if channels_last:
                x, kernel = jnp.moveaxis(x, 1, 2), jnp.transpose(kernel, (2, 1, 0))
            how = {"x_dilation": (spread,), "dilation": (dilation,), "channels_last": channels_last}
            y = conv(x, kernel, (stride,), (padding,), **how)
            return jnp.moveaxis(y, 2, 1) if channels_last else y

        y, pullback = jax.vjp(forward, x, kernel)
        return y, *pullback(dy)

    for got, wanted in zip(ours(x, kernel, dy), (y, d_spread[..., ::spread], d_kernel), strict=True):
        np.testing.assert_array_equal(got, wanted)
