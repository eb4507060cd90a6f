"""The base of all normalisations: y = (x - mean) / sqrt(var + eps), times a weight, plus a bias."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.copies import ReplicatedPlan
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.functional.statistics import Along, Entries, Moments
from distdl_jax.kernels.dtypes import accumulation_dtype, in_own_width
from distdl_jax.nn.base.input_checks import real_grid
from distdl_jax.nn.base.layer import PartitionedLayer
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes, plan_replicated_params
from distdl_jax.partitions.partition import check_partitions
from distdl_jax.partitions.tensors import TensorSpec, zero_volume_tensor
from distdl_jax.plans.alike import derived
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import World
from distdl_jax.validation import check_key, checked_dtype, is_real


@dataclass(frozen=True)
class NormPlan(BlocksPlan):
    """The plan of a normalisation.

    - `moments`: how the workers compute mean and variance.
    - `of_params`: for each parameter, the workers that hold copies of it.
    - `param_dims`: the dimensions of x along which parameters extend.
    - `dtype`: of the output.
    """

    moments: Moments
    of_params: Mapping[str, ReplicatedPlan] = field(hash=False)
    param_dims: tuple[int, ...]
    eps: float
    dtype: np.dtype

    def run(self, world: World, params: Params, x: Array) -> Array:
        """Return this worker's block of the output."""
        return self.normalized(world, params, x, *self.moments.run(world, x))

    def normalized(self, world: World, params: Params, x: Array, mean: Array, variance: Array) -> Array:
        """Normalize x by the given mean and variance, which have the shape of the sums; then apply the parameters."""
        own = {name: plan.run(world, params[name]) for name, plan in self.of_params.items()}
        if x.size == 0:  # JAX drops the dependencies of empty arrays
            return tie(jnp.zeros(x.shape, self.dtype), x, mean, variance, *own.values())
        wide = self.moments.dtype
        of_y = {name: p.astype(wide) for name, p in own.items()}
        if self.param_dims != tuple(range(x.ndim - len(self.param_dims), x.ndim)):  # others broadcast as they are
            others = [d for d in range(x.ndim) if d not in self.param_dims]
            of_y = {name: lax.expand_dims(p, others) for name, p in of_y.items()}
        scale = self.moments.spread(world.rank, lax.rsqrt(variance + np.asarray(self.eps, wide)))
        mean = self.moments.spread(world.rank, mean) if self.moments.centred else jnp.zeros((1,) * x.ndim, wide)
        weight = of_y.get("weight", jnp.ones((1,) * x.ndim, wide))
        if math.prod(np.broadcast_shapes(scale.shape, weight.shape)) < x.size:
            scale, weight = scale * weight, jnp.ones((1,) * x.ndim, wide)
        y = scaled(x.astype(wide), mean, scale, weight)
        return (y + of_y["bias"] if "bias" in of_y else y).astype(self.dtype)


class DistributedNorm(PartitionedLayer):
    """The base of the normalisations: a subclass defines which entries share a mean, and its parameters."""

    eps: float
    _centred: ClassVar[bool] = True

    @property
    @abstractmethod
    def _axes(self) -> tuple[int, ...]:
        """The dimensions that are averaged over."""

    @property
    def _entries(self) -> Entries:
        """The entries that share a mean."""
        return Along(self._axes)

    @property
    @abstractmethod
    def _lengths(self) -> dict[int, int]:
        """By dimension, the known lengths of x, along which blocks of x are balanced."""

    @property
    @abstractmethod
    def _spec(self) -> TensorSpec:
        """The spec of each parameter."""

    @property
    @abstractmethod
    def _param_names(self) -> tuple[str, ...]:
        """The names of the existing parameters among "weight" and "bias"."""

    @property
    def _param_dims(self) -> tuple[int, ...]:
        """The dimensions of x along which parameters extend."""
        return (1,)

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each parameter, which is replicated."""
        return dict.fromkeys(self._param_names, self._spec)

    def init(self, key: Array | None = None, dtype: DTypeLike = jnp.float32) -> Params:
        """Return this worker's blocks of the initial parameters: weights are 1, biases 0, for any key."""
        if key is not None:
            check_key("key", key)
        values = {"weight": 1, "bias": 0}
        return {name: filled(spec, values[name], dtype) for name, spec in self.param_specs().items()}

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> NormPlan:
        grid, out = real_grid("x", x, self.P_x, self._lengths)
        of_params = plan_replicated_params(params, self.param_specs())
        for plan in of_params.values():
            out = np.dtype(jnp.promote_types(out, plan.inputs[self.P_x.ranks[0]].dtype))
        moments = Moments(grid, self._axes, self._entries, accumulation_dtype(out), self._centred)
        blocks = derived(lambda worker: ShapeDtype(x[worker].shape, out), x)
        return NormPlan(blocks, moments, of_params, self._param_dims, self.eps, out)


