"""The network of the chosen grids: layers on their partitions, with repartitions between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distdl_jax.advice.graph import Graph, Shape
from distdl_jax.nn.data_movement import Repartition
from distdl_jax.nn.descriptions import LayerDescription, Skip
from distdl_jax.nn.residual import Residual
from distdl_jax.nn.sequential import Sequential
from distdl_jax.partition import Partition


class Builder:
    """Makes the layers of a described network on the first workers of `P`, node by node on `grids`."""

    def __init__(self, graph: Graph, grids: Sequence[Shape], P: Partition) -> None:
        self._graph, self._grids, self._P = graph, grids, P
        self._shapes = {piece.place: piece.x_shape for piece in graph.pieces}
        self._grid = grids[0]

    def network(self) -> Sequential:
        """Return the network; it takes its input on the grid of node 0."""
        return Sequential(*self._built(self._graph.layers, ""))

    def _built(self, layers: Sequence[Any], before: str) -> list[Callable[..., Any]]:
        found: list[Callable[..., Any]] = []
        for number, layer in enumerate(layers):
            place = f"{before}{number}"
            match layer:
                case Skip():
                    found.append(self._residual(layer, place))
                case LayerDescription():
                    if not layer.follows:
                        found += self._moved(self._grids[self._graph.node_of[place]])
                    found.append(layer.layer(self._P.grid(self._grid), self._shapes[place]))
                    self._grid = found[-1].output_partition.shape  # type: ignore[attr-defined]
                case _:
                    found.append(layer)
        return found

    def _residual(self, skip: Skip, place: str) -> Residual:
        start = self._grid
        body = Sequential(*self._built(skip.layers, f"{place}."))
        return Residual(body, None if start == self._grid else self._repartition(start))

    def _moved(self, grid: Shape) -> list[Repartition]:
        """Return the repartition to a grid, where there is another one; the next layer takes its input from it."""
        start, self._grid = self._grid, grid
        return [] if start == grid else [self._repartition(start)]

    def _repartition(self, start: Shape) -> Repartition:
        """Return the repartition from a grid to the present one."""
        return Repartition(self._P.grid(start), self._P.grid(self._grid))  # type: ignore[abstract]
