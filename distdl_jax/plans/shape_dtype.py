"""The shape and dtype of one worker's part of a tensor, from which plans are made."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from distdl_jax.plans.worker_ranks import ConsecutiveRanks, worker_ranks

if TYPE_CHECKING:
    import numpy as np


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as text.

    >>> shape_text((2, 3))
    '2 x 3'
    """
    return " x ".join(map(str, shape)) if shape else "()"


def listed(numbers: tuple[int, ...]) -> str:
    """Write a tuple of numbers as Python does; if there are many, only the first ones."""
    return str(numbers) if len(numbers) <= 16 else f"({', '.join(map(str, numbers[:12]))}, ... {len(numbers)} in all)"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return the ranks as text: 0-3 for a run of them.

    >>> ranks_text((0, 1, 2, 3)), ranks_text((0, 2, 4))
    ('0-3', '0, 2, 4')
    """
    if len(ranks) > 2 and isinstance(worker_ranks(ranks), ConsecutiveRanks):
        return f"{ranks[0]}-{ranks[-1]}"
    return listed(ranks).strip("(),")


class ShapeDtype(NamedTuple):
    """The shape and dtype of one worker's subtensor: a named tuple, from which plans are made.

    **Arguments:**

    - `shape`: a tuple of integers.
    - `dtype`: a numpy dtype.

    >>> import numpy
    >>> ShapeDtype((2, 3), numpy.dtype("float32"))
    float32[2, 3]
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def batched(self, n: int) -> ShapeDtype:
        """Return the shape and dtype of `n` of them, stacked in front."""
        return ShapeDtype((n, *self.shape), self.dtype)

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"
