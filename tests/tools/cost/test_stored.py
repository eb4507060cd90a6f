"""What functions store for their derivatives, beside derivatives worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tools.cost.traces import Stored, traced_classes

X = ShapeDtype((4, 8), np.dtype("float32"))
ARRAY, ROWS = 4 * 4 * 8, 4 * 4

CASES: dict[str, tuple[Callable, Stored]] = {
    # the sign of x
    "relu": (jax.nn.relu, Stored(True, False, 0)),
    # 1 - y^2
    "tanh": (jnp.tanh, Stored(False, True, 0)),
    # y (1 - y)
    "sigmoid": (jax.nn.sigmoid, Stored(False, True, 0)),
    # x and its tanh
    "gelu": (jax.nn.gelu, Stored(True, False, ARRAY)),
    # x and its sigmoid
    "silu": (jax.nn.silu, Stored(True, False, ARRAY)),
    # exponentials, and their sums along rows
    "softmax": (jax.nn.softmax, Stored(False, False, ARRAY + ROWS)),
    # a constant derivative
    "twice": (lambda x: 2 * x, Stored(False, False, 0)),
    "flattened": (lambda x: x.reshape(-1), Stored(False, False, 0)),
    # 2 x
    "square": (lambda x: x * x, Stored(True, False, 0)),
    # the other factor, a constant
    "product": (lambda x: x @ jnp.ones((8, 8), x.dtype), Stored(False, False, 0)),
    # x and its exponential
    "through jit": (jax.jit(lambda x: jnp.exp(x) * x), Stored(True, False, ARRAY)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_function_stores(name: str) -> None:
    """The arrays that its derivative can't be computed without, each once."""
    function, expected = CASES[name]
    x, world = {0: X}, dj.planning_world(1).world
    ((_, trace),) = traced_classes(function, nn.Sequential(function).plan(x).plans[0], x, world, X.dtype)
    assert trace.stored == expected
