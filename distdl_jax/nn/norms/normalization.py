"""What all normalisations share: y = (x - mean) / sqrt(var + eps), times a weight, plus a bias."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.layer.layer import purpose_of
from distdl_jax.layer.output_specs import output_spec
from distdl_jax.layer.parameters import (
    Params,
    ParamShapeDtypes,
    Specs,
    agree_on_shapes,
    check_params,
    spec_shapes,
    unboxed,
)
from distdl_jax.nn.norms.scaling import scaled
from distdl_jax.nn.norms.statistics import Entries, Moments
from distdl_jax.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import balanced_ranges
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.primitives.block_checks import common_dtype, owned_grid
from distdl_jax.primitives.collectives import accumulation_dtype
from distdl_jax.primitives.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.primitives.replicated import ReplicatedPlan, plan_replicated
from distdl_jax.static import Static
from distdl_jax.tensors import TensorSpec, zero_volume_tensor
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import checked_dtype, is_real
from distdl_jax.world import Workers, World

_STATE = "state."
"""What the workers call the entries of a state with, where they tell each other what they hold."""


@dataclass(frozen=True)
class NormPlan(Plan):
    """The plan of a normalisation.

    - `inputs`: what the workers hold of x.
    - `moments`: how they find mean and variance.
    - `of_params`: for each parameter, who holds copies of it.
    - `shape`: what a parameter's block is brought to, so that it broadcasts with x: -1 for its own length.
    - `dtype`: of the output.
    """

    inputs: ShapeDtypes = field(hash=False)
    moments: Moments
    of_params: Mapping[str, ReplicatedPlan] = field(hash=False)
    shape: tuple[int, ...] | None
    eps: float
    dtype: np.dtype

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.inputs))

    def output(self, worker: int) -> ShapeDtype:
        return ShapeDtype(self.inputs[worker].shape, self.dtype)

    def run(self, world: World, params: Params, x: Array) -> tuple[Array, Array, Array]:
        """This worker's block of the output, and mean and variance of its team."""
        mean, variance = self.moments.run(world, x)
        return self.normalised(world, params, x, mean, variance), mean, variance

    def normalised(self, world: World, params: Params, x: Array, mean: Array, variance: Array) -> Array:
        """x with the given mean and variance taken out, in the shape of the sums, and the parameters put in."""
        own = {name: plan.run(world, params[name]) for name, plan in self.of_params.items()}
        if x.size == 0:  # JAX drops what empty arrays depend on
            return tie(jnp.zeros(x.shape, self.dtype), x, mean, variance, *own.values())
        wide = self.moments.dtype
        of_y = {
            name: p.astype(wide) if self.shape is None else p.astype(wide).reshape(self.shape)
            for name, p in own.items()
        }
        scale = self.moments.spread(world.rank, lax.rsqrt(variance + np.asarray(self.eps, wide)))
        mean = self.moments.spread(world.rank, mean) if self.moments.centred else jnp.zeros((1,) * x.ndim, wide)
        weight = of_y.get("weight", jnp.ones((1,) * x.ndim, wide))
        if math.prod(np.broadcast_shapes(scale.shape, weight.shape)) < x.size:
            scale, weight = scale * weight, jnp.ones((1,) * x.ndim, wide)
        y = scaled(x.astype(wide), mean, scale, weight)
        return (y + of_y["bias"] if "bias" in of_y else y).astype(self.dtype)


