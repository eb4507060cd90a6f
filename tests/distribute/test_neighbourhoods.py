"""Stencils: all terms of one are read by one exchange, and what they read is what they read on whole arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import TensorSpec


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """Run in float64."""
    with jax.enable_x64(True):
        yield


WEIGHTS = (8 / 5, -1 / 5, 8 / 315, -1 / 560)  # second derivative, eighth order


def padded(u: Any) -> Any:
    """Return the Laplacian, with zeros around: 17 slices of a padded array."""
    p, m, n = jnp.pad(u, 4), *u.shape
    y = -205 / 36 * u
    for k, weight in enumerate(WEIGHTS, 1):
        for s in (k, -k):
            y = y + weight * (p[4 + s : 4 + s + m, 4 : 4 + n] + p[4 : 4 + m, 4 + s : 4 + s + n])
    return y


def rolled(u: Any) -> Any:
    """Return the periodic Laplacian: 16 rolls."""
    y = -205 / 36 * u
    for k, weight in enumerate(WEIGHTS, 1):
        for s in (k, -k):
            y = y + weight * (jnp.roll(u, s, 0) + jnp.roll(u, s, 1))
    return y


def differences(u: Any) -> Any:
    """Return a flux that is shorter than its operand, and its divergence."""
    flux = u[1:] - u[:-1]
    return jnp.pad(flux, ((1, 1), (0, 0)))[1:] - jnp.pad(flux, ((1, 1), (0, 0)))[:-1] + jnp.diff(u, axis=1).sum()


# The adjoint of `padded` makes 29 rows, in balanced blocks, and crops them to the 21 of u: these begin elsewhere.
@pytest.mark.parametrize(("stencil", "both_ways"), [(padded, 3), (rolled, 2)])
def test_a_stencil_is_one_exchange_and_so_is_its_adjoint(stencil: Callable[[Any], Any], both_ways: int) -> None:
    rng = np.random.default_rng(0)
    u, c = rng.normal(size=(2, 21, 13))

    def step(c: Any, u: Any) -> Any:
        return jnp.sum((2 * u + c * stencil(u)) ** 2)

    def program() -> None:
        spec = TensorSpec(u.shape, dj.Partition().grid([3, 1]))
        both = jax.value_and_grad(step, (0, 1))
        blocks = spec.block(c), spec.block(u)
        for f, exchanges, out in ((step, 1, None), (both, both_ways, (None, (spec, spec)))):
            distributed = dj.distribute(f, (spec, spec), out)
            moved = distributed.plan(*blocks).moved
            assert sum(bool(each.operations) for each in moved if each.what == "neighbours") == exchanges
        value, gradients = dj.jit(distributed)(*blocks)
        expected, of_whole = both(c, u)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        for gradient, whole in zip(gradients, of_whole, strict=True):
            np.testing.assert_allclose(gradient, spec.block(whole), rtol=1e-11, atol=1e-11)

    dj.simulate(3, program)


@pytest.mark.parametrize("stencil", [padded, rolled, differences])
@pytest.mark.parametrize(("shape", "grid"), [((9, 10), (2, 2)), ((5, 11), (4, 1)), ((6, 4), (1, 3)), ((3, 8), (4, 1))])
def test_blocks_that_are_short_or_empty(
    stencil: Callable[[Any], Any], shape: tuple[int, int], grid: tuple[int, int]
) -> None:
    u = np.random.default_rng(1).normal(size=shape)

    def loss(u: Any) -> Any:
        return jnp.sum(jnp.sin(stencil(u)) ** 2)

    value, gradient = jax.value_and_grad(loss)(u)

    def program() -> None:
        spec = TensorSpec(shape, dj.Partition().grid(grid))
        inside = dj.distribute(jax.value_and_grad(loss), (spec,), (None, spec))
        outside = dj.value_and_grad(dj.distribute(loss, (spec,), dj.PARTS))
        for found in (inside(spec.block(u)), dj.jit(outside)(spec.block(u))):
            np.testing.assert_allclose(found[0], value, rtol=1e-12)
            np.testing.assert_allclose(found[1], spec.block(gradient), rtol=1e-11, atol=1e-11)

    dj.simulate(grid[0] * grid[1], program)


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return a sum of terms, each a chain of views and multiples of the argument."""

    def term() -> Callable[[Any], Any]:
        steps: list[Callable[[Any], Any]] = []
        for _ in range(rng.integers(1, 4)):
            d, n = int(rng.integers(len(shape))), 3
            match int(rng.integers(7)):
                case 0:
                    shift = int(rng.integers(-n, n + 1))
                    steps.append(lambda x, shift=shift, d=d: jnp.roll(x, shift, d))
                case 1:
                    low, high = map(int, rng.integers(0, n, 2))
                    fill = float(rng.integers(2))
                    widths = [(low, high) if e == d else (0, 0) for e in range(len(shape))]
                    steps.append(lambda x, widths=widths, fill=fill: jnp.pad(x, widths, constant_values=fill))
                case 2:
                    start = int(rng.integers(0, n))
                    steps.append(lambda x, start=start, d=d: jax.lax.slice_in_dim(x, start, x.shape[d], axis=d))
                case 3:
                    steps.append(lambda x, d=d: jnp.flip(x, d))
                case 4:
                    steps.append(lambda x, d=d: jax.lax.slice_in_dim(x, 0, x.shape[d], 2, d))
                case 5:
                    factor = float(rng.normal())
                    steps.append(lambda x, factor=factor: -x * factor / 3)
                case 6:
                    mode = ["wrap", "edge", "reflect"][int(rng.integers(3))]
                    widths = [(1, 1) if e == d else (0, 0) for e in range(len(shape))]
                    steps.append(lambda x, widths=widths, mode=mode: jnp.pad(x, widths, mode=mode))

        def chain(x: Any) -> Any:
            for step in steps:
                if min(x.shape) > 3:
                    x = step(x)
            return x

        return chain

    terms = [term() for _ in range(rng.integers(2, 6))]

    def f(x: Any) -> Any:
        parts = [each(x) for each in terms]
        smallest = [min(each) for each in zip(*(part.shape for part in parts), strict=True)]
        return sum(jax.lax.slice(jnp.cos(part) * part, [0] * part.ndim, smallest) for part in parts)

    return f


@pytest.mark.parametrize("seeds", [range(start, start + 6) for start in (0, 6)])
def test_drawn_chains_of_views(seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        shape = tuple(map(int, rng.integers(5, 12, 2)))
        grid = [(2, 1), (1, 2), (3, 1), (2, 2)][seed % 4]
        f, x = drawn(rng, shape), rng.normal(size=shape)
        weights = rng.normal(size=f(x).shape)

        def loss(x: Any, f: Callable[[Any], Any] = f, weights: np.ndarray = weights) -> Any:
            return jnp.sum(f(x) * weights)

        value, gradient = jax.value_and_grad(loss)(x)

        def program(
            x: np.ndarray = x, grid: Any = grid, loss: Any = loss, value: Any = value, gradient: Any = gradient
        ) -> None:
            spec = TensorSpec(x.shape, dj.Partition().grid(grid))
            inside = dj.distribute(jax.value_and_grad(loss), (spec,), (None, spec))(spec.block(x))
            outside = dj.value_and_grad(dj.distribute(loss, (spec,), dj.PARTS))(spec.block(x))
            for found in (inside, outside):
                np.testing.assert_allclose(found[0], value, rtol=1e-10)
                np.testing.assert_allclose(found[1], spec.block(gradient), rtol=1e-10, atol=1e-12)

        dj.simulate(grid[0] * grid[1], program)
