"""The schedule of a ring: the keys that each worker along a split sequence processes in each round.

If queries see no later keys, worker i of p has i + 1 blocks of keys to process. For load balancing, workers that would
wait compute for others: in round d = 1, 2, ..., p // 2 the workers from d on fetch the keys of the worker d before
them, and the first d receive queries of the worker p - d after them, for their own keys. If d = p / 2 these are the
same pairs, and each computes half of the queries. So besides its own block each worker processes (p - 1) / 2 blocks,
instead of p - 1 for the last one.

In a zig-zag order of the sequence (blocks i and 2p - 1 - i on worker i) the work is balanced without sending queries.
But users would have to permute their sequences; and 4 workers with as many key heads as heads would send 18 blocks of
rows instead of 14, and 36 backward instead of 26: queries are half as large as keys and values, and gradients of keys
stay.

Source: Liu et al. (2023), arXiv:2310.01889 (ring); Li et al. (2023), arXiv:2310.03294 (load balancing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distdl_jax.plans.decomposition import Range


class Turn(NamedTuple):
    """The work of the workers along the sequence in one round, by index; ranges are positions in the sequence.

    - `keys`: the keys that each fetches from another worker. - `queries`: its own queries for these keys.
    - `lent`: its own queries that another worker processes. - `taken`: another worker's queries, for its own keys.
    - `near`, `far`: keys come from the worker `near` before it, `taken` queries from the worker `far` after it.
    """

    near: int
    far: int
    keys: tuple[Range, ...]
    queries: tuple[Range, ...]
    lent: tuple[Range, ...]
    taken: tuple[Range, ...]

    def share(self, i: int) -> tuple[Range, Range, Range, Range]:
        """Return `keys`, `queries`, `lent` and `taken` of the worker at index `i`."""
        return self.keys[i], self.queries[i], self.lent[i], self.taken[i]

    @property
    def is_balanced(self) -> bool:
        """Whether some worker computes for another."""
        return any(start < stop for start, stop in self.taken)


def sees(queries: Range, keys: Range, causal: bool) -> bool:
    """Say whether some of these queries see some of these keys.

    >>> sees((0, 3), (3, 6), causal=True), sees((0, 3), (2, 6), causal=True), sees((3, 3), (0, 6), causal=False)
    (False, True, False)
    """
    return queries[0] < queries[1] and keys[0] < keys[1] and not (causal and keys[0] >= queries[1])


def turns_of(queries: Sequence[Range], keys: Sequence[Range], causal: bool, balanced: bool) -> tuple[Turn, ...]:
    """Return the rounds after the first, in which all workers process their own keys.

    - `queries`, `keys`: the positions of each worker. - `causal`: whether queries see no later keys; both have the same
      positions then. - `balanced`: whether workers may then compute for others.

    >>> (turn,) = turns_of([(0, 3), (3, 6)], [(0, 3), (3, 6)], causal=True, balanced=True)
    >>> turn.keys[1], turn.queries[1], turn.lent[1], turn.taken[0]
    ((0, 3), (3, 4), (4, 6), (4, 6))
    """
    p = len(queries)
    if not (causal and balanced):
        return tuple(_turn(queries, keys, near, p, near if causal else 0) for near in range(1, p))
    return tuple(_turn(queries, keys, near, p - near, near) for near in range(1, p // 2 + 1))


def _turn(queries: Sequence[Range], keys: Sequence[Range], near: int, far: int, first: int) -> Turn:
    """Return the round in which workers from `first` on fetch keys, and workers from `far` on send queries."""
    p, looking, lent = len(queries), [], []
    for i, (start, stop) in enumerate(queries):
        # In the middle round of an even p both workers of a pair could do all of it: each does half of the queries.
        middle = (start + stop) // 2
        looking.append((start, (middle if near == far <= i else stop) if i >= first else start))
        lent.append((middle if near == far else start, stop) if i >= far else (stop, stop))
    fetched = (keys[(i - near) % p] if start < stop else (0, 0) for i, (start, stop) in enumerate(looking))
    taken = (lent[i + far] if i + far < p else (0, 0) for i in range(p))
    return Turn(near, far, tuple(fetched), tuple(looking), tuple(lent), tuple(taken))
