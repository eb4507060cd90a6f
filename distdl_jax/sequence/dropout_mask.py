"""Which weights of an attention are dropped: the same whatever the partition."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.initialization import initialize_block
from distdl_jax.plans.decomposition import Range
from distdl_jax.random import standard_uniform


@dataclass(frozen=True)
class Dropping:
    """Weights are set to 0 with probability `p`, and the others divided by 1 - p.

    The weights that are kept are those of `jax.random.bernoulli(key, 1 - p, shape)`, for the whole batch, all heads,
    queries and keys: `shape`. - `samples`, `heads`, `queries`: those that this worker has.
    """

    p: float
    shape: tuple[int, int, int, int]
    samples: Range
    heads: Range
    queries: Range

    def factors(self, key: Array, block: int, first: int, n: int) -> Array:
        """What the weights of `n` keys are multiplied with, from the one that is `first` in the block from `block` on.

        samples x heads x queries x keys.
        """
        keys = (block + first, block + first + n)
        box = (self.samples, self.heads, self.queries, keys)
        numbers = initialize_block(standard_uniform, key, self.shape, box, np.dtype(jnp.result_type(float)))
        return (numbers < 1 - self.p) / (1 - self.p)
