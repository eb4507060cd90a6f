"""Weight and bias of an operation that multiplies: who holds them, and their movement to the workers that use them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.functional.all_gather import GatherPlan
from distdl_jax.functional.block_checks import common_dtype, owned_grid
from distdl_jax.functional.box_exchange import joined_slices
from distdl_jax.functional.broadcast import plan_broadcast
from distdl_jax.functional.halo_exchange import plan_ranges
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes, taking_part
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.alike import derived
from distdl_jax.plans.decomposition import balanced_ranges
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import Workers, World


@dataclass(frozen=True)
class WeightPartitions:
    """The partitions of weight and bias, if workers multiply on P_n x P_out x P_in x features, the partition `work`.

    Weights are the same along batch and features, so they live on the first slice of `work`, and are broadcast from
    there. Alternatively they are cut along their first dimension over all workers that would get copies, and gathered.

    - `sharded`: whether they are cut in this way.
    - `inputs_first`: whether the weight is n_in x n_out, not n_out x n_in.
    """

    work: Partition
    sharded: bool = False
    inputs_first: bool = False

    @cached_property
    def stored(self) -> Partition:
        """The workers that hold the weight, in a shape that broadcasts to `work`: 1 x P_out x P_in x 1 x ... x 1."""
        p_out, p_in, _ = self._grid.shape
        return self._partition(self._grid[:, :, 0], [1, p_out, p_in, *(1,) * (self.work.dim - 3)])

    @cached_property
    def weight(self) -> Partition:
        """P_out x P_in x 1 x ... x 1, or P_in x P_out; the first dimension times `shards` if they are cut."""
        grid = self._grid.swapaxes(0, 1) if self.inputs_first else self._grid
        rows, columns, _ = grid.shape
        shape = [rows * self.shards, columns, *(1,) * (self.work.dim - 3)]
        return self._partition(grid[:, :, : self.shards].swapaxes(1, 2), shape)

    @cached_property
    def bias(self) -> Partition:
        """P_out, the first of the weight's workers along P_in; multiplied by `shards` if they are cut."""
        return self._partition(self._grid[:, 0, : self.shards], [len(self._grid) * self.shards])

    @property
    def shards(self) -> int:
        """The number of pieces into which a block is cut."""
        return self._grid.shape[2] if self.sharded else 1

    @cached_property
    def _grid(self) -> np.ndarray:
        """The ranks in `work`, P_out x P_in x copies."""
        _, p_out, p_in, *_ = shape = self.work.shape
        return np.moveaxis(np.arange(self.work.size).reshape(shape), 0, 2).reshape(p_out, p_in, -1)

    def _partition(self, ranks: np.ndarray, shape: list[int]) -> Partition:
        return self.work.grid(shape, ranks.ravel().tolist())


@dataclass(frozen=True)
class WeightPlan:
    """The movement of weight and bias to the workers that multiply; here they have them already, so nothing moves.

    - `dtypes`: of the blocks of "weight", and of "bias" if there is one. Placeholders may have another dtype.
    """

    dtypes: Mapping[str, np.dtype] = field(hash=False)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the copies of the weight, and of their placeholders."""
        return self.dtypes["weight"]

    def run(self, world: World, params: Mapping[str, Array], shape: tuple[int, ...]) -> tuple[Array, Array | None]:
        """Return this worker's copy of its weight, of `shape`, and of its bias.

        On workers with an index other than 0 along P_in the bias is empty. On workers that don't multiply: two
        zero-volume arrays.
        """
        return params["weight"], params["bias"] if "bias" in self.dtypes else None


@dataclass(frozen=True)
class BroadcastWeightPlan(WeightPlan):
    """The movement of parameters that live on some of the workers that multiply, or on others.

    - `movement`: moves both in one message.
    - `multiply`: the world ranks of the workers that multiply.
    """

    movement: MovementPlan
    multiply: Workers

    def run(self, world: World, params: Mapping[str, Array], shape: tuple[int, ...]) -> tuple[Array, Array | None]:
        """Return this worker's copies; see `WeightPlan.run`."""
        together = reduce(jnp.promote_types, self.dtypes.values())
        if "bias" not in self.dtypes:  # unchanged: another shape would need a copy
            copies = self.movement.run(world, tie(params["weight"].astype(together), *params.values()))
            return copies, copies if world.rank not in self.multiply else None
        flat = [params[name].reshape(-1).astype(together) for name in self.dtypes]
        packed = joined_slices([(param, 0, param.size) for param in flat], 0)
        packed = self.movement.run(world, tie(packed, *params.values()))
        if world.rank not in self.multiply:
            return packed, packed
        size = math.prod(shape)
        copies = packed[:size].reshape(shape).astype(self.dtypes["weight"])
        return copies, joined_slices([(packed, size, packed.size)], 0).astype(self.dtypes["bias"])


