"""Lists of row numbers as values."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from distdl_jax.plans.messages import RowList, Start


class Rows(RowList):
    """Row numbers in an immutable array: equal and hashed as a value, with the same repr on every worker.

    >>> rows = Rows([[2, 0], [2, 1]])
    >>> rows.shape, rows == Rows(rows.array)
    ((2, 2), True)
    >>> rows
    row numbers (of shape 2 x 2, checksum 91820e2e)
    """

    __slots__ = ("_checksum", "array")

    def __init__(self, numbers: Any) -> None:
        wide = np.array(numbers, np.int64, order="C")
        small = bool(np.all(np.abs(wide) < 2**31))
        self.array: np.ndarray[Any, np.dtype[Any]] = wide.astype(np.int32 if small else np.int64)
        self.array.setflags(write=False)
        self._checksum = zlib.crc32(self.array.tobytes())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    @property
    def repeats(self) -> bool:
        """Whether one of the numbers, 0 or more, is in it more than once."""
        return bool(np.any(np.bincount(self.array.ravel()) > 1))

    @property
    def ascends(self) -> bool:
        """Whether no number is less than the one before."""
        return bool(np.all(np.diff(self.array.ravel()) >= 0))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        same = self._checksum == other._checksum and self.shape == other.shape
        return self is other or (same and np.array_equal(self.array, other.array))

    def __hash__(self) -> int:
        return hash((self.shape, self._checksum))

    def __repr__(self) -> str:
        return f"row numbers (of shape {' x '.join(map(str, self.shape))}, checksum {self._checksum:08x})"


def run_or_rows(numbers: np.ndarray) -> Start:
    """Return the first of numbers that follow each other, and else all of them.

    >>> run_or_rows(np.array([3, 4, 5])), run_or_rows(np.array([3, 5])).shape
    (3, (2,))
    """
    if len(numbers) and np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers))):
        return int(numbers[0])
    return Rows(numbers)


def numbers_of(start: Start, length: int) -> np.ndarray:
    """Return the numbers of `length` rows: `run_or_rows` read backwards."""
    numbers: np.ndarray = np.arange(start, start + length) if isinstance(start, int) else start.array
    return numbers


def distinct(numbers: np.ndarray) -> np.ndarray:
    """Return the different numbers, ascending; of many integers much faster than `np.unique`.

    >>> distinct(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    ascending = np.sort(numbers, axis=None)
    return ascending[np.diff(ascending, prepend=ascending[:1] - 1) != 0]
