"""Drawn plain functions in networks, on drawn partitions: the blocks and gradients of the sequential network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import nn

Function = Callable[[Any], Any]
Random = np.random.Generator


def weighted(x: Any, axis: int) -> Any:
    """Depends on positions, and on the length."""
    n = x.shape[axis]
    weights = (1 + jnp.arange(n)) / n
    return x * weights.reshape([-1 if d == axis else 1 for d in range(x.ndim)])


def stencil(x: Any, axis: int) -> Any:
    padded = jnp.pad(x, [(1, 1) if d == axis else (0, 0) for d in range(x.ndim)], mode="wrap")
    n = x.shape[axis]
    return lax.slice_in_dim(padded, 0, n, axis=axis) - 2 * x + lax.slice_in_dim(padded, 2, n + 2, axis=axis)


def scanned(x: Any, axis: int) -> Any:
    rows = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(lax.scan(lambda y, row: (0.5 * y + row,) * 2, jnp.zeros_like(rows[0]), rows)[1], 0, axis)


ALONG: dict[str, Callable[..., Any]] = {
    "softmax": jax.nn.softmax,
    "flip": jnp.flip,
    "cumsum": jnp.cumsum,
    "sort": jnp.sort,
    "roll": lambda x, axis: jnp.roll(x, 2, axis),
    "centred": lambda x, axis: x - x.mean(axis, keepdims=True),
    "largest": lambda x, axis: x / (1 + jnp.abs(x).max(axis, keepdims=True)),
    "kept mean": lambda x, axis: x.mean(axis, keepdims=True),
    "half": lambda x, axis: lax.slice_in_dim(x, 0, (x.shape[axis] + 1) // 2, axis=axis),
    "doubled": lambda x, axis: jnp.concatenate([x, 2 * x], axis),
    "padded": lambda x, axis: jnp.pad(x, [(2, 1) if d == axis else (0, 0) for d in range(x.ndim)]),
    "weighted": weighted,
    "stencil": stencil,
    "scanned": scanned,
    "mixed": lambda x, axis: jnp.moveaxis(jnp.tensordot(x, mixer(x.shape[axis]), [[axis], [0]]), -1, axis),
    "remat": lambda x, axis: jax.checkpoint(partial(jax.nn.log_softmax, axis=axis))(x),
    "product": lambda x, axis: x * jnp.take(x, jnp.array([0]), axis),
}
ALONE: dict[str, Function] = {
    "gelu": jax.nn.gelu,
    "scaled": lambda x: x / x.size + 1,
    "turned": lambda x: jnp.swapaxes(x, 0, x.ndim - 1),
    "normed": lambda x: x / (1 + jnp.linalg.norm(x)),
    "flat": lambda x: jnp.tanh(x.reshape(-1)).reshape(x.shape) * 2,
    "custom": jax.nn.silu,
    "branch": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "total": lambda x: x + jnp.sum(x**2) / x.size,
}


def mixer(n: int) -> Any:
    return np.cos(np.arange(n * n)).reshape(n, n)


def drawn_functions(random: Random, dims: int) -> tuple[str, list[Function]]:
    names, functions = [], []
    for _ in range(random.integers(1, 4)):
        if random.random() < 0.7:
            name, axis = str(random.choice(list(ALONG))), int(random.integers(dims))
            names.append(f"{name} {axis}")
            functions.append(partial(ALONG[name], axis=axis))
        else:
            names.append(str(random.choice(list(ALONE))))
            functions.append(ALONE[names[-1]])
    return ", ".join(names), functions


def drawn_grid(random: Random, dims: int, workers: int) -> tuple[list[int], list[int]]:
    """Return the shape of a grid of some workers, and these in any order."""
    while True:
        shape = [int(p) for p in random.integers(1, 4, size=dims)]
        if 1 < np.prod(shape) <= workers:
            return shape, [int(rank) for rank in random.permutation(workers)[: np.prod(shape)]]


def uneven(random: Random, shape: tuple[int, ...], grid: list[int]) -> list[list[int]]:
    """Return the lengths of blocks along each dimension: balanced, or any."""
    sizes = []
    for n, p in zip(shape, grid, strict=True):
        cuts = np.sort(random.integers(0, n + 1, size=p - 1)).tolist()
        sizes.append(np.diff([0, *cuts, n]).tolist())
    return sizes


def block_of(x: np.ndarray, sizes: list[list[int]], index: tuple[int, ...]) -> np.ndarray:
    starts = [sum(of[:i]) for of, i in zip(sizes, index, strict=True)]
    return x[tuple(slice(a, a + of[i]) for a, of, i in zip(starts, sizes, index, strict=True))]


@pytest.mark.parametrize("seed", range(8))
def test_drawn_functions_are_those_of_the_sequential_network(seed: int) -> None:
    """On uneven, empty and unbalanced blocks, on any workers; in front of a layer, after one, or between two."""
    check(np.random.default_rng(seed))


def check(random: Random) -> str:
    dims, workers = int(random.integers(2, 4)), 4
    shape = tuple(int(n) for n in random.integers(1, 8, size=dims))
    text, functions = drawn_functions(random, dims)
    (grid, ranks), place, is_balanced = (
        drawn_grid(random, dims, workers),
        str(random.choice(["after", "before", "between"])),
        bool(random.random() < 0.6),
    )
    other = [1] * dims
    other[int(random.integers(dims))] = int(np.prod(grid))
    sizes = uneven(random, shape, grid)
    with jax.enable_x64(True):
        x = random.normal(size=shape)

        def whole(x: Any) -> Any:
            for function in functions:
                x = function(x)
            return x

        expected = np.asarray(whole(x))
        dy = random.normal(size=expected.shape)
        gradient = jax.grad(lambda x: jnp.sum(whole(x) * dy))(x)

        def program() -> None:
            P = dj.Partition()
            P_x = P.grid(grid, ranks)
            P_y = P.grid(other, ranks) if place == "between" else P_x
            same, end = nn.Repartition(P_x, P_x), nn.Repartition(P_y, P_y)
            layers = {"after": (same, *functions), "before": (*functions, same), "between": (same, *functions, end)}
            network = nn.Sequential(*layers[place])
            spec = dj.TensorSpec(shape, P_x)
            rows = place == "before" and not is_balanced  # a layer would balance them
            block = jnp.asarray(block_of(x, sizes, P_x.index) if rows and P_x.active else spec.block(x))
            params: Any = ({},) * len(network)
            y = network(params, block)
            out = dj.TensorSpec(expected.shape, P_y)
            turned = sum("turned" in name for name in text.split(", ")) % 2
            if P_x.active and not (turned and y.shape != out.local_shape):
                np.testing.assert_allclose(y, out.block(expected), rtol=1e-9, atol=1e-9)
                of_y = out.block(dy)
            else:
                of_y = None
            if turned:
                return  # as it falls
            of_y = jnp.zeros(y.shape) if of_y is None else of_y
            found = dj.grad(lambda x: jnp.sum(network(params, x) * of_y))(block)
            if P_x.active:
                own = block_of(np.asarray(gradient), sizes, P_x.index) if rows else spec.block(gradient)
                np.testing.assert_allclose(found, own, rtol=1e-9, atol=1e-9)

        described = f"{text} on {shape} over {grid} {ranks}, {place} {other}, balanced: {is_balanced}, {sizes}"
        try:
            dj.simulate(workers, program)
        except Exception as error:
            error.add_note(described)
            raise
    return described