class ChannelNorm(DistributedNorm):
    """The base of the normalisations with, if `affine`, a weight and a bias per channel."""

    affine: bool

    @property
    @abstractmethod
    def _channels(self) -> int:
        """The number of channels."""

    @property
    def _lengths(self) -> dict[int, int]:
        return {1: self._channels}

    @property
    def _spec(self) -> TensorSpec:
        return TensorSpec((self._channels,), self.P_x, tuple(d for d in range(self.P_x.dim) if d != 1))

    @property
    def _param_names(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.affine else ()


def filled(spec: TensorSpec, value: float, dtype: DTypeLike) -> Array:
    """Return this worker's block of a constant tensor; zero-volume if it holds none."""
    dtype = checked_dtype("dtype", dtype)
    return zero_volume_tensor(dtype=dtype) if spec.box is None else jnp.full(spec.local_shape, value, dtype)


def check_norm(P_x: Any, eps: Any, least: int) -> None:
    """Reject partitions of fewer than `least` dimensions, and an `eps` that is not a number of 0 or more."""
    check_partitions(P_x=P_x)
    if P_x.dim < least:
        raise InvalidArgumentError(
            f"`P_x` ({shape_text(P_x.shape)}) must have {least} dimensions or more: as many as x, with one worker "
            "along unsplit ones."
        )
    if not is_real(eps) or eps < 0:
        raise InvalidArgumentError(f"`eps` (={eps!r}) must be a number, 0 or more.")


# --- one worker's block, scaled, with a derivative that stores x alone -----------------------------------------------


@jax.custom_vjp
def scaled(x: Array, mean: Array, scale: Array, weight: Array) -> Array:
    """Return (x - mean) scale weight; all have one dtype, and shapes that broadcast with x."""
    return (x - mean) * scale * weight


def _forward(x: Array, mean: Array, scale: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
    return scaled(x, mean, scale, weight), (x, mean, scale, weight)


def _backward(residuals: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array, Array]:
    x, mean, scale, weight = residuals
    deviation = x - mean
    if _are_rows(scale.shape, weight.shape, mean.shape, x.shape):
        # Sums along rows are products with the weight, so only one array is written for the sums.
        products = dy * (deviation * scale)
        of_mean, overflown = _times(dy, weight) * scale, scale == 0  # for a variance that is too large for its dtype
        # In that case the products are 0, or NaN where x is infinite.
        of_scale = _times(products, weight) / jnp.where(overflown, 1, scale)
        return dy * weight * scale, -of_mean, of_scale, _summed(products, weight.shape)
    weighted = dy * weight
    if mean.shape == scale.shape:  # so that it is the same sum as the gradient of a bias
        of_mean = _summed(weighted, mean.shape) * scale
    else:
        of_mean = _summed(weighted * scale, mean.shape)
    of_scale, of_weight = _summed(weighted * deviation, scale.shape), _summed(dy * (deviation * scale), weight.shape)
    return weighted * scale, -of_mean, of_scale, of_weight


def _are_rows(scale: tuple[int, ...], weight: tuple[int, ...], mean: tuple[int, ...], x: tuple[int, ...]) -> bool:
    """Say whether `scale` and `mean` have a number for each row of x, and `weight` one for each entry of a row.

    Otherwise `scale` may be a product with a weight, which may be 0.
    """
    entries = len(weight)
    return entries > 0 and scale == mean == (*x[: len(x) - entries], *(1,) * entries) and weight == x[-entries:]


def _times(x: Array, weight: Array) -> Array:
    """Return the sums along rows of x times `weight`; of length 1 in the dimensions of a row."""
    along = tuple(range(x.ndim - weight.ndim, x.ndim))
    sums = lax.dot_general(x, weight, ((along, tuple(range(weight.ndim))), ((), ())), precision=lax.Precision.HIGHEST)
    return jnp.expand_dims(sums, along)


scaled.defvjp(in_own_width(_forward), in_own_width(_backward))


def _summed(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x to `shape`: the transpose of broadcasting from it."""
    before = x.ndim - len(shape)
    stretched = [before + d for d, n in enumerate(shape) if n == 1]
    return jnp.sum(x, axis=(*range(before), *stretched)).reshape(shape)
