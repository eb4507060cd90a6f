"""A network described without partitions: its nodes, each of which chooses a grid, and the layers on given grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from distdl_jax.errors import DistDLError, InvalidTypeError, PlanError
from distdl_jax.nn.base.layer import Layer
from distdl_jax.nn.networks.descriptions import LayerDescription, Skip
from distdl_jax.nn.networks.residual import Residual
from distdl_jax.nn.networks.sequential import Sequential
from distdl_jax.nn.shape.data_movement import Repartition
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.planning import planning_world
from distdl_jax.partitions.spec_trees import is_spec
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text

Shape = tuple[int, ...]
Grids = tuple[Shape, ...]
"""The grid of each node."""


@dataclass(frozen=True)
class Node:
    """Layers on one grid: the first chooses it, the others stay on the grid of its output. A skip is one node.

    - `items`: each with its place in the network.
    - `x_shape`, `y_shape`: global shapes of input and output. `elements`: the total of all intermediate arrays.
    - `has_params`: whether any of its layers has parameters.
    - `differentiates_x`: whether the gradient of its input is computed, because of preceding parameters.
    """

    items: tuple[tuple[str, Any], ...]
    x_shape: Shape
    y_shape: Shape
    elements: int
    has_params: bool
    differentiates_x: bool

    @property
    def key(self) -> Any:
        """The key that nodes of equal cost share."""
        return tuple(layer for _, layer in self.items), self.x_shape, self.differentiates_x

    @property
    def name(self) -> str:
        """The names of its layers."""
        return " ".join(_name(layer) for _, layer in self.items)


class DescribedNetwork:
    """The nodes of a network, in order.

    - `node_of`: the number of the node of each described layer, by its place: "3", or "3.1" within a skip.
    - `takes_indices`: whether its input holds integers.
    """

    def __init__(self, layers: Sequence[Any], x_shape: Shape, dtype: np.dtype) -> None:
        self.layers, self.x_shape, self._dtype = tuple(layers), x_shape, dtype
        self.node_of: dict[str, int] = {}
        self._shapes: dict[str, Shape] = {}
        self._P, self._params, self._elements = planning_world(1), 0, 0
        self.takes_indices = False
        self.nodes = tuple(self._nodes())

    def _nodes(self) -> Iterator[Node]:
        """Yield the nodes, determining the shapes on the way."""
        shape = self.x_shape
        for number, items in enumerate(_groups(self.layers)):
            x_shape, params, elements = shape, self._params, self._elements
            for place, layer in items:
                shape = self._output(place, layer, shape)
                self.node_of |= dict.fromkeys(_described(place, layer), number)
            yield Node(tuple(items), x_shape, shape, self._elements - elements, self._params > params, params > 0)

    def _output(self, place: str, layer: Any, shape: Shape) -> Shape:
        """Return the shape of a layer's output, by its plan on one worker; record the shape of its input."""
        _check(layer, place)
        self._shapes[place] = shape
        if isinstance(layer, Skip):
            y_shape = shape
            for number, inner in enumerate(layer.layers):
                y_shape = self._output(f"{place}.{number}", inner, y_shape)
            if y_shape != shape:
                raise PlanError(
                    f"`network[{place}]` is a skip: its layers must return an output with the shape of x, "
                    f"{shape_text(shape)}, but return {shape_text(y_shape)}."
                )
            self._elements += math.prod(shape)
            return shape
        try:
            P = self._P.grid([1] * len(shape))
            made = layer.layer(P, shape) if isinstance(layer, LayerDescription) else layer
            is_first = place == "0" and getattr(made, "takes_indices", False)
            self.takes_indices |= is_first
            x = ShapeDtype(shape, np.dtype(np.int32) if is_first else self._dtype)
            found: Shape = Sequential(made).plan({0: x}).output(0).shape
        except (DistDLError, TypeError, ValueError) as error:
            raise PlanError(
                f"`network[{place}]` ({_name(layer)}), for an input of {shape_text(shape)}: {error}"
            ) from error
        if isinstance(made, Layer):
            self._params += len(jax.tree.leaves(made.param_specs(), is_leaf=is_spec))
        self._elements += math.prod(found)
        return found

    def on(self, grids: Grids, P: Partition) -> Sequential:
        """Return the network with each node on its grid of the first workers of `P`, and repartitions between them."""
        made, grid = list[Callable[..., Any]](), grids[0]
        for node, wanted in zip(self.nodes, grids, strict=True):
            layers, grid = self._made(node.items, grid, wanted, P)
            made += layers
        return Sequential(*made)

    def node_on(self, node: Node, grid: Shape, P: Partition) -> tuple[list[Callable[..., Any]], Shape]:
        """Return the layers of a node on a grid of the first workers of `P`, and the grid of their output."""
        return self._made(node.items, grid, grid, P)

    def _made(
        self, items: Sequence[tuple[str, Any]], grid: Shape, wanted: Shape, P: Partition
    ) -> tuple[list[Callable[..., Any]], Shape]:
        made: list[Callable[..., Any]] = []
        for place, layer in items:
            if _chooses(layer) and grid != wanted and len(grid) == len(wanted):
                made.append(_repartition(P, grid, wanted))
                grid = wanted
            match layer:
                case Skip():
                    inner = [(f"{place}.{number}", each) for number, each in enumerate(layer.layers)]
                    body, last = self._made(inner, grid, wanted, P)
                    made.append(Residual(Sequential(*body), None if last == grid else _repartition(P, grid, last)))
                    grid = last
                case LayerDescription():
                    made.append(layer.layer(P.grid(grid), self._shapes[place]))
                    grid = getattr(made[-1], "output_partition", P.grid(grid)).shape
                case _:
                    made.append(layer)
        return made, grid


