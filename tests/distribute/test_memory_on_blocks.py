"""Memory of a training step, by XLA: that of the network built of layers by hand, and a share of one process's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import distdl_jax as dj
from distdl_jax import TensorSpec, nn

SIZE, CHANNELS = 16, 8


def layers(spec: TensorSpec) -> Any:
    """Return a small U-Net: a level, a pooling, a level below, a transposed convolution, and the skip."""
    P = spec.partition

    def level(before: int, after: int) -> list[Any]:
        return [
            nn.DistributedConv3d(P, in_channels=before, out_channels=after, kernel_size=3, padding=1),
            nn.DistributedGroupNorm(P, num_channels=after, num_groups=4),
            jax.nn.relu,
        ]

    up = nn.DistributedConvTranspose3d(P, in_channels=2 * CHANNELS, out_channels=CHANNELS, kernel_size=2, stride=2)
    inside = nn.Sequential(nn.DistributedMaxPool3d(P, 2), *level(CHANNELS, 2 * CHANNELS), up)
    last = nn.DistributedConv3d(P, in_channels=CHANNELS, out_channels=1, kernel_size=1)
    return nn.Sequential(*level(1, CHANNELS), nn.Skip(inside), *level(2 * CHANNELS, CHANNELS), last, x_spec=spec)


def conv(params: Any, x: Any) -> Any:
    y = lax.conv_general_dilated(x, params["weight"], (1, 1, 1), "SAME")
    return y + params["bias"][:, None, None, None]


def level(conv_params: Any, norm: Any, x: Any) -> Any:
    x = conv(conv_params, x)
    y = x.reshape(len(x), 4, -1, *x.shape[2:])
    mean = jnp.mean(y, (2, 3, 4, 5), keepdims=True)
    variance = jnp.mean(y * y, (2, 3, 4, 5), keepdims=True) - mean**2
    y = ((y - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return jax.nn.relu(y * norm["weight"][:, None, None, None] + norm["bias"][:, None, None, None])


def plain(params: Any, x: Any) -> Any:
    """Return the same network's result, in plain JAX, with the same parameters."""
    skip = level(params[0], params[1], x)
    below = params[3]["body"]
    y = lax.reduce_window(skip, -jnp.inf, lax.max, (1, 1, 2, 2, 2), (1, 1, 2, 2, 2), "VALID")
    y = level(below[1], below[2], y)
    w = jnp.flip(below[4]["weight"], (2, 3, 4)).swapaxes(0, 1)
    y = lax.conv_general_dilated(y, w, (1, 1, 1), ((1, 1),) * 3, lhs_dilation=(2, 2, 2))
    y = y + below[4]["bias"][:, None, None, None]
    return conv(params[7], level(params[4], params[5], jnp.concatenate([skip, y], 1)))


def temporary(f: Any, *args: Any) -> int:
    return int(jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes)


def test_a_u_net_takes_no_more_memory_than_by_hand() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((plain(params, x) - x) ** 2)

    def program() -> list[int]:
        P = dj.Partition()
        spec = TensorSpec((1, 1, SIZE, SIZE, SIZE), P.grid([1, 1, 2, 1, 1]))
        network, mse = layers(spec), nn.DistributedMSELoss(spec.partition)
        own = network.init(jax.random.key(0), dtype=jnp.float32)
        # Its parameters are copies, so that those of worker 0 serve the plain function.
        params = P.broadcast_data(jax.tree.map(np.asarray, own) if P.rank == 0 else None)
        x = dj.random.normal(jax.random.key(1), spec, jnp.float32)
        inside = dj.distribute(jax.value_and_grad(loss), (None, spec))
        outside = dj.value_and_grad(dj.distribute(loss, (dj.VARIABLE, spec), dj.PARTS))
        by_hand = dj.value_and_grad(lambda params, x: mse(network(params, x), x))
        expected = jax.jit(by_hand)(own, x)[0]
        for f in (inside, outside):
            np.testing.assert_allclose(jax.jit(f)(params, x)[0], expected, rtol=1e-5)
        return [temporary(by_hand, own, x), temporary(inside, params, x), temporary(outside, params, x)]

    for by_hand, inside, outside in dj.simulate(2, program):
        assert max(inside, outside) <= 1.05 * by_hand, (by_hand, inside, outside)


def test_attention_takes_its_share_of_memory() -> None:
    """Eight layers on four workers: the scores in blocks of rows, and no keys of the whole sequence for later."""
    x = np.random.default_rng(0).normal(size=(2, 64, 16)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(8, 16, 16)).astype(np.float32) / 4

    def loss(w: Any, x: Any) -> Any:
        for each in w:
            q = (x @ each).reshape(2, 64, 2, 8)
            weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, q) / 8**0.5, -1)
            x = x + jnp.einsum("bhst,bthd->bshd", weights, q).reshape(x.shape)
        return jnp.mean(x**2)

    alone = temporary(jax.value_and_grad(loss), w, x)

    def program() -> int:
        spec = TensorSpec(x.shape, dj.Partition().grid([1, 4, 1]))
        f = dj.distribute(jax.value_and_grad(loss), (None, spec), gather=1024)
        return temporary(f, w, spec.block(x))

    assert max(dj.simulate(4, program)) <= 1.15 * alone / 4, alone