@dataclass(frozen=True)
class GatheredWeightPlan(WeightPlan):
    """The movement of sharded parameters.

    - `gathered`: the movement of each parameter, between all workers that hold a piece of it.
    """

    gathered: Mapping[str, MovementPlan] = field(hash=False)

    def run(self, world: World, params: Mapping[str, Array], shape: tuple[int, ...]) -> tuple[Array, Array | None]:
        """Return this worker's copies; see `WeightPlan.run`."""
        # All workers differentiate with respect to everything that any of them does.
        copies = {name: plan.run(world, tie(params[name], *params.values())) for name, plan in self.gathered.items()}
        return copies["weight"], copies.get("bias")


def plan_weights(params: Mapping[str, ShapeDtypes], partitions: WeightPartitions) -> WeightPlan:
    """Plan the movement of "weight", and of "bias" if there is one, to the workers that multiply.

    `params` are the blocks of each, by name, of all workers of the operation.

    **Raises:** `PlanError` if the blocks of a parameter differ in dtype, or placeholders don't match.
    """
    owners = {name: getattr(partitions, name) for name in params}
    dtypes = {name: common_dtype(_argument(name), blocks, owners[name].ranks) for name, blocks in params.items()}
    if partitions.shards > 1:
        gathered = {name: _gathering(name, params[name], P, partitions.shards) for name, P in owners.items()}
        return GatheredWeightPlan(dtypes, gathered)
    if partitions.stored.ranks == partitions.work.ranks:
        return WeightPlan(dtypes)
    together = np.dtype(reduce(jnp.promote_types, dtypes.values()))

    def packed(worker: int) -> ShapeDtype:
        sizes = [blocks[worker].size for blocks in params.values()]
        return ShapeDtype((sum(sizes),) if len(sizes) > 1 else params["weight"][worker].shape, together)

    blocks = derived(packed, *params.values())
    movement = plan_broadcast(blocks, partitions.stored, partitions.work, preserve_batch=False)
    return BroadcastWeightPlan(dtypes, movement, partitions.work.ranks)


def _gathering(name: str, pieces: ShapeDtypes, P: Partition, shards: int) -> MovementPlan:
    """Plan the movement that gives each worker of P the whole block of which it holds one of `shards` pieces."""
    owned = owned_grid(_argument(name), P, pieces)
    if P.shape[0] == shards:  # a single block, so every worker gathers all of its pieces
        dtype = common_dtype(_argument(name), pieces, P.ranks)
        return GatherPlan("parameters", taking_part(pieces, P.ranks), dtype, owned, (0,), gathers=True)
    rows = balanced_ranges(owned.extent[0], P.shape[0] // shards)
    needed = tuple(block for block in rows for _ in range(shards))
    return plan_ranges("parameters", pieces, P, Halos(owned, (needed, *owned.ranges[1:])))


def _argument(name: str) -> str:
    """Return a parameter's name as users write it."""
    return f'params["{name}"]'
