"""Layers that change shapes, and those that drop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn

from layer_cases import Case, Tensor, Torch, on, without_params

KEY = 7


def resized(method: str) -> Callable[[Any, Any], Any]:
    """Resize in plain JAX, to twice the rows and columns."""
    return lambda p, x: jax.image.resize(x, (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), method)


def with_corners(p: Any, x: Any) -> Any:
    """Resize in plain JAX to twice the rows and columns, with the corners where x's are."""
    for d in (2, 3):
        n = x.shape[d]
        place = np.arange(2 * n) * (n - 1) / (2 * n - 1)
        low = np.minimum(place.astype(int), n - 2)
        part = (place - low).astype(np.float32).reshape(-1, *(1,) * (3 - d))
        x = jnp.take(x, low, d) * (1 - part) + jnp.take(x, low + 1, d) * part
    return x


def padded(mode: str) -> Callable[[Any, Any], Any]:
    """Pad in plain JAX, by 2 in rows and columns."""
    return lambda p, x: jnp.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)), mode)


def dropped(of: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Any, Any], Any]:
    """Drop in plain JAX, from the shape of the random numbers."""
    return lambda p, x: jnp.where(jax.random.bernoulli(jax.random.key(KEY), 0.5, of(x.shape)), x / 0.5, 0)


def with_a_key(layer: Any, params: Any, x: Any) -> Any:
    return layer(x, key=jax.random.key(KEY))


def cases(n: int) -> Iterator[Case]:
    """Yield cases on n workers."""
    rows = (1, 1, n, 1)
    small, large = Tensor((8, 32, 64, 64), rows), Tensor((8, 32, 128, 128), rows)
    for mode, corners, plain in (
        ("nearest", False, resized("nearest")),
        ("linear", False, resized("linear")),
        ("linear", True, with_corners),
    ):
        yield Case(f"DistributedUpsample, {mode}{', corners aligned' * corners}, rows split", [small],
                   lambda mode=mode, corners=corners: nn.DistributedUpsample(
                       on(*rows), scale_factor=2, mode=mode, align_corners=corners
                   ), plain, torch=Torch("Upsample", scale_factor=2, mode="bilinear" if mode == "linear" else mode,
                                         align_corners=corners if mode == "linear" else None))  # fmt: skip
    yield Case("DistributedAdaptiveAvgPool, to 8 x 8, rows split", [large],
               lambda: nn.DistributedAdaptiveAvgPool(on(*rows), 8),
               lambda p, x: x.reshape(8, 32, 8, 16, 8, 16).mean((3, 5)))  # fmt: skip
    yield Case("DistributedGlobalAvgPool, rows split", [large], lambda: nn.DistributedGlobalAvgPool(on(*rows)),
               lambda p, x: x.mean((2, 3), keepdims=True))  # fmt: skip
    yield Case("DistributedGlobalMaxPool, rows split", [large], lambda: nn.DistributedGlobalMaxPool(on(*rows)),
               lambda p, x: x.max((2, 3), keepdims=True))  # fmt: skip
    for mode, its in (("constant", "constant"), ("reflect", "reflect"), ("replicate", "edge"), ("circular", "wrap")):
        yield Case(f"DistributedPad, {mode}, rows split", [large],
                   lambda mode=mode: nn.DistributedPad(on(*rows), ((2, 2), (2, 2)), mode), padded(its))  # fmt: skip
    yield Case("DistributedCrop, rows split", [large], lambda: nn.DistributedCrop(on(*rows), ((2, 2), (2, 2))),
               lambda p, x: x[:, :, 2:-2, 2:-2])  # fmt: skip
    yield Case("Concatenate, along channels, rows split", [large, large], lambda: nn.Concatenate(on(*rows)),
               lambda p, a, b: jnp.concatenate([a, b], 1), without_params)  # fmt: skip
    yield Case("Concatenate, along rows, rows split", [large, large], lambda: nn.Concatenate(on(*rows), 2),
               lambda p, a, b: jnp.concatenate([a, b], 2), without_params)  # fmt: skip
    flat = (8, 32 * 128 * 128)
    yield Case("Flatten, rows to features split", [large], lambda: nn.Flatten(on(*rows), on(1, n)),
               lambda p, x: x.reshape(flat))  # fmt: skip
    yield Case("Unflatten, features to rows split", [Tensor(flat, (1, n))],
               lambda: nn.Unflatten(on(1, n), on(*rows), (32, 128, 128)),
               lambda p, x: x.reshape(large.shape))  # fmt: skip
    yield Case("Reshape, rows split to sequence split", [large],
               lambda: nn.Reshape(on(*rows), on(1, n, 1), (8, 4096, 128)),
               lambda p, x: x.reshape(8, 4096, 128))  # fmt: skip
    yield Case("Reshape, columns split to features split", [Tensor(large.shape, (1, 1, 1, n))],
               lambda: nn.Reshape(on(1, 1, 1, n), on(1, n), flat), lambda p, x: x.reshape(flat))  # fmt: skip
    yield Case("Dropout, rows split", [small], lambda: nn.Dropout(on(*rows)), dropped(lambda shape: shape),
               with_a_key)  # fmt: skip
    yield Case("Dropout, of channels, rows split", [large], lambda: nn.Dropout(on(*rows), channels=True),
               dropped(lambda shape: (*shape[:2], 1, 1)), with_a_key)  # fmt: skip
