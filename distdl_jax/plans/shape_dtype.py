"""The shape and dtype of one worker's part of a tensor: what plans are made from."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as people write it.

    >>> shape_text((2, 3))
    '2 x 3'
    """
    return " x ".join(map(str, shape)) if shape else "()"


class ShapeDtype(NamedTuple):
    """The shape and dtype of one worker's subtensor.

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
        """That of `n` of them stacked in front."""
        return ShapeDtype((n, *self.shape), self.dtype)

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"
