"""Load balancing in a causal ring: a worker lends queries to another one, and gets their results back.

So nobody waits in a ring whose queries see no keys behind them (see `ring_schedule`). Forward, unfinished sums come
back; backward, the gradients of queries, while gradients of keys and values stay where they are made.
Source: Li et al. (2023), arXiv:2310.03294.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.functional.box_exchange import joined_slices
from distdl_jax.functional.collectives import accumulation_dtype
from distdl_jax.functional.halo_exchange import RangesPlan
from distdl_jax.nn.attention.online_softmax import Running, merged
from distdl_jax.plans.decomposition import Range
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.world import World

T = TypeVar("T")
"""Arrays."""


@dataclass(frozen=True)
class LoanMovements:
    """Movements between the workers that lend queries and those that take them; all but `queries` in the sums' dtype.

    - `queries`: to the borrower, forward. - `backward_inputs`: to the borrower, backward; see `backward_inputs`.
    - `sums`, `gradients`: the results of queries, and their gradients, back to the lender; see `send_back`.
    """

    queries: RangesPlan
    backward_inputs: RangesPlan
    sums: RangesPlan
    gradients: RangesPlan


@dataclass(frozen=True)
class Loan:
    """The places of the queries that one worker lends in a turn, and of another worker's that it takes; or none."""

    movements: LoanMovements
    lent: Range
    taken: Range


def send_back(world: World, plan: RangesPlan, results: Array, mine: Array) -> Array:
    """Return the results for this worker's places, from another worker, and send `results` for another's places there.

    - `mine`: what this worker computes before it waits, like `results` but for the rows. One of its rows goes in front,
      and stays: XLA's schedule, which knows no ties, would run a receive that has only an empty operand before the work
      that is to be done meanwhile.
    """
    shape = (results.shape[0], 1, *results.shape[2:])
    row = lax.slice_in_dim(mine, 0, 1, axis=1) if mine.shape[1] else tie(jnp.zeros(shape, results.dtype), mine)
    return plan.run(world, lax.concatenate([row, results], 1))


def backward_inputs(q: Array, dy: Array, log_sum: Array, delta: Array) -> Array:
    """Join what gradients are computed from, see `online_softmax.gradients`: n x queries x heads x (d + d + 2)."""
    wide = accumulation_dtype(np.dtype(q.dtype))
    sums = jnp.moveaxis(jnp.stack([log_sum, delta], -1), 1, 2)
    return jnp.concatenate([x.astype(wide) for x in (q, dy, sums)], -1)


def split_inputs(joined: Array) -> tuple[Array, Array, Array, Array]:
    """Split what `backward_inputs` joins."""
    d = joined.shape[-1] // 2 - 1
    q, dy, sums = jnp.split(joined, [d, 2 * d], -1)
    log_sum, delta = (lax.index_in_dim(jnp.moveaxis(sums, 2, 1), i, 3, False) for i in range(2))
    return q, dy, log_sum, delta


def side_by_side(running: Running) -> Array:
    """Join sums, as they travel: n x queries x heads x (d + 2)."""
    top, total, values = running
    return jnp.moveaxis(jnp.concatenate([values, top[..., None], total[..., None]], -1), 1, 2)


def merge_rows(running: Running, other_rows: Array, rows: Range) -> Running:
    """Merge into `running`, of all queries, the sums `other_rows`, from `side_by_side`, of the queries `rows`."""
    width = other_rows.shape[-1]
    values, top, total = jnp.split(jnp.moveaxis(other_rows, 1, 2), [width - 2, width - 1], -1)
    other = Running(lax.squeeze(top, (3,)), lax.squeeze(total, (3,)), values)
    return put(running, merged(cut(running, rows, 2), other), rows, 2)


def cut(tree: T, rows: Range, axis: int) -> T:
    """Return the `rows` of arrays."""
    return jax.tree.map(lambda x: joined_slices([(x, *rows)], axis), tree)


def put(tree: T, part: T, rows: Range, axis: int) -> T:
    """Return arrays with `part` in the place of their `rows`."""

    def of(whole: Array, part: Array) -> Array:
        size = whole.shape[axis]
        return joined_slices([(whole, 0, rows[0]), (part, 0, part.shape[axis]), (whole, rows[1], size)], axis)

    return jax.tree.map(of, tree, part)
