"""A mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from distdl_jax import nn

from layer_cases import Case, Tensor, on

BATCH, LENGTH, FEATURES, EXPERTS, CHOICES = 4, 256, 128, 8, 2
CAPACITY = LENGTH * CHOICES // EXPERTS


def mixture(p: Any, x: Any) -> Any:
    """GShard's form: products with arrays of samples x tokens x experts x places of ones and zeros."""
    probabilities = jax.nn.softmax(x @ p["router"].T)
    gates, chosen = jax.lax.top_k(probabilities, CHOICES)
    gates = gates / gates.sum(-1, keepdims=True)
    ones = jax.nn.one_hot(chosen, EXPERTS)
    in_order = jnp.swapaxes(ones, 1, 2).reshape(BATCH, -1, EXPERTS)
    before = (jnp.cumsum(in_order, 1) - in_order).reshape(BATCH, CHOICES, LENGTH, EXPERTS)
    places = jnp.sum(jnp.swapaxes(before, 1, 2) * ones, -1)
    at = jax.nn.one_hot(places, CAPACITY)  # of zeros, beyond the capacity
    rows = jnp.einsum("gtkn,gtkc,gte->ngce", ones, at, x)
    hidden = jax.nn.gelu(jnp.einsum("ngce,nhe->ngch", rows, p["up_weight"]) + p["up_bias"][:, None, None])
    outputs = jnp.einsum("ngch,neh->ngce", hidden, p["down_weight"]) + p["down_bias"][:, None, None]
    return jnp.einsum("gtk,gtkn,gtkc,ngce->gte", gates, ones, at, outputs)


def cases(n: int) -> Iterator[Case]:
    """Yield cases on n workers."""
    for what, grid in (("samples split", (n, 1, 1)), ("sequence split", (1, n, 1))):
        yield Case(
            f"DistributedMixtureOfExperts, {what}",
            [Tensor((BATCH, LENGTH, FEATURES), grid)],
            lambda grid=grid: nn.DistributedMixtureOfExperts(on(*grid), FEATURES, EXPERTS, capacity_factor=1.0),
            mixture,
        )
