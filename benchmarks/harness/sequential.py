"""The sequential layers, and a process of its own (this file) that runs them on all of the machine's threads.

XLA fixes its number of threads when a process starts, so a worker that has one cannot time the layer on all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

sys.path.append(str(Path(__file__).parent))

from asked import Asked, serve


def both_ways(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Forward, and the gradients of parameters and of the first input, where it holds numbers.

    Cotangents are the output itself, of a loss 1.
    """

    def run(params: Any, x: Any, *others: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            y, pullback = jax.vjp(lambda params: apply(params, x, *others), params)
            return y, (*pullback(y), None)
        y, pullback = jax.vjp(lambda params, x: apply(params, x, *others), params, x)
        return y, pullback(y if y.ndim else jnp.ones_like(y))

    return run


def conv(params: Any, x: Any) -> Any:
    """Compute the convolution with a kernel of 3 and a padding of 1, with bias."""
    y = lax.conv_general_dilated(x, params["weight"], (1,) * (x.ndim - 2), [(1, 1)] * (x.ndim - 2))
    return y + params["bias"].reshape(-1, *(1,) * (x.ndim - 2))


def max_pool(params: Any, x: Any) -> Any:
    """Compute the largest of each 2 x 2."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


class OnAllThreads(Asked):
    """A process without MPI that runs `layer`, "conv" or "max_pool", on an x of `shape`."""

    def __init__(self, layer: str, shape: tuple[int, ...], channels: int, backward: bool) -> None:
        super().__init__([sys.executable, __file__], [layer, shape, channels, backward])


def prepared(description: tuple[str, list[int], int, bool]) -> Callable[[], object]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the worker that started this is bound to one
    layer, shape, channels, backward = description
    apply = {"conv": conv, "max_pool": max_pool}[layer]
    kernel = (channels, shape[1], *(3,) * (len(shape) - 2))
    params = {"weight": jnp.ones(kernel), "bias": jnp.ones(channels)} if layer == "conv" else {}
    program, x = jax.jit(both_ways(apply) if backward else apply), jnp.ones(shape)
    return lambda: jax.block_until_ready(program(params, x))


if __name__ == "__main__":
    serve(prepared)
