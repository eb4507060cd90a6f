"""The order in memory of what goes from layer to layer."""

from __future__ import annotations

import jax
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint


@jax.jit  # without it, what is not traced must be an array of JAX's own: numpy's would be refused
def row_major(x: Array) -> Array:
    """`x`, computed as it is, in row-major order, before anything is computed of it; and its cotangent likewise.

    XLA gives the output of a convolution the order that the convolution likes, and hands it on to whatever is fused
    with it: slices and reductions of such an array can take ten times as long. It also makes one loop of a
    transposition and of what follows, which can take five times as long as the two.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def between_layers(x: Array) -> Array:
    """`row_major(x)` on a CPU, where layers compute in that order; elsewhere the compiler knows better."""
    return row_major(x) if jax.default_backend() == "cpu" else x
