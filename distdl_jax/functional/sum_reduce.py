"""Sum-reduce: the sum of a team's subtensors on its root, the adjoint of broadcast.

Source: the DistDL documentation, "broadcast" and "backends"; Hewett and Grady (2020).
"""

from __future__ import annotations

from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.broadcast import broadcast_rule, plan_replication, run_replication
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.broadcasting import BroadcastRule
from distdl_jax.transports.agreement import compared
from distdl_jax.validation import checked_boolean


def sum_rule(
    P_x: Partition, P_y: Partition, transpose_src: bool = False, transpose_dest: bool = False
) -> BroadcastRule:
    """Return the broadcast from `P_y` to `P_x`, of which their sum-reduction is the adjoint."""
    src, dest = checked_boolean("transpose_src", transpose_src), checked_boolean("transpose_dest", transpose_dest)
    try:
        return broadcast_rule(P_y, P_x, dest, src)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"To sum from P_x to P_y, P_y must broadcast to P_x. {error}") from None


def plan_sum_reduce(
    shape_dtypes: ShapeDtypes,
    P_x: Partition,
    P_y: Partition,
    *,
    transpose_src: bool = False,
    transpose_dest: bool = False,
    preserve_batch: bool = True,
) -> MovementPlan:
    """Plan `sum_reduce` from the shapes and dtypes on the workers of both partitions, and perhaps of more."""
    rule = sum_rule(P_x, P_y, transpose_src, transpose_dest)
    return plan_replication(shape_dtypes, rule, P_x, P_y, is_broadcast=False, preserve_batch=preserve_batch)


@compared
def sum_reduce(
    x: Array,
    P_x: Partition,
    P_y: Partition,
    *,
    transpose_src: bool = False,
    transpose_dest: bool = False,
    preserve_batch: bool = True,
) -> Array:
    """Sum the subtensors of `x` on `P_x` onto `P_y`, along the dimensions in which `P_y` has one worker.

    The broadcast from P_y to P_x read backwards, and its adjoint: with P_y of shape q_0 x ... x q_{E-1}, E <= D,
    every q, counted from the last dimension, is 1 or equal to P_x's size there. The worker of P_y at an index gets
    the sum over the workers of P_x that agree with it in every dimension in which P_y has more than one worker. The
    adjoint of this is `broadcast(dy, P_y, P_x)`.

    **Arguments:**

    - `x`: this worker's subtensor where it is in P_x, of the same shape and dtype as all that it is summed with;
      elsewhere a zero-volume array, floating or complex exactly if the data is. Half precisions are summed in
      float32 and rounded once; the sum of booleans is their "or".
    - `P_x`, `P_y`: the partitions that the terms are on and the sums go to. A worker of P_y need not be a source.
    - `transpose_src`, `transpose_dest`: count the worker (i, j) of P_x, or of P_y, as (j, i) (the index reversed).
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    **Returns:** in P_y the sum; in P_x only, a zero-volume array of the data's dtype; in neither, `x`.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where the
    shapes don't fit; `PlanError` where the terms of a sum differ in shape or dtype, or a placeholder is not of the
    data's kind.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition()
    ...     x = jnp.array([10**P.rank])
    ...     return dj.functional.sum_reduce(x, P.grid([2, 2]), P.grid([1, 2])).tolist()
    >>> dj.simulate(4, program)
    [[101], [1010], [[]], [[]]]

    Source: DistDL documentation, "broadcast" and "backends".
    """
    check_partitions(P_x=P_x, P_y=P_y)
    preserve_batch = checked_boolean("preserve_batch", preserve_batch)
    rule = sum_rule(P_x, P_y, transpose_src, transpose_dest)
    return run_replication(x, rule, P_x, P_y, is_broadcast=False, preserve_batch=preserve_batch)
