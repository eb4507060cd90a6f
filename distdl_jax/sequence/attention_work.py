"""What an attention computes: the products of queries, keys and values, and the weights between them."""

from __future__ import annotations

from typing import NamedTuple

from distdl_jax.plans.work import Work


class AttentionSize(NamedTuple):
    """How much one worker's queries look at: numbers of samples, heads, features of a head, queries and keys.

    - `itemsize`: bytes of a number, in which it is computed.
    """

    samples: int
    heads: int
    features: int
    queries: int
    keys: int
    itemsize: int

    @property
    def scores(self) -> int:
        """The number of scores, one for each head, query and key."""
        return self.samples * self.heads * self.queries * self.keys

    @property
    def stored(self) -> int:
        """The bytes that are stored until the backward pass: queries, keys, values, outputs, logarithms of sums."""
        rows = self.samples * self.heads
        inputs = (2 * self.queries + 2 * self.keys) * self.features
        return rows * (inputs + self.queries) * self.itemsize

    def products(self, saved: int = 0) -> Work:
        """Return the work of both products; backward the scores are computed again, and there are four gradients."""
        one = 2 * self.scores * self.features
        inputs = self.samples * self.heads * self.features * (self.queries + 2 * self.keys)
        outputs = self.samples * self.heads * self.features * self.queries
        read, written = ((n + self.scores) * self.itemsize for n in (inputs, outputs))
        shape = (self.queries, self.features, self.keys)
        return Work("matrix product", 2 * one, 5 * one, 0, read, written, saved=saved, shape=shape)

    def weights(self) -> Work:
        """Return the work of the weights: scores are scaled, and exponentials of their distance to the largest."""
        size = self.scores * self.itemsize
        return Work("elementwise", 4 * self.scores, 5 * self.scores, 0, size, size)
