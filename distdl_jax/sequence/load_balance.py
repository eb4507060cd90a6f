"""Work for other workers: queries go to where keys are, and what is made of them comes home.

So nobody waits in a ring whose queries see no keys behind them (see `turns`). Home go sums that are not finished yet;
on the way back the gradients of queries, while those of keys and values stay where they are made.
Source: Li et al. (2023), arXiv:2310.03294.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.plans.decomposition import Range
from distdl_jax.primitives.collectives import accumulation_dtype
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.primitives.packing import joined_slices
from distdl_jax.sequence.online_softmax import Running, merged
from distdl_jax.tracing.tie import tie
from distdl_jax.world import World

T = TypeVar("T")
"""Arrays."""


@dataclass(frozen=True)
class HelpMovements:
    """Between the workers that lend queries and those that take them; all but `queries` in the dtype of sums.

    - `queries`: the way there. - `told`: on the way back, with all that belongs to them, see the function.
    - `sums`, `gradients`: the way home of what is made of queries, and of their gradients; see `home`.
    """

    queries: RangesPlan
    told: RangesPlan
    sums: RangesPlan
    gradients: RangesPlan


@dataclass(frozen=True)
class Help:
    """What one worker lends and takes in a turn: places of its own queries, and of another worker's; or none."""

    movements: HelpMovements
    lent: Range
    taken: Range


def home(world: World, plan: RangesPlan, made: Array, mine: Array) -> Array:
    """What another worker made of this one's places, and `made`, of another worker's, to that one.

    - `mine`: what this worker makes of its own before it waits, like `made` but for its rows. One of these goes in
      front, and stays: XLA's schedule, which knows no ties, would have a receive that has only an empty operand come
      before the work that is to be done meanwhile.
    """
    shape = (made.shape[0], 1, *made.shape[2:])
    row = lax.slice_in_dim(mine, 0, 1, axis=1) if mine.shape[1] else tie(jnp.zeros(shape, made.dtype), mine)
    return plan.run(world, lax.concatenate([row, made], 1))


def told(q: Array, dy: Array, log_sum: Array, delta: Array) -> Array:
    """What makes gradients of queries, side by side: n x queries x heads x (d + d + 2). See `softmax.gradients`."""
    wide = accumulation_dtype(np.dtype(q.dtype))
    sums = jnp.moveaxis(jnp.stack([log_sum, delta], -1), 1, 2)
    return jnp.concatenate([x.astype(wide) for x in (q, dy, sums)], -1)


def parts_of(told: Array) -> tuple[Array, Array, Array, Array]:
    """The way back."""
    d = told.shape[-1] // 2 - 1
    q, dy, sums = jnp.split(told, [d, 2 * d], -1)
    log_sum, delta = (lax.index_in_dim(jnp.moveaxis(sums, 2, 1), i, 3, False) for i in range(2))
    return q, dy, log_sum, delta


def side_by_side(running: Running) -> Array:
    """Sums as they travel: n x queries x heads x (d + 2)."""
    top, total, values = running
    return jnp.moveaxis(jnp.concatenate([values, top[..., None], total[..., None]], -1), 1, 2)


def with_those(running: Running, come: Array, rows: Range) -> Running:
    """`running`, of all queries, after the keys that are in `come`, from `side_by_side`, of the queries `rows`."""
    values, top, total = jnp.split(jnp.moveaxis(come, 1, 2), [come.shape[-1] - 2, come.shape[-1] - 1], -1)
    other = Running(lax.squeeze(top, (3,)), lax.squeeze(total, (3,)), values)
    return put(running, merged(cut(running, rows, 2), other), rows, 2)


def cut(tree: T, rows: Range, axis: int) -> T:
    """The `rows` of arrays."""
    return jax.tree.map(lambda x: lax.slice_in_dim(x, *rows, axis=axis), tree)


def put(tree: T, part: T, rows: Range, axis: int) -> T:
    """Arrays with `part` in the place of their `rows`."""

    def of(whole: Array, part: Array) -> Array:
        size = whole.shape[axis]
        return joined_slices([(whole, 0, rows[0]), (part, 0, part.shape[axis]), (whole, rows[1], size)], axis)

    return jax.tree.map(of, tree, part)
