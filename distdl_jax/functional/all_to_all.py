"""All-to-all: the workers along one dimension of a tensor go to another dimension."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.plan import ShapeDtypes, plan_and_run
from distdl_jax.functional.repartition import RepartitionPlan, plan_repartition
from distdl_jax.partitions.partition import CartesianPartition, Partition, check_partitions
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.transports.agreement import compared
from distdl_jax.validation import checked_axis


def plan_all_to_all(shape_dtypes: ShapeDtypes, P_x: Partition, split_axis: int, concat_axis: int) -> RepartitionPlan:
    """Plan `all_to_all` from the shapes and dtypes on the workers of P_x, and perhaps of more."""
    P_y = all_to_all_partition(P_x, split_axis, concat_axis)
    return replace(plan_repartition(shape_dtypes, P_x, P_y), name="all_to_all")


def all_to_all_partition(P_x: Partition, split_axis: int, concat_axis: int) -> CartesianPartition:
    """Return the partition on which `all_to_all` leaves its output: the workers of P_x on another grid.

    **Raises:** `InvalidArgumentError` for a dimension that P_x doesn't have, or one dimension twice.
    """
    check_partitions(P_x=P_x)
    split, concat = (
        checked_axis("split_axis", split_axis, P_x.shape),
        checked_axis("concat_axis", concat_axis, P_x.shape),
    )
    if split == concat:
        raise InvalidArgumentError(
            f"`split_axis` (={split_axis}) and `concat_axis` (={concat_axis}) must be two different dimensions of the "
            f"partition ({shape_text(P_x.shape)})."
        )
    others = np.delete(np.arange(P_x.dim), concat)
    place = int(np.searchsorted(others, split))
    # Directly behind those that are along `split` already, to be one dimension with them.
    order = np.insert(others, place + 1, concat)
    ranks = np.arange(P_x.size).reshape(P_x.shape).transpose(order).ravel()
    shape = list(P_x.shape)
    shape[split], shape[concat] = shape[split] * shape[concat], 1
    return P_x.grid(shape, ranks.tolist())


@compared
def all_to_all(x: Array, P_x: Partition, split_axis: int, concat_axis: int) -> Array:
    """Split `x` along `split_axis` over the workers that hold blocks along `concat_axis`, and put those side by side.

    With p workers along `concat_axis` of P_x and q along `split_axis` (1, as a rule), the output has the whole length
    along `concat_axis`, and is in balanced blocks over q p workers along `split_axis`: the one at (i, j) there is
    number i p + j. It is `jax.lax.all_to_all(..., tiled=True)` along the workers of `concat_axis`, for blocks of any
    length: what each worker has for each other one goes there. Seen as one global tensor, it is a repartition from P_x
    to `nn.AllToAll(P_x, split_axis, concat_axis).output_partition`. The adjoint is the movement back.

    *Tokens and experts*: let each worker have a buffer of experts x slots x features for the tokens that it sends. Side
    by side these are one tensor, whose slots are split. `all_to_all(buffer, P_x, split_axis=0, concat_axis=1)`, with
    P_x 1 x p x 1, gives each worker all slots of its experts.

    **Arguments:**

    - `x`: this worker's block on P_x, of any dtype; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition, of as many dimensions as the tensor.
    - `split_axis`: the dimension that is split afterwards. Negative ones count from the end.
    - `concat_axis`: the dimension that is split before, and whole afterwards.

    **Returns:** this worker's block of the output; outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, for a dimension that P_x doesn't have, or one dimension twice;
    `PlanError`, on every worker of P_x, where the blocks don't form a grid, or differ in dtype.

    A worker sends a part of (p - 1) / p of its block, in p - 1 messages. Where q is above 1 and doesn't fit the length,
    some of it goes to workers at other places along `split_axis`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2])
    ...     x = dj.TensorSpec((2, 3), P).block(jnp.arange(6).reshape(2, 3))
    ...     return x.tolist(), dj.functional.all_to_all(x, P, split_axis=0, concat_axis=1).tolist()
    >>> dj.simulate(2, program)
    [([[0, 1], [3, 4]], [[0, 1, 2]]), ([[2], [5]], [[3, 4, 5]])]

    Source: MPI's all-to-all, as `jax.lax.all_to_all` has it; Hewett and Grady (2020), generalised all-to-all.
    """
    P_y = all_to_all_partition(P_x, split_axis, concat_axis)
    label = f"all_to_all from {P_x.describe()} to {P_y.describe()}"
    plan = partial(plan_all_to_all, P_x=P_x, split_axis=split_axis, concat_axis=concat_axis)
    return plan_and_run(P_x.world, tuple(sorted(P_x.ranks)), label, plan, x)
