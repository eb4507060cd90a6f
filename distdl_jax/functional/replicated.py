"""Replicated values: tensors of which every worker of a team holds a copy.

The gradient of a replicated value is the sum of the partial gradients on its workers, and is replicated in its turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_sum_reduce import AllSumPlan, TeamMovement, teams_of
from distdl_jax.functional.plan import ShapeDtypes, taking_part
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.world import Workers, World
from distdl_jax.transports.agreement import exchange_named_shapes, is_array
from distdl_jax.validation import checked_axes
from distdl_jax.watchdog.programs.ir import Operation


class Copy(TeamMovement):
    """One worker's copy of a value that all of the team hold."""

    def run(self, world: World, x: Array) -> Array:
        return x

    def operations(self, worker: int, x: ShapeDtype) -> tuple[Operation, ...]:
        return ()


@dataclass(frozen=True)
class ReplicatedPlan(AllSumPlan):
    """Copies of a value on each of `teams`: nothing moves but the gradient, which is summed over the team."""

    name: str = field(default="tree", compare=False)

    def __post_init__(self) -> None:
        self._check(self.name, "hold copies of it")

    def _movement(self, team: Workers, differentiable: bool) -> Copy:
        return Copy(team, differentiable)


def plan_replicated(
    shape_dtypes: ShapeDtypes, P: Partition, axes: int | Sequence[int] | None = None, name: str = "tree"
) -> ReplicatedPlan:
    """Plan one leaf of `replicated` from the shapes and dtypes on the workers of P, or on some of its teams."""
    teams = teams_of(P, _along(P, axes), shape_dtypes)
    return ReplicatedPlan(teams, taking_part(shape_dtypes, *teams), name)


def replicated(tree: Any, P: Partition, axes: int | Sequence[int] | None = None) -> Any:
    """Return values of which all workers of `P` hold copies: their gradient is the sum over the copies.

    A parameter that every worker uses with its own data, the scale of a normalisation, say, is one variable with many
    copies. JAX gives each worker the gradient of its own copy; the optimiser needs the sum of them, the same on all
    workers, so that copies stay copies. With P of shape p_0 x ... x p_{D-1}, workers that agree in every index outside
    `axes` hold copies of one value:

        y_w = x_w,        the gradient on w = the sum of dy_u over all u that hold copies of x_w

    Nothing moves forward. Apply it to parameters, where a function begins to use them, not to values computed from
    other workers' data: the gradient of the output of an `all_sum_reduce` or a `broadcast` is summed already.

    **Arguments:**

    - `tree`: a pytree of arrays of any shape and dtype, the same on all workers of a team; leaves that are no arrays
      stay as they are. Outside P anything. The copies have to be equal: nobody compares their values.
    - `P`: the partition whose workers hold copies.
    - `axes`: the dimensions of P along which they do. Default: all, so that there is one value.

    **Returns:** `tree`.

    **Raises:** `InvalidArgumentError` for a dimension that P doesn't have; `PlanError`, on every worker of a team,
    where leaves differ in shape or dtype between its workers.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0])
    >>> float(jax.grad(lambda scale: (replicated(scale, P) * jax.numpy.arange(3.0)).sum())(2.0))
    3.0

    Source: Hewett and Grady (2020): the adjoint of a copy is a sum. `TensorSpec(..., replicated=...)` describes them.
    """
    check_partitions(P=P)
    along = _along(P, axes)
    team = P.create_allreduction_partition(along)
    if team.size <= 1:
        return tree
    paths_and_leaves, structure = jax.tree.flatten_with_path(tree)
    arrays = {f"tree{jax.tree_util.keystr(path)}": leaf for path, leaf in paths_and_leaves if is_array(leaf)}
    shapes = exchange_named_shapes(P.world, team.ranks, f"replicated on {P.describe()} along {along}", arrays)
    _check_names(shapes)
    plans = [
        plan_replicated({worker: of_worker[name] for worker, of_worker in shapes.items()}, P, along, name)
        for name in arrays
    ]
    copies = iter([plan.run(P.world, x) for plan, x in zip(plans, arrays.values(), strict=True)])
    return jax.tree.unflatten(structure, [next(copies) if is_array(leaf) else leaf for _, leaf in paths_and_leaves])


def _along(P: Partition, axes: int | Sequence[int] | None) -> tuple[int, ...]:
    return tuple(range(P.dim)) if axes is None else checked_axes("axes", axes, P.shape)


def _check_names(shapes: Mapping[int, Mapping[str, ShapeDtype]]) -> None:
    """Refuse trees that differ between the workers of a team."""
    first = min(shapes)
    for worker, of_worker in shapes.items():
        if different := sorted(of_worker.keys() ^ shapes[first].keys()):
            holder = worker if different[0] in of_worker else first
            raise PlanError(
                f"`tree` must have the same arrays on all workers that hold copies of it, but `{different[0]}` is on "
                f"worker {holder} and not on worker {worker + first - holder}."
            )
