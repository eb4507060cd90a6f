"""Edges of meshes, and orders of nodes in which blocks are compact."""

from __future__ import annotations

import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import graphs
from distdl_jax.plans.decomposition import balanced_ranges


def triangles(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions and the cells of n x n squares, each cut in two triangles."""
    rows, columns = np.meshgrid(*[np.arange(n + 1)] * 2, indexing="ij")
    number = rows * (n + 1) + columns
    a, b, c, d = (x.ravel() for x in (number[:-1, :-1], number[1:, :-1], number[:-1, 1:], number[1:, 1:]))
    return np.stack([rows.ravel(), columns.ravel()], 1), np.concatenate(
        [np.stack(t, 1) for t in ((a, b, c), (b, d, c))]
    )


def ghosts(cells: np.ndarray, nodes: int, parts: int) -> int:
    """Return how many rows move to workers that don't own them, for the ends of balanced blocks of edges."""
    pairs = np.stack(graphs.edges_of_cells(cells), 1)
    total = 0
    for (a, b), (first, last) in zip(balanced_ranges(nodes, parts), balanced_ranges(len(pairs), parts), strict=True):
        needed = np.unique(pairs[first:last])
        total += int(np.sum((needed < a) | (needed >= b)))
    return total


def test_edges_are_those_of_triangles() -> None:
    positions, cells = triangles(5)
    senders, receivers = graphs.edges_of_cells(cells)
    apart = positions[senders] - positions[receivers]
    kinds, counts = np.unique(apart, axis=0, return_counts=True)
    assert {tuple(kind) for kind in kinds.tolist()} == {(0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1)}
    assert sorted(counts.tolist()) == [25, 25, 30, 30, 30, 30]
    assert (np.diff(receivers) >= 0).all()


@pytest.mark.parametrize("parts", [1, 3, 4, 7])
def test_ordered_blocks_are_compact(parts: int) -> None:
    """Each has a share of the nodes that is as round as can be: beside an order that knows nothing, few rows move."""
    positions, cells = triangles(29)
    shuffled = np.random.default_rng(0).permutation(len(positions))
    positions, cells = positions[np.argsort(shuffled)], shuffled[cells]
    order = graphs.order_nodes(positions, parts)
    assert sorted(order.tolist()) == list(range(900))
    moved = ghosts(np.argsort(order)[cells], 900, parts)
    assert moved <= 2.5 * 30 * (parts - 1) and moved <= ghosts(cells, 900, parts) / 10
    assert (order == graphs.order_nodes(positions.astype(float), parts)).all()


def test_a_block_is_between_others() -> None:
    """Three workers, seven nodes on a line: 3, 2 and 2 of them, from one end to the other."""
    places = np.array([[4.0], [0.0], [6.0], [3.0], [1.0], [5.0], [2.0]])
    assert places[graphs.order_nodes(places, 3), 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert graphs.order_nodes(places[:2], 5).tolist() == [1, 0]
    assert graphs.order_nodes(places[:0], 2).tolist() == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: graphs.order_nodes([[0.0, np.nan]], 2),
            r"`positions` \(of shape \(1, 2\)\) must hold a finite number",
        ),
        (lambda: graphs.order_nodes([0.0], 2), r"`positions` \(of shape \(1,\)\)"),
        (lambda: graphs.order_nodes([[0.0]], 0), r"`parts` \(=0\) must be 1 or more"),
        (lambda: graphs.order_nodes([["a"]], 1), "`positions` .* must hold real numbers"),
        (lambda: graphs.edges_of_cells([[0.0, 1.0]]), "`cells` .of dtype float64. must hold integers"),
        (lambda: graphs.edges_of_cells([0, 1]), r"`cells` \(of shape \(2,\)\) must hold, for each"),
    ],
)
def test_wrong_arguments(call, words: str) -> None:
    with pytest.raises((dj.InvalidArgumentError, dj.InvalidTypeError), match=words):
        call()
