"""Losses, and the accuracy: each worker's part, beside the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from distdl_jax import nn

from layer_cases import Case, Tensor, Torch, on, without_params


def mean_of(terms: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Compute the mean in plain JAX, from the losses of the elements."""
    return lambda p, x, t: jnp.mean(terms(x, t))


def huber(x: Any, t: Any) -> Any:
    far = jnp.abs(x - t)
    return jnp.where(far < 1, (x - t) ** 2 / 2, far - 0.5)


def bce(x: Any, t: Any) -> Any:
    return -(t * jnp.log(x) + (1 - t) * jnp.log1p(-x))


def bce_with_logits(x: Any, t: Any) -> Any:
    return jnp.maximum(x, 0) - x * t + jnp.log1p(jnp.exp(-jnp.abs(x)))


def cross_entropy(p: Any, x: Any, labels: Any) -> Any:
    at_label = jnp.take_along_axis(x, labels[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(x, 1) - at_label)


def smoothed(p: Any, x: Any, labels: Any) -> Any:
    at_label = jnp.take_along_axis(x, labels[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(x, 1) - 0.9 * at_label - 0.1 * x.mean(1))


def focal(x: Any, t: Any) -> Any:
    p = jax.nn.sigmoid(x)
    return (1 - p * t - (1 - p) * (1 - t)) ** 2 * bce_with_logits(x, t)


def dice(p: Any, x: Any, labels: Any) -> Any:
    x, t = jax.nn.softmax(x, 1), jnp.moveaxis(jax.nn.one_hot(labels, x.shape[1]), -1, 1)
    overlap, sizes = jnp.sum(x * t, (2, 3)), jnp.sum(x + t, (2, 3))
    return jnp.mean(1 - (2 * overlap + 1e-5) / (sizes + 1e-5))


def cases(n: int) -> Iterator[Case]:
    """Yield cases on n workers."""
    shape, grid = (2048, 2048), (1, n)
    x, t = Tensor(shape, grid), Tensor(shape, grid, "between")
    for name, given, terms in (
        ("MSE", x, lambda x, t: (x - t) ** 2),
        ("L1", x, lambda x, t: jnp.abs(x - t)),
        ("Huber", x, huber),
        ("BCE", t, bce),
        ("BCEWithLogits", x, bce_with_logits),
        ("KLDiv", x, lambda x, t: t * (jnp.log(t) - x)),
        ("PoissonNLL", x, lambda x, t: jnp.exp(x) - t * x),
    ):
        layer = getattr(nn, f"Distributed{name}Loss")
        yield Case(f"Distributed{name}Loss, columns split", [given, t], lambda layer=layer: layer(on(*grid)),
                   mean_of(terms), without_params, torch=Torch(f"{name}Loss"))  # fmt: skip

    yield Case("DistributedLoss, columns split", [x, t], lambda: nn.DistributedLoss(on(*grid), huber),
               mean_of(huber), without_params)  # fmt: skip

    name, classes = "DistributedCrossEntropyLoss", 16384
    logits, labels = (512, classes), Tensor((512,), kind=classes)
    yield Case(f"{name}, classes split", [Tensor(logits, (1, n)), labels],
               lambda: nn.DistributedCrossEntropyLoss(on(1, n), ignore_index=None), cross_entropy,
               without_params, torch=Torch("CrossEntropyLoss", below=classes // n))  # fmt: skip
    yield Case(f"{name}, samples split", [Tensor(logits, (n, 1)), Tensor((512,), (n,), classes)],
               lambda: nn.DistributedCrossEntropyLoss(on(n, 1)), cross_entropy, without_params)  # fmt: skip
    yield Case(f"{name}, classes split, labels smoothed", [Tensor(logits, (1, n)), labels],
               lambda: nn.DistributedCrossEntropyLoss(on(1, n), label_smoothing=0.1), smoothed,
               without_params)  # fmt: skip
    yield Case(f"{name}, rows of pixels split",
               [Tensor((4, 32, 128, 128), (1, 1, n, 1)), Tensor((4, 128, 128), (1, n, 1), 32)],
               lambda: nn.DistributedCrossEntropyLoss(on(1, 1, n, 1)), cross_entropy, without_params)  # fmt: skip
    yield Case("DistributedDiceLoss, rows of pixels split",
               [Tensor((4, 32, 128, 128), (1, 1, n, 1)), Tensor((4, 128, 128), (1, n, 1), 32)],
               lambda: nn.DistributedDiceLoss(on(1, 1, n, 1), softmax=True), dice, without_params)  # fmt: skip
    yield Case("DistributedFocalLoss, columns split", [x, t], lambda: nn.DistributedFocalLoss(on(*grid)),
               mean_of(focal), without_params)  # fmt: skip
    yield Case("DistributedAccuracy, classes split", [Tensor(logits, (1, n)), labels],
               lambda: nn.DistributedAccuracy(on(1, n)),
               lambda p, x, labels: jnp.mean(jnp.argmax(x, 1) == labels, dtype=x.dtype),
               without_params, backward=False)  # fmt: skip
