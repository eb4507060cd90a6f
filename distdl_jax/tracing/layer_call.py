"""Calls of layers, as a traced program shows them: a layer moves no parameters, so messages don't tell whose it has."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from distdl_jax.tracing.forward_mode_error import identity

T = TypeVar("T")


def passed_to(layer: str, params: T) -> T:
    """Return the parameters of a call of a layer, which is described in the same words on all workers."""
    leaves, structure = jax.tree.flatten(params)
    passed: T = jax.tree.unflatten(structure, [_passed.bind(x, layer=layer) for x in leaves[:1]] + leaves[1:])
    return passed


def layer_called(eqn: Any) -> str | None:
    """Return the layer whose call an equation is, None where it is none."""
    layer: str | None = eqn.params["layer"] if eqn.primitive is _passed else None
    return layer


_passed = identity("passed_to_layer", identity("tangent_of_a_parameter"))
