"""Drawn programs of JAX's primitives on whole arrays: a chain of operations, as text, which shrinks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Operation = Callable[[Any, Any], Any]


def _convolved(x: Any, w: Any, stride: int, dilation: int, spread: int) -> Any:
    kernel = w[:3, :2].reshape(1, 1, 3, 2)
    padding = ((2, 1), (-1, 3)) if spread == 1 else ((1, 2), (0, 1))
    y = lax.conv_general_dilated(
        x[None, None], kernel, (stride, 1), padding, lhs_dilation=(spread, 1), rhs_dilation=(dilation, 1)
    )
    return y[0, 0]


def _pooled(x: Any, _: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (3, 2), (2, 1), ((1, 1), (0, 1)))


def _normalised(x: Any, w: Any) -> Any:
    mean, square = jnp.mean(x, 0), jnp.mean(x * x, 0)
    return (x - mean) * lax.rsqrt(jnp.maximum(square - mean**2, 0) + 0.1) * w[0, 0]


def _scanned(x: Any, w: Any) -> Any:
    return lax.scan(lambda carry, row: (jnp.tanh(carry + w[0, 0] * row), carry * row), jnp.zeros(x.shape[1]), x)[1]


def _periodic(x: Any, w: Any) -> Any:
    padded = jnp.pad(x, ((1, 1), (2, 0)), mode="wrap")
    return padded[2:, 2:] * w[1, 1] + padded[:-2, :-2] - padded[1:-1, 1:-1]


OPERATIONS: dict[str, Operation] = {
    "tanh": lambda x, w: jnp.tanh(x * w[0, 1]) + 0.1 * x,
    "bias": lambda x, w: x + w[2, 2] * jnp.arange(x.shape[1]) / x.shape[1],
    "transpose": lambda x, w: x.T,
    "flip": lambda x, w: jnp.flip(x, (0, 1)) + x,
    "roll": lambda x, w: jnp.roll(x, (2, -3), (0, 1)) * w[1, 0],
    "strided": lambda x, w: jnp.concatenate([x[1::2], x[:: max(1, len(x) - 1)]], 0),
    "ends": lambda x, w: jnp.concatenate([x[:, -1:], x, x[:, :2]], 1),
    "pad": lambda x, w: lax.pad(x, 0.5, ((2, -1, 0), (-1, 2, 1))),
    "periodic": _periodic,
    "reflect": lambda x, w: jnp.pad(x, ((2, 1), (0, 1)), mode="reflect"),
    "reshape": lambda x, w: x.reshape(-1, 2) if x.size % 2 == 0 else x.reshape(-1)[: x.size - 1].reshape(2, -1),
    "flat": lambda x, w: x.reshape(x.shape[1], x.shape[0]),
    "product": lambda x, w: (
        x @ (w[: x.shape[1] % 3 + 1, :1] * x[: x.shape[1] % 3 + 1]).T @ jnp.ones((x.shape[1] % 3 + 1, 4))
    ),
    "gram": lambda x, w: x.T @ x * 0.1 + w[0, 3],
    "norm": _normalised,
    "softmax": lambda x, w: jax.nn.softmax(x * w[1, 2], 0),
    "logsumexp": lambda x, w: x - jax.nn.logsumexp(x, 1, keepdims=True),
    "variance": lambda x, w: x / jnp.sqrt(jnp.var(x) + 1) + jnp.max(x, 0),
    "cumsum": lambda x, w: jnp.cumsum(x, 0) * 0.3,
    "cumulated": lambda x, w: lax.cumlogsumexp(x, 1),
    "sort": lambda x, w: jnp.sort(x, 1),
    "argmax": lambda x, w: x + jnp.argmax(x, 0) * 0.1,
    "conv": lambda x, w: _convolved(x, w, 1, 1, 1),
    "conv, stride": lambda x, w: _convolved(x, w, 2, 1, 1),
    "conv, dilation": lambda x, w: _convolved(x, w, 1, 2, 1),
    "conv, spread": lambda x, w: _convolved(x, w, 1, 1, 2),
    "max pool": _pooled,
    "tangent of a pool": lambda x, w: jax.jvp(lambda x: _pooled(x, w), (x,), (jnp.sin(x),))[1],
    "sum pool": lambda x, w: lax.reduce_window(x, 0.0, lax.add, (2, 3), (1, 2), "SAME"),
    "rows": lambda x, w: x[jnp.array([0, 2, 1, 0]) % len(x)],
    "embedding": lambda x, w: w[jnp.arange(len(x)) % 4, : x.shape[1] % 4 + 1],
    "scatter": lambda x, w: x.at[jnp.array([1, 0, 1]) % len(x)].add(w[0, 0]),
    "shifted": lambda x, w: x.at[1:].set(x[:-1] * 0.5),
    "taken": lambda x, w: jnp.take_along_axis(x, jnp.argsort(x, 0), 0),
    "window": lambda x, w: lax.dynamic_slice_in_dim(x, jnp.argmax(x[:, 0]), len(x) - 2),
    "put": lambda x, w: lax.dynamic_update_slice_in_dim(x, x[:2] * w[0, 0], jnp.argmin(x[:, 0]), 0),
    "largest": lambda x, w: lax.top_k(x.T, 3)[0].T,
    "resize": lambda x, w: jax.image.resize(x, (x.shape[0] + 3, x.shape[1] - 1), "linear"),
    "segments": lambda x, w: jax.ops.segment_sum(x, jnp.arange(len(x)) // 2, len(x)) + x,
    "nonzero": lambda x, w: jnp.ldexp(x, 1) + 0.1 * jnp.nonzero(x > 0, size=3)[0].sum(),
    "scan": _scanned,
    "loop": lambda x, w: lax.fori_loop(0, 2, lambda i, y: jnp.sin(y) + jnp.roll(y, i, 0) * w[0, 0], x),
    "branch": lambda x, w: lax.cond(jnp.sum(w) > 0, lambda x: x * 2, lambda x: jnp.flip(x, 0), x),
    "relu": lambda x, w: jax.nn.relu(x) + jax.nn.gelu(x),
    "checkpoint": lambda x, w: jax.checkpoint(lambda x: jnp.sin(x) * jnp.mean(x, 0))(x),
    "vmap": lambda x, w: jax.vmap(lambda row: row - row.mean())(x),
    "fft": lambda x, w: jnp.fft.rfft(x, axis=0).real + 0.1,
    "noise": lambda x, w: x + jax.random.normal(jax.random.key(3), x.shape, x.dtype),
    "dropout": lambda x, w: x * jax.random.bernoulli(jax.random.key(1), 0.7, x.shape),
    "mask": lambda x, w: jnp.where(jnp.tril(jnp.ones(x.shape, bool)), x, w[3, 3]),
}


class Program:
    """A chain of operations on an array of `shape`, and what it is compared on: workers, and a grid of them."""

    def __init__(self, names: Sequence[str], shape: tuple[int, int], grid: tuple[int, int]) -> None:
        self.names, self.shape, self.grid = tuple(names), shape, grid

    @classmethod
    def drawn(cls, seed: int) -> Program:
        """Return the program of a seed."""
        rng = random.Random(seed)
        names = [rng.choice(list(OPERATIONS)) for _ in range(rng.randint(1, 4))]
        return cls(
            names, (rng.randint(4, 9), rng.randint(4, 9)), rng.choice([(2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (4, 1)])
        )

    def __repr__(self) -> str:
        return f"Program({list(self.names)}, {self.shape}, {self.grid})"

    def arrays(self) -> tuple[Any, Any]:
        """Return the parameters and the array, in float64."""
        rng = np.random.default_rng(len(self.names))
        return jnp.asarray(rng.normal(size=(4, 5))), jnp.asarray(rng.normal(size=self.shape))

    def loss(self, w: Any, x: Any) -> Any:
        """Return a scalar that depends on each entry of the last array in its own way."""
        for name in self.names:
            if min(x.shape) >= 3 or name in ("tanh", "transpose", "relu"):
                x = OPERATIONS[name](x, w)
        weights = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
        return jnp.sum(weights * x) + jnp.mean(x**2)

    def shrunk(self, fails: Callable[[Program], bool]) -> Program:
        """Return a shorter program that fails too, if there is one."""
        for n in range(len(self.names)):
            shorter = Program(self.names[:n] + self.names[n + 1 :], self.shape, self.grid)
            if shorter.names and fails(shorter):
                return shorter.shrunk(fails)
        return self
