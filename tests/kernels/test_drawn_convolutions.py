"""Drawn convolutions and their gradients, in every way and dtype, against products in double precision."""

from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.examples import LONG

from distdl_jax.kernels import convolution as convolutions
from distdl_jax.kernels.convolution import convolution
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.onednn import can_compute
from distdl_jax.kernels.problem import Problem

TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2, "complex64": 1e-5}


def drawn(seed: int) -> Problem | None:
    """One to three dimensions; strides, dilations, groups, even kernels, kernels longer than the image, one pixel."""
    rng = np.random.default_rng([1, seed])
    dims, groups = int(rng.integers(1, 4)), int(rng.choice([1, 1, 1, 2, 3]))
    c_in, c_out = groups * int(rng.choice([1, 2, 3, 8, 16, 17])), groups * int(rng.choice([1, 2, 4, 8, 16, 33]))
    kernel, stride, dilation = ([int(n) for n in rng.integers(1, most, dims)] for most in (5, 4, 3))
    sizes = [int(rng.choice([1, 2, 3, 5, 8, 9, 12])) for _ in range(dims)]
    padding = tuple((int(low), int(high)) for low, high in rng.integers(-1, 5, (dims, 2)))
    dtype = str(rng.choice(["float32", "float32", "float32", "float16", "bfloat16", "float64", "complex64"]))
    window = Placement(tuple(stride), padding, tuple(dilation))
    x, weight = (int(rng.choice([1, 2, 5])), c_in, *sizes), (c_out, c_in // groups, *kernel)
    problem = Problem(x, weight, window, groups, dtype)
    cut = (n + min(low, 0) + min(high, 0) for n, (low, high) in zip(sizes, padding, strict=True))
    return None if 0 in problem.y or min(cut) < 1 else problem


@pytest.mark.parametrize("seed", range(12 * LONG))
def test_drawn_convolutions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(filter(None, map(drawn, count(1000 * seed))))  # the first that is not empty
    rng = np.random.default_rng([2, seed])
    x, weight = (jnp.asarray(rng.normal(size=shape)).astype(problem.dtype) for shape in (problem.x, problem.weight))

    def computed(way: str, dtype: str) -> Any:
        def program(x: jax.Array, weight: jax.Array) -> Any:
            def one(x: jax.Array, weight: jax.Array) -> jax.Array:
                return convolution(problem, x, weight)

            y, pullback = jax.vjp(one, x.astype(dtype), weight.astype(dtype))
            return y, pullback(y)

        monkeypatch.setattr(convolutions, "algorithm", lambda problem, direction: way)
        return jax.jit(program)(x, weight)

    wide = "complex128" if problem.dtype == "complex64" else "float64"
    expected, ways = computed("products", wide), {"xla": computed("xla", problem.dtype)}
    if can_compute(problem, "forward"):
        ways["onednn"] = computed("onednn", problem.dtype)
    for way, got in ways.items():
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.dtype == problem.dtype
            scale = max(1.0, float(np.abs(b).max()))
            tolerance = TOLERANCES[problem.dtype] * scale
            np.testing.assert_allclose(np.asarray(a, b.dtype), b, rtol=0, atol=tolerance, err_msg=f"{way}: {problem}")
