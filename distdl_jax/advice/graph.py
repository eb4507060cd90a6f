"""A described network as a graph: nodes are layers that share a grid of workers, links are tensors that may move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distdl_jax.costs.step_program import step_events
from distdl_jax.costs.traced import completed
from distdl_jax.errors import DistDLError, InvalidTypeError, PlanError
from distdl_jax.layer.layer import Layer
from distdl_jax.nn.descriptions import LayerDescription, Skip
from distdl_jax.nn.residual import ResidualPlan
from distdl_jax.nn.sequential import plan_function
from distdl_jax.partition import CartesianPartition, Partition
from distdl_jax.planning import planning_world
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.plans.work import Work
from distdl_jax.primitives.plan import PARAMS, Plan, ShapeDtypes, Unmoved, dependence

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A layer, a function, or the sum of a skip, with its input.

    - `place`: in the network: "3", or "3.1" within a skip.
    - `layer`: a description, a function, or the `Skip` whose two ways it adds.
    - `x_shape`, `y_shape`: global shapes of input and output.
    - `differentiates_x`: whether a gradient of its input is computed, since there are parameters before.
    - `saves_x`, `saves_y`: whether the backward pass reads its input, or its output.
    """

    place: str
    layer: Any
    x_shape: Shape
    y_shape: Shape = ()
    differentiates_x: bool = False
    saves_x: bool = False
    saves_y: bool = False

    @property
    def name(self) -> str:
        """What it is, in a word."""
        if isinstance(self.layer, Skip):
            return "sum"
        return self.layer.name if isinstance(self.layer, LayerDescription) else _name(self.layer)

    def on(self, P: CartesianPartition) -> Any:
        """Return the layer on a partition; a function as it is."""
        return self.layer.layer(P, self.x_shape) if isinstance(self.layer, LayerDescription) else self.layer

    def plan(self, layer: Any, x: ShapeDtypes, P: Partition) -> Plan:
        """Plan what `on` returned for `P`, for blocks `x`; a layer whose plan doesn't say its actions is traced."""
        if isinstance(layer, Skip):
            return ResidualPlan(x, Unmoved(x), None)
        if not isinstance(self.layer, LayerDescription):
            return plan_function(layer, x)
        return completed(layer, layer.plan(x), x, P.world, x[P.ranks[0]].dtype)


@dataclass(frozen=True)
class Node:
    """Layers on one grid: the first chooses it, the others stay where it leaves its output."""

    pieces: tuple[Piece, ...]
    x_shape: Shape


@dataclass(frozen=True)
class Link:
    """A tensor of `shape` between the nodes `source` and `target`, u < v, which moves where they have other grids.

    - `adds`: whether it goes to the output of `target`, to be added, and not to the input.
    - `differentiates`: whether a gradient moves back.
    """

    source: int
    target: int
    shape: Shape
    adds: bool
    differentiates: bool


class Graph:
    """The nodes and links of a network.

    - `layers`: the described network.
    - `nodes`: node 0 is the input, with the first layer, where it is in no skip.
    - `node_of`: the node of each described layer, by its place.
    """

    def __init__(self, layers: Sequence[Any], x_shape: Shape, dtype: np.dtype) -> None:
        self.layers, self.x_shape, self._dtype = tuple(layers), x_shape, dtype
        self._P, self._has_params = planning_world(1), False
        self.nodes, self.links, self.node_of = [Node((), x_shape)], list[Link](), dict[str, int]()
        self.y_shape = self._walk(self.layers, "", x_shape)

    @property
    def pieces(self) -> list[Piece]:
        """All pieces, node by node."""
        return [piece for node in self.nodes for piece in node.pieces]

    def _walk(self, layers: Sequence[Any], before: str, shape: Shape) -> Shape:
        """Add layers; return the shape of the output of the last."""
        for number, layer in enumerate(layers):
            place = f"{before}{number}"
            if isinstance(layer, Skip):
                shape = self._skip(layer, place, shape)
                continue
            _check(layer, place)
            piece = self._shaped(Piece(place, layer, shape, differentiates_x=self._has_params))
            is_first = not self.node_of and not before  # the input is where it takes it
            if isinstance(layer, LayerDescription) and not layer.follows and not is_first:
                self.links.append(Link(len(self.nodes) - 1, len(self.nodes), shape, False, piece.differentiates_x))
                self.nodes.append(Node((), shape))
            self._append(piece)
            if isinstance(layer, LayerDescription):
                self.node_of[place] = len(self.nodes) - 1
            shape = piece.y_shape
        return shape

    def _skip(self, skip: Skip, place: str, shape: Shape) -> Shape:
        source, differentiates = len(self.nodes) - 1, self._has_params
        y_shape = self._walk(skip.layers, f"{place}.", shape)
        if y_shape != shape:
            raise PlanError(
                f"`network[{place}]` is a skip: its layers must return an output of the shape of x, "
                f"{shape_text(shape)}, but return {shape_text(y_shape)}."
            )
        if (target := len(self.nodes) - 1) != source:
            self.links.append(Link(source, target, shape, True, differentiates))
        self._append(Piece(place, skip, shape, shape, differentiates_x=self._has_params))
        return shape

    def _append(self, piece: Piece) -> None:
        last = self.nodes[-1]
        self.nodes[-1] = replace(last, pieces=(*last.pieces, piece))

    def _shaped(self, piece: Piece) -> Piece:
        """Return the piece with what its plan on one worker says."""
        try:
            layer = piece.on(self._P.grid([1] * len(piece.x_shape)))
            plan = piece.plan(layer, {0: ShapeDtype(piece.x_shape, self._dtype)}, self._P)
            actions = plan.actions
        except (DistDLError, TypeError, ValueError) as error:
            raise PlanError(
                f"`network[{piece.place}]` ({piece.name}), of an input of {shape_text(piece.x_shape)}: {error}"
            ) from error
        work = [event.does for event in step_events(actions, 0) if isinstance(event.does, Work)]
        self._has_params |= dependence(actions) >= PARAMS
        return replace(
            piece,
            y_shape=plan.output(0).shape,
            saves_x=any(each.saves_x for each in work),
            saves_y=any(each.saves_y for each in work),
        )


def _check(layer: Any, place: str) -> None:
    """Refuse what is neither a description nor a function of an array."""
    if isinstance(layer, LayerDescription):
        return
    if isinstance(layer, Layer | type):
        name = layer.__name__ if isinstance(layer, type) else type(layer).__name__
        raise InvalidTypeError(
            f"`network[{place}]` is the layer {name}, but must be a description without partitions, which are chosen "
            f"here: nn.conv2d(...), nn.linear(...) and so on; or nn.describe({name}, ...), for any class, your own too."
        )
    if not callable(layer):
        raise InvalidTypeError(
            f"`network[{place}]` (={layer!r}) must be a description like nn.conv2d(...), an nn.skip(...), or a "
            "function of an array."
        )


def _name(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return name
