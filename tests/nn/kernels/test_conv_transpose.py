"""A transposed convolution on one worker is the adjoint of the convolution, whatever stride and kernel are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import nn

# features, channels in and out, kernel, stride, padding, output padding, dilation, groups
CASES: dict[str, tuple[Any, ...]] = {
    "a kernel as long as the stride": ((4, 5), 4, 6, (2, 2), (2, 2), (0, 0), (0, 0), (1, 1), 1),
    "a shorter kernel, padding": ((3, 4), 2, 2, (2, 1), (3, 4), (1, 0), (2, 0), (1, 1), 1),
    "a longer one": ((5, 3), 4, 2, (3, 5), (2, 3), (1, 4), (1, 2), (1, 1), 1),
    "groups": ((6,), 4, 6, (4,), (3,), (2,), (1,), (1,), 2),
    "dilation where there is no stride": ((4, 6), 2, 2, (2, 3), (3, 1), (0, 3), (0, 1), (1, 2), 1),
    "dilation and stride": ((4,), 2, 2, (3,), (2,), (1,), (1,), (3,), 1),
    "4-D, dilation and stride": (
        (2, 1, 3, 2),
        2,
        4,
        (2, 1, 2, 3),
        (3, 1, 2, 1),
        (1, 0, 0, 2),
        (2, 0, 0, 1),
        (2, 1, 1, 2),
        2,
    ),
    "3-D": ((2, 3, 4), 2, 2, (3, 2, 2), (2, 1, 3), (1, 0, 1), (1, 0, 0), (1, 1, 1), 1),
    "one input, all padding but for a row": ((1,), 2, 2, (5,), (4,), (2,), (0,), (1,), 1),
}


def layer(name: str) -> nn.Layer:
    features, c_in, c_out, kernel, stride, padding, extra, dilation, groups = CASES[name]
    P = dj.Partition().grid([1] * (len(features) + 2), [0])
    of = getattr(nn, f"DistributedConvTranspose{len(features)}d")
    shapes = {"in_channels": c_in, "out_channels": c_out, "kernel_size": kernel, "stride": stride, "padding": padding}
    return of(P, **shapes, output_padding=extra, dilation=dilation, groups=groups, bias=False)


def adjoint(name: str, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Of the convolution, which may end before the outputs do."""
    _, _, c_out, kernel, stride, padding, extra, dilation, groups = CASES[name]
    along = zip(x.shape[2:], kernel, stride, padding, extra, dilation, strict=True)
    sizes = [(n - 1) * s - 2 * low + d * (k - 1) + more + 1 for n, k, s, low, more, d in along]

    def convolution(y: jax.Array) -> jax.Array:
        pads = [(low, low) for low in padding]
        out = lax.conv_general_dilated(
            y, params["weight"], stride, pads, rhs_dilation=dilation, feature_group_count=groups
        )
        return out[tuple(map(slice, x.shape))]

    return jax.vjp(convolution, jnp.zeros((len(x), c_out, *sizes), x.dtype))[1](x)[0]


@pytest.mark.simulated(1)
def test_it_is_the_adjoint() -> None:
    """Forward and both gradients, of all cases in one program."""
    layers = {name: layer(name) for name in CASES}
    params = {name: layers[name].init(jax.random.key(0), "float64") for name in CASES}
    xs = {name: jax.random.normal(jax.random.key(1), (2, CASES[name][1], *CASES[name][0]), "float64") for name in CASES}

    @jax.jit
    def run(params: Any, xs: Any) -> Any:
        found = {}
        for name in CASES:
            y, pullback = jax.vjp(layers[name], params[name], xs[name])
            want, want_pullback = jax.vjp(lambda params, x, name=name: adjoint(name, params, x), params[name], xs[name])
            dy = jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            found[name] = (y, *pullback(dy)), (want, *want_pullback(dy))
        return found

    for name, (got, want) in jax.device_get(run(params, xs)).items():
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=name)
