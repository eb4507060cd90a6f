"""Linear layers, the embedding, and normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from distdl_jax import nn
from jax import lax

from layer_cases import Case, Tensor, Torch, along_channels, on


def linear(p: Any, x: Any) -> Any:
    """Compute the linear layer in plain JAX."""
    return x @ p["weight"].T + p["bias"]


def normalised(x: Any, axes: tuple[int, ...]) -> Any:
    """Normalise in plain JAX, with mean and variance over `axes`."""
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def by_channel(p: Any, y: Any) -> Any:
    """Times the weight, plus the bias."""
    return y * along_channels(p["weight"], y.ndim - 2) + along_channels(p["bias"], y.ndim - 2)


def rms(p: Any, x: Any) -> Any:
    """Normalise by the root mean square in plain JAX."""
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["weight"]


def squeezed(p: Any, x: Any) -> Any:
    """Scale each channel by what two linear layers make of the means."""
    scale = jax.nn.sigmoid(linear(p["fc2"], jax.nn.relu(linear(p["fc1"], x.mean((2, 3))))))
    return x * scale[:, :, None, None]


def evaluated(layer: Any, params: Any, x: Any) -> Any:
    """Normalise with running statistics: means of 0, variances of 1."""
    return layer(params, x, state=layer.init_state(), training=False)[0]


def in_groups(x: Any, groups: int) -> Any:
    """Normalised group by group."""
    return normalised(x.reshape(len(x), groups, -1), (2,)).reshape(x.shape)


def cases(n: int) -> Iterator[Case]:
    """Yield cases on n workers."""
    yield from linear_cases(n)
    rows, one = (1, 1, n, 1), (1, 1)
    x, features = Tensor((8, 32, 128, 128), rows), Tensor((512, 4096), (1, n))
    words, table = Tensor((16, 256), one, kind=16384), (16384, 256)

    def embedding(*grids: tuple[int, ...]) -> Any:
        return lambda: nn.DistributedEmbedding(*(on(*grid) for grid in grids), *table)

    def looked_up(p: Any, x: Any) -> Any:
        return p["weight"][x]

    yield Case("DistributedPointwise, rows split", [x], lambda: nn.DistributedPointwise(on(*rows), 32, 32),
               lambda p, x: jnp.einsum("nc...,oc->no...", x, p["weight"]) + along_channels(p["bias"], 2))  # fmt: skip
    yield Case("DistributedPReLU, rows split", [x], lambda: nn.DistributedPReLU(on(*rows), 32),
               lambda p, x: jnp.where(x > 0, x, along_channels(p["weight"], 2) * x),
               torch=Torch("PReLU", 32))  # fmt: skip
    yield Case("DistributedSqueezeExcitation, rows split", [x],
               lambda: nn.DistributedSqueezeExcitation(on(*rows), 32, 8), squeezed)  # fmt: skip
    yield Case("DistributedEmbedding, vocabulary split", [words], embedding(one, (1, 1, 1), (n, 1)), looked_up,
               torch=Torch("Embedding", table[0] // n, table[1], below=table[0] // n))  # fmt: skip
    yield Case("DistributedEmbedding, features split", [words], embedding(one, (1, 1, n), (1, n)), looked_up,
               torch=Torch("Embedding", table[0], table[1] // n))  # fmt: skip
    yield Case("DistributedEmbedding, vocabulary, and y's sequence split", [words],
               embedding(one, (1, n, 1), (n, 1)), looked_up)  # fmt: skip

    yield Case("DistributedBatchNorm, rows split", [x], lambda: nn.DistributedBatchNorm(on(*rows), 32),
               lambda p, x: by_channel(p, normalised(x, (0, 2, 3))), torch=Torch("BatchNorm2d", 32))  # fmt: skip
    yield Case("DistributedBatchNorm, rows split, in evaluation", [x], lambda: nn.DistributedBatchNorm(on(*rows), 32),
               lambda p, x: by_channel(p, x * lax.rsqrt(jnp.float32(1 + 1e-5))), evaluated)  # fmt: skip
    yield Case("DistributedGroupNorm, rows split", [x], lambda: nn.DistributedGroupNorm(on(*rows), 4, 32),
               lambda p, x: by_channel(p, in_groups(x, 4)), tolerance=1e-2)  # fmt: skip
    yield Case("DistributedInstanceNorm, rows split", [x],
               lambda: nn.DistributedInstanceNorm(on(*rows), 32, affine=True),
               lambda p, x: by_channel(p, normalised(x, (2, 3))))  # fmt: skip
    yield Case("DistributedLayerNorm, features split", [features], lambda: nn.DistributedLayerNorm(on(1, n), 4096),
               lambda p, x: normalised(x, (1,)) * p["weight"] + p["bias"],
               torch=Torch("LayerNorm", 4096 // n))  # fmt: skip
    yield Case("DistributedRMSNorm, features split", [features],
               lambda: nn.DistributedRMSNorm(on(1, n), 4096, eps=1e-6), rms)  # fmt: skip


def linear_cases(n: int) -> Iterator[Case]:
    """Yield a case for every way in which a linear layer is split."""
    matrix, sequence = (512, 1024), (4, 256, 512)

    def made(*grids: tuple[int, ...], shape: Any = matrix, **options: Any) -> Any:
        return lambda: nn.DistributedLinear(*(on(*grid) for grid in grids), shape[-1], shape[-1], **options)

    def case(what: str, x: Tensor, layer: Any, **options: Any) -> Case:
        return Case(f"DistributedLinear, {what}", [x], layer, linear, **options)

    yield case("inputs split", Tensor(matrix, (1, n)), made((1, n), (1, 1), (1, n)),
               torch=Torch("Linear", matrix[1] // n, matrix[1]))  # fmt: skip
    yield case("outputs split", Tensor(matrix, (1, 1)), made((1, 1), (1, n), (n, 1)),
               torch=Torch("Linear", matrix[1], matrix[1] // n))  # fmt: skip
    yield case("batch split", Tensor(matrix, (n, 1)), made((n, 1), (n, 1), (n, 1, 1)),
               torch=Torch("Linear", matrix[1], matrix[1]))  # fmt: skip
    column, row = (1, n, 1), (1, 1, n)
    yield case("outputs, and x's sequence split", Tensor(sequence, column), made(column, row, (n, 1), shape=sequence))
    yield case("inputs, and y's sequence split", Tensor(sequence, row), made(row, column, (1, n), shape=sequence))
    # Of copies the gradients are shares that add up, of which the sum of sizes says nothing.
    yield case("outputs split, x in copies", Tensor(sequence),
               made(column, row, (n, 1), shape=sequence, replicated=True), tolerance=None)  # fmt: skip
    yield case("inputs split, y in copies", Tensor(sequence, row),
               made(row, column, (1, n), shape=sequence, replicated=True), tolerance=None)  # fmt: skip
