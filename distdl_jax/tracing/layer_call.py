"""What a layer's call leaves in a traced program, so that programs can be compared, and differentiated alike."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax import Array
from jax.core import Tracer

from distdl_jax.tracing.adjoint_order import is_inexact
from distdl_jax.tracing.forward_mode_error import identity
from distdl_jax.tracing.tie import tie

T = TypeVar("T")


def passed_to(layer: str, params: T) -> T:
    """Return the parameters of a call of a layer, which is described in the same words on all workers.

    Layers need not move their parameters: so messages don't tell whose parameters a layer is called with.
    """
    leaves, structure = jax.tree.flatten(params)
    if not leaves or not isinstance(leaves[0], Tracer):
        return params
    passed: T = jax.tree.unflatten(structure, [_passed.bind(leaves[0], layer=layer), *leaves[1:]])
    return passed


def layer_called(eqn: Any) -> str | None:
    """Return the layer whose call an equation is, None where it is none."""
    layer: str | None = eqn.params["layer"] if eqn.primitive is _passed else None
    return layer


_passed = identity("passed_to_layer", identity("tangent_of_a_parameter"))


def tied_to_params(y: Any, params: Any) -> Any:
    """Return a layer's output; where it has no elements, it depends on the parameters without elements.

    Other workers make theirs of the parameters. So where JAX differentiates what is computed of y, it does so here.
    """
    if not isinstance(y, Array) or y.size:
        return y
    return tie(y, *(x for x in jax.tree.leaves(params) if isinstance(x, Tracer) and not x.size and is_inexact(x)))
