"""`materialize`: a value that a compiled program computes in one place, and reads wherever it is used.

XLA computes an array again for each use where that saves memory traffic, and may round it otherwise: sums of products
once or twice. Two uses that must agree to the last bit, such as what is sent and what the answer is compared with, need
more than a barrier, which is gone before XLA decides that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.custom_jvp
def materialize(x: Array) -> Array:
    """Return `x` as the result of a loop, which XLA neither takes apart nor runs twice. The derivative is 1."""
    return _through_a_loop(x)


materialize.defjvp(lambda primals, tangents: (materialize(*primals), *tangents))


def _loop(x: Array) -> Array:
    # Of two passes, since XLA puts the body of a single one in the loop's place.
    return lax.fori_loop(0, 2, lambda i, y: jnp.where(i == 0, x, y), jnp.zeros_like(x))


_through_a_loop = jax.jit(_loop, inline=True)
