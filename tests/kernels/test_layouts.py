"""What layers hand on, their results and their cotangents, is in row-major order on a CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from distdl_jax.functional.convolutions import LocalConvolution
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.pooling import max_pool, sum_pool
from distdl_jax.kernels.problem import Problem

WINDOWS = Placement(stride=(2, 2), padding=((0, 0), (0, 0)), dilation=(1, 1))
TAPS = Placement(stride=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1))


def convolved(x: jax.Array) -> jax.Array:
    layer = LocalConvolution(Problem(x.shape, (4, 2, 3, 3), TAPS, 1, x.dtype.name), (0, 2), adds_bias=True)
    return layer(x, jnp.ones((4, 2, 3, 3)), jnp.ones(4))


LAYERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "convolution": convolved,
    "largest": lambda x: max_pool(x, (2, 2), WINDOWS),
    "total": lambda x: sum_pool(x, (2, 2), WINDOWS),
}


def pinned(function: Callable[..., Any], *args: Any) -> tuple[bool, bool]:
    """Whether the program's result, and the first thing done to its last argument, is a layout's constraint."""
    program = jax.make_jaxpr(function)(*args).jaxpr
    result, argument = program.outvars[-1], program.invars[-1]
    makes = next(eqn for eqn in program.eqns if result in eqn.outvars)
    takes = next(eqn for eqn in program.eqns if argument in eqn.invars)
    return tuple(eqn.primitive.name == "jit" and eqn.params["name"] == "row_major" for eqn in (makes, takes))


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_cotangents(name: str) -> None:
    x, layer = jnp.ones((3, 2, 8, 8)), LAYERS[name]
    assert pinned(layer, x)[0]
    pullback = jax.vjp(layer, x)[1]
    dx, dy = pinned(lambda dy: pullback(dy)[0], layer(x))
    assert dy and (dx or name == "convolution")  # whose dx is that of the layer, or of the exchange, before it
