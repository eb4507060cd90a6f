"""Which samples are in which batch: from a key, an epoch and a number of samples alone, so the same on every worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Place(NamedTuple):
    """Where a run through the data is: in which epoch, and which batch of it is next."""

    epoch: int
    batch: int


class Order(NamedTuple):
    """The order of `n` samples, in batches of `size`.

    - `words`: the random key's 32-bit words; None for the order of the samples themselves.
    - `drop_last`: whether an epoch ends before a batch that would be smaller.

    >>> order = Order(5, 2, None, False)
    >>> order.batches, order.rows(Place(0, 2)).tolist(), order.after(Place(0, 2))
    (3, [4], Place(epoch=1, batch=0))
    """

    n: int
    size: int
    words: Sequence[int] | None
    drop_last: bool

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        return self.n // self.size if self.drop_last else -(-self.n // self.size)

    def epoch(self, epoch: int) -> np.ndarray[Any, Any]:
        """The numbers of all samples in the order of an epoch.

        Sorted by the raw numbers of a Philox generator, which numpy promises never to change.
        """
        if self.words is None:
            return np.arange(self.n)
        words = [*self.words, 0, 0, 0, 0][:4]
        key = [words[0] | words[1] << 32, words[2] | words[3] << 32]
        generator = np.random.Philox(counter=[0, 0, 0, epoch], key=np.array(key, np.uint64))
        return np.argsort(generator.random_raw(self.n), kind="stable")

    def rows(self, place: Place) -> np.ndarray[Any, Any]:
        """The samples of one batch."""
        return self.epoch(place.epoch)[place.batch * self.size : (place.batch + 1) * self.size]

    def after(self, place: Place) -> Place:
        """The place after a batch."""
        return Place(place.epoch, place.batch + 1) if place.batch + 1 < self.batches else Place(place.epoch + 1, 0)


def runs_of(rows: np.ndarray[Any, Any]) -> Iterator[tuple[int, int, slice]]:
    """The samples in ascending order, those that follow each other at once: first, last + 1, and where they go.

    `rows[order[where]]` are those of a run, with `order` being that which sorts the rows.

    >>> list(runs_of(np.array([7, 2, 3])))
    [(2, 4, slice(0, 2, None)), (7, 8, slice(2, 3, None))]
    """
    ascending = np.sort(rows)
    ends = [*(np.flatnonzero(np.diff(ascending) != 1) + 1).tolist(), len(ascending)]
    begin = 0
    for end in ends:
        if end > begin:
            yield int(ascending[begin]), int(ascending[end - 1]) + 1, slice(begin, end)
        begin = end