class DistributedNorm(Static):
    """The base of the normalisations; each says what is averaged together, and what its parameters are like."""

    P_x: Partition
    eps: float
    centred: ClassVar[bool] = True

    @abstractmethod
    def param_specs(self) -> dict[str, TensorSpec]:
        """The global shape and the partition of each parameter; a worker holds the block that it needs, a copy."""

    @property
    @abstractmethod
    def _axes(self) -> tuple[int, ...]:
        """The dimensions that are averaged over."""

    @property
    @abstractmethod
    def _entries(self) -> Entries:
        """What is averaged together."""

    @property
    @abstractmethod
    def _sizes(self) -> dict[int, int]:
        """By dimension, the lengths of x that are known beforehand: there, blocks of x are balanced."""

    @property
    def _param_shape(self) -> tuple[int, ...] | None:
        """The shape in which a parameter's block broadcasts with x; None where it does as it is."""
        return (1, -1, *(1,) * (self.P_x.dim - 2))

    def init(self, key: Array | None = None, dtype: DTypeLike = jnp.float32) -> Params:
        """This worker's blocks of the initial parameters: weights are 1, biases 0; `key` is not looked at."""
        values = {"weight": 1, "bias": 0}
        return {name: filled(spec, values[name], dtype) for name, spec in self.param_specs().items()}

    def output_spec(self, x_spec: TensorSpec) -> TensorSpec:
        """The `TensorSpec` of the output, that of the input where it fits; nothing moves.

        **Raises:** `InvalidArgumentError` where `x_spec` is not on P_x, `PlanError` where x does not fit.
        """
        return output_spec(self, x_spec, self.P_x)

    def plan(self, x: ShapeDtypes, params: ParamShapeDtypes | None = None) -> NormPlan:
        """What the layer makes of what the workers of P_x hold: without a message, and the same on every worker.

        `x` and `params` are the shapes and dtypes by world rank; default for `params`: as `param_specs` says, in x's
        dtype.

        **Raises:** `PlanError` where x or a parameter does not fit.
        """
        x, specs = taking_part(x, self.P_x.ranks), self.param_specs()
        dtype = common_dtype("x", x, self.P_x.ranks)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise PlanError(f"`x` must hold real floating-point numbers to be normalised, but is {dtype}.")
        grid = owned_grid("x", self.P_x, x)
        for d, n in self._sizes.items():
            if grid.ranges[d] != balanced_ranges(n, self.P_x.shape[d]):
                lengths = [stop - start for start, stop in grid.ranges[d]]
                raise PlanError(
                    f"`x` must have length {n} in dimension {d}, balanced over {self.P_x.shape[d]} workers, but its "
                    f"blocks have lengths {lengths} there."
                )
        self._check_counts(grid.extent)
        held = spec_shapes(specs, self.P_x.ranks, dtype) if params is None else params
        check_params(held, specs)
        of_params = {
            name: plan_replicated(
                {worker: its[name] for worker, its in held.items()}, self.P_x, spec.replicated, f'params["{name}"]'
            )
            for name, spec in specs.items()
        }
        out = dtype
        for plan in of_params.values():
            out = np.dtype(jnp.promote_types(out, plan.inputs[self.P_x.ranks[0]].dtype))
        moments = Moments(grid, self._axes, self._entries, accumulation_dtype(out), self.centred)
        return NormPlan(x, moments, of_params, self._param_shape if specs else None, self.eps, out)

    def _check_counts(self, extent: tuple[int, ...]) -> None:
        """Refuse a tensor that can't be normalised."""

    def _planned(
        self, params: Params, x: Array, state: Mapping[str, Array] | None = None, state_specs: Specs | None = None
    ) -> tuple[NormPlan, Params]:
        """Return the plan of this call, from the one agreement of P_x's workers; and parameters without boxes.

        - `state`, `state_specs`: where there is one, and is to be checked.
        """
        params, of_state = unboxed(params), {_STATE + name: its for name, its in (state or {}).items()}
        team = tuple(sorted(self.P_x.ranks))
        told = {**params, **of_state} if isinstance(params, Mapping) else params
        of_x, held, _ = agree_on_shapes(self.P_x.world, team, purpose_of(self), self.param_specs(), told, x)
        if state_specs is not None:
            check_params({worker: _of_state(its) for worker, its in held.items()}, state_specs, "state")
        return self.plan(of_x, {worker: _of_params(its) for worker, its in held.items()}), params

    def __call__(self, params: Params, x: Array) -> Array:
        """Apply the layer.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block on P_x, perhaps empty; outside P_x a zero-volume array.

        **Returns:** this worker's block of the output, of x's shape; outside P_x, `x`.

        **Raises:** `PlanError`, on every worker of P_x, where x or a parameter does not fit.
        """
        if self.P_x.rank is None:
            return x
        with jax.named_scope(type(self).__name__):
            plan, params = self._planned(params, x)
            return plan.run(self.P_x.world, params, x)[0]

    def apply(self, params: Params, x: Array) -> Array:
        """The same as calling the layer."""
        return self(params, x)


def _of_params(held: Mapping[str, ShapeDtype]) -> dict[str, ShapeDtype]:
    return {name: its for name, its in held.items() if not name.startswith(_STATE)}


def _of_state(held: Mapping[str, ShapeDtype]) -> dict[str, ShapeDtype]:
    return {name.removeprefix(_STATE): its for name, its in held.items() if name.startswith(_STATE)}


def filled(spec: TensorSpec, value: float, dtype: DTypeLike) -> Array:
    """This worker's block of a constant tensor; zero-volume where it holds none."""
    found = checked_dtype("dtype", dtype)
    return zero_volume_tensor(dtype=found) if spec.box is None else jnp.full(spec.local_shape, value, found)


def check_norm(P_x: Any, eps: Any, least: int) -> None:
    """Refuse what is no partition of `least` dimensions or more, or no number of 0 or more."""
    check_partitions(P_x=P_x)
    if P_x.dim < least:
        raise InvalidArgumentError(
            f"`P_x` ({shape_text(P_x.shape)}) must have {least} dimensions or more: as many as x, those that are not "
            "split with one worker."
        )
    if not is_real(eps) or eps < 0:
        raise InvalidArgumentError(f"`eps` (={eps!r}) must be a number, 0 or more.")
