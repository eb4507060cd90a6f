"""The layers of a network, at any depth, with the place of each: "3.body.0"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from distdl_jax.layer.layer import Layer
from distdl_jax.nn.network import Network
from distdl_jax.nn.pipeline import Pipeline
from distdl_jax.tensors import TensorSpec


class PlacedLayer(NamedTuple):
    """A layer, or a function, of a network; `name`: of its class, or of the function."""

    place: str
    layer: Any
    name: str

    @property
    def param_specs(self) -> list[TensorSpec]:
        """The specs of all parameters."""
        if not isinstance(self.layer, Layer):
            return []
        leaves = jax.tree.leaves(self.layer.param_specs(), is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
        return [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]


def placed_layers(layer: Callable[..., Any], place: str = "") -> Iterator[PlacedLayer]:
    """Yield the layers that `layer` is made of, in order, or itself; places are those of `Plan.actions`."""
    if not isinstance(layer, Network) or isinstance(layer, Pipeline):
        yield PlacedLayer(place, layer, getattr(layer, "__name__", type(layer).__name__))
        return
    for name, part in layer._parts:
        if part is not None:
            yield from placed_layers(part, f"{place}.{name}" if place else str(name))
    if layer._computes:
        yield PlacedLayer(place, None, layer._computes)
