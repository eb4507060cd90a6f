"""Fourier transforms of arrays that are cut where they are transformed: each cut moves, nothing is gathered."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import TensorSpec

SHAPE = (2, 6, 7, 5)


def filtered(x: Any) -> Any:
    """Return x, multiplied by a window of its frequencies: a layer of a Fourier neural operator."""
    y = jnp.fft.rfftn(x, axes=(1, 2, 3))
    kept = y * jnp.linspace(1, 0, y.shape[3]) * jnp.arange(1.0, 8)[:, None]
    return jnp.fft.irfftn(kept, SHAPE[1:], axes=(1, 2, 3))


def shuffled(x: Any) -> Any:
    """Return complex transforms along some dimensions, there and back with another window between."""
    y = jnp.fft.fft2(x.astype(complex), axes=(1, 3)) * jnp.arange(6.0)[:, None, None]
    return jnp.fft.ifftn(y, axes=(1, 2)).real + jnp.fft.hfft(x, 5, axis=1).sum()


@pytest.mark.parametrize("grid", [(1, 3, 1, 1), (1, 1, 2, 2)])
@pytest.mark.parametrize("f", [filtered, shuffled])
def test_transforms_move_cuts(f: Any, grid: tuple[int, ...]) -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=SHAPE)

        def loss(x: Any) -> Any:
            return jnp.sum(jnp.sin(f(x)) * x)

        value, gradient = jax.value_and_grad(loss)(x)

        def program() -> None:
            spec = TensorSpec(SHAPE, dj.Partition().grid(grid))
            inside = dj.distribute(jax.value_and_grad(loss), (spec,), (None, spec), gather=0)
            outside = dj.value_and_grad(dj.distribute(loss, (spec,), dj.PARTS, gather=0))
            for found in (inside, outside):
                y, dx = found(spec.block(x))
                np.testing.assert_allclose(y, value, rtol=1e-12)
                np.testing.assert_allclose(dx, spec.block(gradient), rtol=1e-10, atol=1e-12)
            plan = dj.distribute(filtered, (spec,), spec, gather=0).plan(spec.block(x))
            assert {moved.what for moved in plan.moved} == {"blocks"}

        dj.simulate(int(np.prod(grid)), program)
