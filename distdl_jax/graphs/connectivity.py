"""The edges of a mesh."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.functional.rows import distinct


def edges_of_cells(cells: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges of a mesh, once in each direction, as senders and receivers, sorted by receiver.

    Two nodes are neighbours if both are corners of a cell: for triangles and tetrahedra that gives the edges, for cells
    with more corners the diagonals too.

    In this order balanced blocks of edges are mostly on the workers that own the receivers, if nodes are balanced too.

    **Arguments:**

    - `cells`: the numbers of each cell's corners, m x k integers.

    **Returns:** the numbers of the senders and of the receivers, two arrays with an entry for each directed edge.

    **Raises:** `InvalidTypeError` if `cells` does not hold integers; `InvalidArgumentError` if it does not have two
    dimensions, or holds a negative number.

    >>> senders, receivers = edges_of_cells([[0, 1, 2], [2, 1, 3]])
    >>> senders.tolist(), receivers.tolist()
    ([1, 2, 0, 2, 3, 0, 1, 3, 1, 2], [0, 0, 1, 1, 1, 2, 2, 2, 3, 3])
    """
    corners = np.asarray(cells)
    if not np.issubdtype(corners.dtype, np.integer):
        raise InvalidTypeError(f"`cells` (of dtype {corners.dtype}) must hold integers, the numbers of nodes.")
    if corners.ndim != 2 or corners.shape[1] < 2 or corners.size == 0 or corners.min() < 0:
        raise InvalidArgumentError(
            f"`cells` (of shape {corners.shape}) must hold, for each of one or more cells, the numbers of two or more "
            "corners, 0 or more."
        )
    n = int(corners.max()) + 1
    corners = corners.astype(np.int64)
    pairs = [corners[:, a] * n + corners[:, b] for a, b in permutations(range(corners.shape[1]), 2)]
    receivers, senders = np.divmod(distinct(np.concatenate(pairs)), n)
    different = senders != receivers
    return senders[different], receivers[different]
