"""The partitions of layers' parameters, their movement to the workers that use them, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidTypeError, PlanError
from distdl_jax.functional.all_gather import GatherPlan
from distdl_jax.functional.all_sum_reduce import ReplicatedPlan, plan_replicated
from distdl_jax.functional.block_checks import check_placeholders, common_dtype, owned_grid
from distdl_jax.functional.box_exchange import joined_slices
from distdl_jax.functional.broadcast import plan_broadcast
from distdl_jax.functional.halo_exchange import plan_ranges
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes, taking_part
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.alike import derived, workers_of
from distdl_jax.plans.decomposition import balanced_ranges
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.world import Workers, World
from distdl_jax.transports.agreement import agree, shape_dtype_of, structure_text

Params = dict[str, Array]
Specs = Mapping[str, TensorSpec]

ParamShapeDtypes = Mapping[int, Mapping[str, ShapeDtype]]
"""The shapes and dtypes of the parameters' blocks, by world rank and name."""


@dataclass(frozen=True)
class ParameterPartitions:
    """The parameters of a layer whose workers form P_n x P_out x P_in x features, the partition `work`.

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

    def plan(self, params: ParamShapeDtypes, has_bias: bool) -> ParameterPlan:
        """Plan the movement of the parameters to the workers of `work`, from the shapes of all workers' blocks.

        **Raises:** `PlanError` if the blocks of a parameter differ in dtype, or placeholders don't match.
        """
        owners = {"weight": self.weight} | ({"bias": self.bias} if has_bias else {})
        dtypes = {
            name: common_dtype(f'params["{name}"]', _of_name(name, params), P.ranks) for name, P in owners.items()
        }
        if self.shards > 1:
            gathered = {name: self._gathering(name, params, P) for name, P in owners.items()}
            return GatheredParameterPlan(dtypes, gathered)
        if self.stored.ranks == self.work.ranks:
            return ParameterPlan(dtypes)
        together = np.dtype(reduce(jnp.promote_types, dtypes.values()))

        def packed(worker: int) -> ShapeDtype:
            blocks = params[worker]
            shape = (sum(blocks[name].size for name in dtypes),) if has_bias else blocks["weight"].shape
            return ShapeDtype(shape, together)

        movement = plan_broadcast(derived(packed, params), self.stored, self.work, preserve_batch=False)
        return BroadcastParameterPlan(dtypes, movement, self.work.ranks)

    def _gathering(self, name: str, params: ParamShapeDtypes, P: Partition) -> MovementPlan:
        """Plan the movement that gives each worker of P the whole block of which it holds a piece."""
        pieces = _of_name(name, params)
        owned = owned_grid(f'params["{name}"]', P, pieces)
        if P.shape[0] == self.shards:  # a single block, so every worker gathers all of its pieces
            of_owners = taking_part(pieces, P.ranks)
            dtype = common_dtype(f'params["{name}"]', pieces, P.ranks)
            return GatherPlan("parameters", of_owners, dtype, owned, (0,), gathers=True)
        rows = balanced_ranges(owned.extent[0], P.shape[0] // self.shards)
        needed = tuple(block for block in rows for _ in range(self.shards))
        return plan_ranges("parameters", pieces, P, Halos(owned, (needed, *owned.ranges[1:])))


@dataclass(frozen=True)
class ParameterPlan:
    """The movement of weight and bias to the workers that multiply; here they have them already, so nothing moves.

    - `dtypes`: of the blocks of "weight", and of "bias" if there is one. Placeholders may have another dtype.
    """

    dtypes: Mapping[str, np.dtype] = field(hash=False)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the copies of the weight, and of their placeholders."""
        return self.dtypes["weight"]

    def run(self, world: World, params: Params, shape: tuple[int, ...]) -> tuple[Array, Array | None]:
        """Return this worker's copy of its weight, of `shape`, and of its bias.

        On workers with an index other than 0 along P_in the bias is empty. On workers that don't multiply: two
        zero-volume arrays.
        """
        return params["weight"], params["bias"] if "bias" in self.dtypes else None


