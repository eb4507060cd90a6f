"""One worker's arithmetic of a mixture of experts: the experts that its tokens choose, and their positions there.

Arrays are groups x tokens x ..., of this worker. An *assignment* is a token and one of the k experts that it chooses.
An expert accepts assignments of a group up to its capacity, in this order: the first choices of all tokens, then the
second ones, and so on; each by the tokens' row-major numbers in the whole tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.kernels.dtypes import accumulation_dtype


class Choices(NamedTuple):
    """The choices of tokens.

    - `experts`, `gates`: groups x tokens x k, the numbers of the experts, and the weights of their outputs.
    - `chosen`: groups x tokens x k x experts, 1 if that expert is chosen, otherwise 0.
    - `sums`: of the probability of each expert over all tokens, and last of the squared logarithm of the partition sum.
    """

    experts: Array
    gates: Array
    chosen: Array
    sums: Array


def capacity_of(tokens: int, experts: int, k: int, factor: float | None) -> int:
    """Return the number of assignments that an expert accepts from a group of `tokens`: all if `factor` is None.

    >>> capacity_of(10, 4, 1, 1.25), capacity_of(10, 4, 2, 1.0), capacity_of(3, 8, 1, 1.0), capacity_of(10, 4, 1, None)
    (4, 5, 1, 10)
    """
    if factor is None:
        return tokens
    # 1.1 * 10 is slightly more than 11.
    return min(tokens, max(1, math.ceil(factor * k * tokens / experts - 1e-9)))


def choose(tokens: Array, router: Array, k: int, normalize: bool) -> Choices:
    """Return the `k` most probable experts of each token, the first of equal ones; half precisions in float32.

    - `tokens`: groups x tokens x features. - `router`: experts x features.
    - `normalize`: whether the gates of a token sum to 1.
    """
    dtype = accumulation_dtype(np.dtype(jnp.promote_types(tokens.dtype, router.dtype)))
    logits = jnp.einsum("gte,ne->gtn", tokens.astype(dtype), router.astype(dtype))
    probabilities = jax.nn.softmax(logits)
    gates, experts = lax.top_k(probabilities, k)
    if normalize:
        gates = gates / gates.sum(-1, keepdims=True)
    squares = jnp.sum(jax.nn.logsumexp(logits, -1) ** 2)
    sums = jnp.concatenate([probabilities.sum((0, 1)), squares[None]])
    chosen = (experts[..., None] == np.arange(len(router), dtype=np.int32)).astype(np.int32)
    return Choices(experts, gates, chosen, sums)


def counts_of(chosen: Array, rows: int) -> Array:
    """Return how often each expert is chosen in each of this worker's `rows` of tokens: groups x rows x k x experts."""
    return _by_row(chosen, rows).sum(2, dtype=np.int32)


def places_within(chosen: Array) -> Array:
    """Return each assignment's position among this worker's of its group and expert: groups x tokens x k."""
    groups, tokens, k, experts = chosen.shape
    in_order = jnp.swapaxes(chosen, 1, 2).reshape(groups, k * tokens, experts)
    places = _of_chosen(_sum_before(in_order, 1), in_order)
    return jnp.swapaxes(places.reshape(groups, k, tokens), 1, 2)


def places_in_whole(chosen: Array, counts: Array, rows: np.ndarray) -> Array:
    """Return each assignment's position among all workers' of its group and expert: groups x tokens x k.

    - `counts`: the number of choices of each expert in each row of the whole tensor, groups x all rows x k x experts; a
      row is cut where workers' blocks end.
    - `rows`: the numbers of this worker's rows.
    """
    earlier_choices = _sum_before(counts.sum(1, dtype=np.int32), 1)[:, None, None]
    earlier_rows = _sum_before(counts, 1)[:, rows][:, :, None]
    by_row = _by_row(chosen, len(rows))
    places = _of_chosen(earlier_choices + earlier_rows + _sum_before(by_row, 2), by_row)
    return places.reshape(chosen.shape[:3])


def load_balancing_loss(counts: Array, probabilities: Array) -> Array:
    """Return the auxiliary loss: n times the sum over the n experts of share of assignments times mean probability.

    It is 1 if all experts are chosen equally often. The counts are not differentiated.

    Source: Fedus et al. (2021), arXiv:2101.03961, equation 4; for k above 1 each choice is an assignment.
    """
    counts = counts.astype(probabilities.dtype)
    return len(counts) * jnp.sum(counts / jnp.maximum(counts.sum(), 1) * probabilities)


def _by_row(chosen: Array, rows: int) -> Array:
    groups, tokens, k, experts = chosen.shape
    return chosen.reshape(groups, rows, tokens // max(rows, 1), k, experts)


def _sum_before(counts: Array, axis: int) -> Array:
    return jnp.cumsum(counts, axis, dtype=np.int32) - counts


def _of_chosen(places: Array, chosen: Array) -> Array:
    return (places * chosen).sum(-1, dtype=np.int32)
