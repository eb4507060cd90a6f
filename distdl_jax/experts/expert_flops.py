"""How much an expert computes: the flops of the matrix products in its program, and in its gradients'."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distdl_jax.experts.mlp import Expert
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.jaxprs import equations


class Flops(NamedTuple):
    """The flops forward, of the gradient of the tokens, and of that of the parameters."""

    forward: int
    of_x: int
    of_params: int


def expert_flops(expert: Expert, params: Mapping[str, ShapeDtype], rows: ShapeDtype) -> Flops:
    """Return the flops of the products in one expert, of so many rows.

    >>> from distdl_jax.experts.mlp import MLP
    >>> sizes = {"up_weight": (5, 3), "up_bias": (5,), "down_weight": (3, 5), "down_bias": (3,)}
    >>> params = {name: ShapeDtype(shape, jnp.dtype("float32")) for name, shape in sizes.items()}
    >>> tuple(expert_flops(MLP(3, 5, jnp.tanh), params, ShapeDtype((2, 3), jnp.dtype("float32"))))
    (120, 60, 180)
    """

    def loss(params: Any, tokens: Any) -> Any:
        return jnp.sum(expert(params, tokens))

    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(*x), (dict(params), rows), is_leaf=_is_shape)
    forward, of_params, of_both = (
        _products(function, *args) for function in (expert, jax.grad(loss), jax.grad(loss, (0, 1)))
    )
    return Flops(forward, of_both - of_params, of_params - forward)


def _products(function: Callable[..., Any], *args: Any) -> int:
    """Return the flops of all matrix products in a function's program."""
    flops = 0
    for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr.eqns):
        if eqn.primitive.name == "dot_general":
            ((inner, _), _), x = eqn.params["dimension_numbers"], eqn.invars[0].aval
            flops += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(x.shape[d] for d in inner)
    return flops


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, ShapeDtype)
