"""dj.jit takes every dtype of the contract through every layer: what is compared is what travels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.settings import long_run

import distdl_jax as dj
from distdl_jax import nn

pytestmark = pytest.mark.simulated(4)

FLOATING = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


def layers(P: dj.Partition) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Layers whose input and output are on different workers, and the shape of the block of each worker of P_x."""
    return {
        "linear, as in README": (
            nn.DistributedLinear(P.grid([1, 2]), P.grid([1, 2], [2, 3]), P.grid([2, 2]), 6, 4),
            (3, 3),
        ),
        "linear on other workers": (
            nn.DistributedLinear(P.grid([1, 1], [3]), P.grid([1, 2]), P.grid([2, 1]), 6, 4),
            (3, 6),
        ),
        "channels": (
            nn.DistributedConv1d(
                P.grid([1, 2, 1]),
                P.grid([1, 2, 1], [2, 3]),
                P.grid([2, 2, 1]),
                in_channels=4,
                out_channels=4,
                kernel_size=3,
            ),
            (2, 2, 6),
        ),
        "features": (nn.DistributedConv1d(P.grid([1, 1, 4]), in_channels=2, out_channels=2, kernel_size=3), (2, 2, 3)),
        "max pool": (nn.DistributedMaxPool1d(P.grid([1, 1, 4]), 2, stride=1), (2, 2, 3)),
        "average pool": (nn.DistributedAvgPool1d(P.grid([1, 1, 4]), 2, stride=1), (2, 2, 3)),
    }


@pytest.mark.parametrize("dtype", FLOATING)
def test_layers_of_every_dtype(dtype: str) -> None:
    """Forward and gradient, jitted and compared, are what they are under jax.jit, on every worker. In a short run each
    dtype takes every other layer."""
    found = {
        name: (layer, shape)
        for turn, (name, (layer, shape)) in enumerate(layers(dj.Partition()).items(), FLOATING.index(dtype))
        if (long_run() or turn % 2 == 0)
        and not ("pool" in name and dtype.startswith("complex"))  # there is no largest complex number
    }
    params = {name: layer.init(jax.random.key(0), dtype) for name, (layer, _) in found.items()}
    xs = {
        name: np.ones(shape, jnp.dtype(dtype)) if layer.P_x.active else dj.zero_volume_tensor(shape[0], dtype)
        for name, (layer, shape) in found.items()
    }

    def loss(params: Any, xs: Any) -> Any:
        ys = [layer(params[name], xs[name]) for name, (layer, _) in found.items()]
        return sum(jnp.sum(jnp.abs(y).astype(float)) for y in ys)

    step = dj.value_and_grad(loss)
    got, want = dj.jit(step)(params, xs), jax.jit(step)(params, xs)
    for name in found:
        for a, b in zip(jax.tree.leaves(got[1][name]), jax.tree.leaves(want[1][name]), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)
            assert a.dtype == jnp.dtype(dtype), name
    assert got[0] == want[0]