def _groups(layers: Sequence[Any]) -> list[list[tuple[str, Any]]]:
    """Return the layers of each node: a function or a norm joins the previous layer, or the first one."""
    groups: list[list[tuple[str, Any]]] = [[]]
    for number, layer in enumerate(layers):
        if _chooses(layer) and any(_chooses(each) for _, each in groups[-1]):
            groups.append([])
        groups[-1].append((str(number), layer))
    return groups


def _chooses(layer: Any) -> bool:
    """Say whether a layer may be on another grid than the previous one."""
    return isinstance(layer, Skip) or (isinstance(layer, LayerDescription) and not layer.follows)


def _described(place: str, layer: Any) -> Iterator[str]:
    """Yield the places of the described layers within a layer."""
    if isinstance(layer, LayerDescription):
        yield place
    for number, inner in enumerate(layer.layers if isinstance(layer, Skip) else ()):
        yield from _described(f"{place}.{number}", inner)


def _repartition(P: Partition, grid: Shape, other: Shape) -> Repartition:
    return Repartition(P.grid(grid), P.grid(other))  # type: ignore[abstract]


def _check(layer: Any, place: str) -> None:
    """Reject anything but a description or a function of an array."""
    if isinstance(layer, LayerDescription | Skip):
        return
    if isinstance(layer, Layer | type):
        name = layer.__name__ if isinstance(layer, type) else type(layer).__name__
        raise InvalidTypeError(
            f"`network[{place}]` is the layer {name}, but must be a description without partitions, which are chosen "
            f"here: nn.conv2d(...), nn.linear(...) and so on; or nn.describe({name}, ...), for any class, including "
            "your own."
        )
    if not callable(layer):
        raise InvalidTypeError(
            f"`network[{place}]` (={layer!r}) must be a description like nn.conv2d(...), an nn.skip(...), or a "
            "function of an array."
        )


def _name(layer: Any) -> str:
    if isinstance(layer, Skip):
        return f"skip({', '.join(map(_name, layer.layers))})"
    name: str = layer.name if isinstance(layer, LayerDescription) else getattr(layer, "__name__", type(layer).__name__)
    return name
