"""What functions store for their derivatives, beside derivatives worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.residuals import Residuals, residuals

X = ShapeDtype((4, 8), np.dtype("float32"))
ARRAY, ROWS = 4 * 4 * 8, 4 * 4

CASES: dict[str, tuple[Callable, Residuals]] = {
    # the sign of x; y is a maximum, which is computed again
    "relu": (jax.nn.relu, Residuals(True, False, 0, True)),
    # 1 - y^2
    "tanh": (jnp.tanh, Residuals(False, True, 0, False)),
    # y (1 - y)
    "sigmoid": (jax.nn.sigmoid, Residuals(False, True, 0, False)),
    # x and its tanh; y is a product of two arrays, which XLA stores
    "gelu": (jax.nn.gelu, Residuals(True, False, ARRAY, False)),
    # x and its sigmoid
    "silu": (jax.nn.silu, Residuals(True, False, ARRAY, False)),
    # exponentials, and their sums along rows
    "softmax": (jax.nn.softmax, Residuals(False, False, ARRAY + ROWS, False)),
    # a constant derivative
    "twice": (lambda x: 2 * x, Residuals(False, False, 0, True)),
    "flattened": (lambda x: x.reshape(-1), Residuals(False, False, 0, True)),
    # 2 x
    "square": (lambda x: x * x, Residuals(True, False, 0, False)),
    # the other factor, a constant
    "product": (lambda x: x @ jnp.ones((8, 8), x.dtype), Residuals(False, False, 0, False)),
    # x and its exponential
    "through jit": (jax.jit(lambda x: jnp.exp(x) * x), Residuals(True, False, ARRAY, False)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_function_stores(name: str) -> None:
    """The arrays that its derivative can't be computed without, each once."""
    function, expected = CASES[name]
    assert residuals(function, X) == expected
