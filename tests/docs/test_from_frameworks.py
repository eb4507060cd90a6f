"""What the page on Flax, Equinox and Haiku says of their defaults, beside this library's."""

import inspect
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distdl_jax as dj
from distdl_jax import nn

RNGS = nnx.Rngs(0)


def default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def test_defaults_of_flax_and_of_the_layers() -> None:
    flax = [default(cls.__init__, "epsilon") for cls in (nnx.LayerNorm, nnx.GroupNorm, nnx.RMSNorm)]
    assert flax == [1e-6, 1e-6, 1e-6] and default(nnx.BatchNorm.__init__, "momentum") == 0.99
    layers = nn.DistributedLayerNorm, nn.DistributedGroupNorm, nn.DistributedRMSNorm
    assert [default(cls, "eps") for cls in layers] == [1e-5, 1e-5, 1e-6]
    assert default(nn.DistributedBatchNorm, "momentum") == 0.1
    assert default(nnx.Conv.__init__, "padding") == "SAME"


def test_defaults_of_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    assert {default(cls.__init__, "eps") for cls in (eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)} == {1e-5}
    assert default(eqx.nn.BatchNorm.__init__, "momentum") == 0.99
    assert [*inspect.signature(eqx.nn.GroupNorm.__init__).parameters][1:3] == ["groups", "channels"]


def test_defaults_of_haiku() -> None:
    hk = pytest.importorskip("haiku")
    assert {default(cls.__init__, "eps") for cls in (hk.LayerNorm, hk.GroupNorm, hk.RMSNorm)} == {1e-5}
    assert default(hk.Conv2D.__init__, "padding") == "SAME"


def test_initial_kernels() -> None:
    """Of 64 channels and 3 x 3 taps: normal in Flax, uniform with PyTorch's bound in the layers."""
    conv = nnx.Conv(64, 64, (3, 3), rngs=RNGS)
    scale = 1 / math.sqrt(9 * 64)
    assert np.std(conv.kernel[...]) == pytest.approx(scale, rel=0.02) and not np.any(conv.bias[...])
    P = dj.planning_world(1).grid([1, 1, 1, 1])
    params = nn.DistributedConv2d(P, in_channels=64, out_channels=64, kernel_size=3).init(jax.random.key(0))
    for name in ("weight", "bias"):
        assert 0.9 * scale < np.abs(params[name]).max() <= scale


def test_same_pads_by_the_size() -> None:
    assert [jax.lax.padtype_to_pads((n,), (3,), (2,), "SAME") for n in (8, 9)] == [[(0, 1)], [(1, 1)]]


@pytest.mark.parametrize("m", [3, 5, 10])
def test_nearest_is_of_the_middle(m: int) -> None:
    """JAX's is "nearest-exact" of the layers; their "nearest" is PyTorch's."""
    x = jnp.arange(7.0).reshape(1, 1, 7)
    places = np.arange(m)

    def resized(mode: str) -> jax.Array:
        return nn.DistributedUpsample(dj.Partition().grid([1, 1, 1]), size=(m,), mode=mode)(x)[0, 0]

    for mode, expected in (("nearest-exact", (places + 0.5) * 7 // m), ("nearest", places * 7 // m)):
        np.testing.assert_array_equal(dj.simulate(1, resized, mode)[0], expected)
    np.testing.assert_array_equal(jax.image.resize(x, (1, 1, m), "nearest")[0, 0], (places + 0.5) * 7 // m)


def test_true_in_a_mask_is_seen_but_in_attn_mask() -> None:
    seen = jnp.tril(jnp.ones((5, 5), bool))

    def attended(**masks: jax.Array) -> jax.Array:
        layer = nn.DistributedMultiHeadAttention(dj.Partition().grid([1, 1, 1]), 4, 2)
        x = jax.random.normal(jax.random.key(1), (2, 5, 4))
        return layer(layer.init(jax.random.key(0)), x, **masks)

    (of_mask,), (of_attn_mask,), (of_others,) = (
        dj.simulate(1, partial(attended, **masks)) for masks in ({"mask": seen}, {"attn_mask": ~seen}, {"mask": ~seen})
    )
    np.testing.assert_allclose(of_mask, of_attn_mask, rtol=1e-6)
    assert not np.allclose(of_mask, of_others)


def test_statistics_of_a_batch_norm_are_returned() -> None:
    """Split outside, merged inside: they are those of one process, whatever the blocks."""
    model = nnx.BatchNorm(3, rngs=RNGS)
    graph, before = nnx.split(model)
    x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)

    def f(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model)

    def program() -> Any:
        spec = dj.TensorSpec(x.shape, dj.Partition().grid([3, 1]))
        return dj.distribute(f, (None, spec), (spec, None))(before, spec.block(x))[1]

    expected = jax.jit(f)(before, x)[1]
    for found in dj.simulate(3, program):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
