"""The parameters of layers: their shapes on all workers, the agreement of a call on them, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import Array

from distdl_jax.errors import InvalidTypeError, PlanError
from distdl_jax.functional.block_checks import check_placeholders
from distdl_jax.functional.copies import ReplicatedPlan, plan_replicated
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.alike import derived, workers_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.transports.agreement import agree, shape_dtype_of, structure_text
from distdl_jax.transports.world import Workers, World

Params = dict[str, Array]
Specs = Mapping[str, TensorSpec]

ParamShapeDtypes = Mapping[int, Mapping[str, ShapeDtype]]
"""The shapes and dtypes of the parameters' blocks, by world rank and name."""


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


def of_name(name: str, params: ParamShapeDtypes) -> ShapeDtypes:
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
        name: plan_replicated(of_name(name, params), spec.partition, spec.replicated, f'params["{name}"]')
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
