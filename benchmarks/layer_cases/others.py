"""Layers that work in frequencies, and layers around layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn

from layer_cases import Case, Tensor, along_channels, on, without_params
from layer_cases.convolutions import conv, pool
from layer_cases.dense import linear, normalised

SPECTRAL = {
    1: ((16, 32, 8192), 64),
    2: ((8, 32, 64, 64), 12),
    3: ((2, 16, 32, 32, 32), 6),
    4: ((1, 8, 16, 16, 16, 16), 4),
}


def spectral(p: Any, x: Any) -> Any:
    """Compute in plain JAX: the lowest frequencies, each times a matrix."""
    axes = tuple(range(2, x.ndim))
    modes = p["weight"].shape[-2]
    spectrum = jnp.fft.rfftn(x, axes=axes)
    places = [jnp.r_[0:modes, n - modes : n] for n in x.shape[2:-1]]
    low = jnp.ix_(jnp.arange(len(x)), jnp.arange(x.shape[1]), *places, jnp.arange(modes))
    product = jnp.einsum("bi...,io...->bo...", spectrum[low], p["weight"][..., 0] + 1j * p["weight"][..., 1])
    return jnp.fft.irfftn(jnp.zeros_like(spectrum).at[low].set(product), x.shape[2:], axes)


def fno_block(p: Any, x: Any) -> Any:
    """Compute the block in plain JAX."""
    weight = p["pointwise"]["weight"]
    y = jnp.einsum("bi...,oi->bo...", x, weight.reshape(weight.shape[:2]))
    return jax.nn.gelu(spectral(p["spectral"], x) + y + along_channels(p["pointwise"]["bias"], x.ndim - 2))


def by_rows(p: Any, x: Any) -> Any:
    """Compute a linear layer with weight normalisation in plain JAX."""
    v = p["weight_v"]
    scale = p["weight_g"] / jnp.linalg.norm(v, axis=1)
    return linear({"weight": v * scale[:, None], "bias": p["bias"]}, x)


def by_sigma(p: Any, x: Any) -> Any:
    """Compute a linear layer with spectral normalisation in plain JAX, from the first vectors."""
    w, fixed = p["weight"], jax.lax.stop_gradient(p["weight"])
    u = jnp.asarray(np.random.default_rng(0).standard_normal(len(w)), w.dtype)
    v = fixed.T @ (u / jnp.linalg.norm(u))
    v = v / jnp.linalg.norm(v)
    u = fixed @ v
    return linear({"weight": w / ((u / jnp.linalg.norm(u)) @ w @ v), "bias": p["bias"]}, x)


def cases(n: int) -> Iterator[Case]:
    """Yield cases on n workers."""
    cube = Tensor((128, 128, 128), (n, 1, 1))
    yield Case("functional.fftn, of 128^3, complex", [cube],
               lambda: lambda x: dj.functional.fftn(x + 0j, on(n, 1, 1)), lambda p, x: jnp.fft.fftn(x + 0j),
               without_params)  # fmt: skip
    yield Case("functional.rfftn, of 128^3", [cube], lambda: lambda x: dj.functional.rfftn(x, on(n, 1, 1)),
               lambda p, x: jnp.fft.rfftn(x), without_params)  # fmt: skip
    for dims, (shape, modes) in SPECTRAL.items():
        rows = (1, 1, n, *(1,) * (dims - 1))
        layer = getattr(nn, f"DistributedSpectralConv{dims}d")
        yield Case(f"DistributedSpectralConv{dims}d, rows split", [Tensor(shape, rows)],
                   lambda layer=layer, rows=rows, c=shape[1], modes=modes: layer(on(*rows), c, c, modes),
                   spectral)  # fmt: skip
    (shape, modes), rows = SPECTRAL[2], (1, 1, n, 1)
    x, c = Tensor(shape, rows), shape[1]
    yield Case("DistributedFNOBlock, rows split", [x], lambda: nn.DistributedFNOBlock(on(*rows), c, c, modes),
               fno_block)  # fmt: skip

    def convolution() -> Any:
        return nn.DistributedConv2d(on(*rows), in_channels=c, out_channels=c, kernel_size=3, padding=1)

    plain, pooled = conv(2), pool(jax.lax.max, -jnp.inf)

    def two(p: Any, x: Any) -> Any:
        return jax.nn.relu(plain(p[2], jax.nn.relu(plain(p[0], x))))

    def chain() -> Any:
        return nn.Sequential(convolution(), jax.nn.relu, convolution(), jax.nn.relu)

    yield Case("Sequential, convolution and pool, rows split", [x],
               lambda: nn.Sequential(convolution(), jax.nn.relu, nn.DistributedMaxPool2d(on(*rows), 2)),
               lambda p, x: pooled({}, jax.nn.relu(plain(p[0], x))))  # fmt: skip
    yield Case("Remat, of two convolutions, rows split", [x], lambda: nn.Remat(chain()), jax.checkpoint(two))
    yield Case("Residual, of two convolutions, rows split", [x], lambda: nn.Residual(chain()),
               lambda p, x: x + two(p["body"], x))  # fmt: skip
    yield Case("Skip, of two convolutions, rows split", [x], lambda: nn.Skip(chain()),
               lambda p, x: jnp.concatenate([x, two(p["body"], x)], 1))  # fmt: skip

    def columns() -> Any:
        return nn.DistributedLinear(on(1, n), on(1, 1), on(1, n), 1024, 1024)

    long = Tensor((512, 1024), (1, n))
    yield Case("WeightNorm, linear, columns split", [long], lambda: nn.WeightNorm(columns()), by_rows)
    yield Case("SpectralNorm, linear, columns split", [long], lambda: nn.SpectralNorm(columns()), by_sigma)

    def rounded(p: Any, x: Any) -> Any:
        return linear(jax.tree.map(lambda a: a.astype(jnp.bfloat16), p), x.astype(jnp.bfloat16)).astype(x.dtype)

    yield Case("Precision, linear in bfloat16, batch split", [Tensor((512, 1024), (n, 1))],
               lambda: nn.Precision(nn.DistributedLinear(on(n, 1), on(n, 1), on(n, 1, 1), 1024, 1024)), rounded,
               tolerance=0.02)  # fmt: skip

    def stage(worker: int) -> Any:
        P = dj.Partition().grid([1, 1], [worker])
        return nn.Sequential(nn.DistributedLinear(P, in_features=1024, out_features=1024), jnp.tanh)

    def stages(p: Any, x: Any) -> Any:
        for each, _ in p:
            x = jnp.tanh(linear(each, x))
        return x

    yield Case("Pipeline, a linear layer on each worker", [Tensor((2048, 1024), (1, 1))],
               lambda: nn.Pipeline([stage(worker) for worker in range(n)], 8), stages)  # fmt: skip
    yield from graph_cases(n)


def graph_cases(n: int) -> Iterator[Case]:
    """Yield the message-passing block, on a ring of nodes with edges to the next and the one after it."""
    nodes, features = 4096, 64
    senders = np.repeat(np.arange(nodes), 2)
    receivers = (senders + np.tile([1, 2], nodes)) % nodes

    def mlp(p: Any, x: Any) -> Any:
        for each in p[:-2:2]:
            x = jax.nn.relu(linear(each, x))
        return normalised(linear(p[-2], x), (-1,)) * p[-1]["weight"] + p[-1]["bias"]

    def block(p: Any, v: Any, e: Any) -> Any:
        e = mlp(p["edge"], jnp.concatenate([e, v[senders], v[receivers]], 1))
        return v + mlp(p["node"], jnp.concatenate([v, jax.ops.segment_sum(e, receivers, nodes)], 1))

    yield Case("DistributedGraphNetBlock, nodes split", [Tensor((m, features), (n, 1)) for m in (nodes, len(senders))],
               lambda: nn.DistributedGraphNetBlock(on(n, 1), features, senders, receivers, nodes), block,
               lambda layer, params, v, e: layer(params, v, e)[0])  # fmt: skip

    def neighbours(p: Any, v: Any) -> Any:
        summed = jax.ops.segment_sum(v[senders], receivers, nodes)
        return summed @ p["weight"].T + p["bias"] + v @ p["root"].T

    yield Case("DistributedGraphConv, nodes split", [Tensor((nodes, features), (n, 1))],
               lambda: nn.DistributedGraphConv(on(n, 1), features, features, senders, receivers, nodes),
               neighbours)  # fmt: skip