@dataclass(frozen=True)
class BroadcastParameterPlan(ParameterPlan):
    """The movement of parameters that live on some of the workers that multiply, or on others.

    - `movement`: moves both in one message.
    - `multiply`: the world ranks of the workers that multiply.
    """

    movement: MovementPlan
    multiply: Workers

    def run(self, world: World, params: Params, shape: tuple[int, ...]) -> tuple[Array, Array | None]:
        """Return this worker's copies; see `ParameterPlan.run`."""
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
class GatheredParameterPlan(ParameterPlan):
    """The movement of sharded parameters.

    - `gathered`: the movement of each parameter, between all workers that hold a piece of it.
    """

    gathered: Mapping[str, MovementPlan] = field(hash=False)

    def run(self, world: World, params: Params, shape: tuple[int, ...]) -> tuple[Array, Array | None]:
        """Return this worker's copies; see `ParameterPlan.run`."""
        # All workers differentiate with respect to everything that any of them does.
        copies = {name: plan.run(world, tie(params[name], *params.values())) for name, plan in self.gathered.items()}
        return copies["weight"], copies.get("bias")


def unboxed(params: Any) -> Any:
    """Return parameters, or a tuple of them, without enclosing flax variables."""
    params = params.get_value() if hasattr(params, "get_value") else params
    if not isinstance(params, Mapping):
        return params
    return {name: value.get_value() if hasattr(value, "get_value") else value for name, value in params.items()}


def spec_shapes(specs: Specs, workers: Workers, dtype: np.dtype) -> ParamShapeDtypes:
    """Return the shapes on `workers` of parameters of `dtype` with the given specs."""

    def of_worker(worker: int) -> dict[str, ShapeDtype]:
        return {name: ShapeDtype(spec.block_shapes.get(worker, (0,)), dtype) for name, spec in specs.items()}

    blocks = [spec.block_shapes for spec in specs.values()]
    everywhere = blocks and all(workers_of(shapes) == workers for shapes in blocks)
    return derived(of_worker, *blocks) if everywhere else {worker: of_worker(worker) for worker in workers}


def _of_name(name: str, params: ParamShapeDtypes) -> ShapeDtypes:
    """Return the shapes and dtypes of one parameter, by world rank."""
    return derived(lambda worker: params[worker][name], params)


def agree_on_shapes(
    world: World, team: Workers, label: str, specs: Specs, params: Params, x: Array
) -> tuple[ShapeDtypes, ParamShapeDtypes]:
    """Return the shapes of x and of the parameters `specs` on all workers of `team`: the only agreement of a call."""

    def contribute() -> tuple[ShapeDtype, dict[str, ShapeDtype]]:
        if not isinstance(params, Mapping):
            raise InvalidTypeError(
                f"`params` is {structure_text(params)}, but must be a dictionary of {sorted(specs)}, as `init` makes "
                "it."
            )
        blocks = {name: shape_dtype_of(_argument(str(name), specs), param) for name, param in params.items()}
        return shape_dtype_of("x", x), blocks

    def decide(pairs: dict[int, tuple[ShapeDtype, dict[str, ShapeDtype]]]) -> tuple[ShapeDtypes, ParamShapeDtypes]:
        return {worker: block for worker, (block, _) in pairs.items()}, {w: blocks for w, (_, blocks) in pairs.items()}

    shapes: tuple[ShapeDtypes, ParamShapeDtypes] = agree(world, team, label, contribute, decide)
    return shapes


def _argument(name: str, specs: Specs) -> str:
    """Return how a user writes the argument `name`: an entry of the parameters, or of the arguments along with them."""
    if name in specs:
        return f'params["{name}"]'
    of, *entry = name.split(".", 1)
    return f'{of}["{entry[0]}"]' if entry else name


def plan_replicated_params(params: ParamShapeDtypes, specs: Specs) -> dict[str, ReplicatedPlan]:
    """Plan the use of parameters with copies on several workers, as given by `specs`: their gradients are summed."""
    return {
        name: plan_replicated(_of_name(name, params), spec.partition, spec.replicated, f'params["{name}"]')
        for name, spec in specs.items()
    }


def check_params(params: ParamShapeDtypes, specs: Specs, argument: str = "params") -> None:
    """Reject parameters, or state, `argument`, that are not their workers' blocks, with one error on all."""
    for worker, blocks in params.items():
        for name, spec in specs.items():
            if name not in blocks:
                raise PlanError(
                    f'On worker {worker}: `{argument}` must hold "{name}" on every worker, but holds {sorted(blocks)}.'
                )
            expected = spec.block_shapes.get(worker)
            if expected is None:
                check_placeholders(f'{argument}["{name}"]', {worker: blocks[name]}, ())
            elif blocks[name].shape != expected:
                whole = f"{shape_text(spec.global_shape)} on {shape_text(spec.partition.shape)} workers"
                raise PlanError(
                    f'On worker {worker}: `{argument}["{name}"]` has shape {blocks[name].shape}, but this worker\'s '
                    f"block of {whole} is {expected}."
                )
