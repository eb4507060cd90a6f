"""Channels scaled by numbers that a small network computes from their means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.functional.block_checks import outside
from distdl_jax.functional.plan import BlocksPlan, Plan, ShapeDtypes, taking_part
from distdl_jax.nn.base.input_checks import real_grid
from distdl_jax.nn.base.layer import describe
from distdl_jax.nn.dense.pointwise import DistributedPointwise
from distdl_jax.nn.networks.function_runs import activated
from distdl_jax.nn.networks.network import Network, RunPart, params_of_part
from distdl_jax.nn.shape.global_pool import DistributedGlobalAvgPool
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import exchange_shapes
from distdl_jax.validation import check_function, checked_integer


@dataclass(frozen=True)
class ScalingPlan(BlocksPlan):
    """The plans of the layers that compute the scales, and all workers' blocks of the scaled tensor.

    - `pool`: of the mean. - `fc1`, `fc2`: of the two maps.
    """

    pool: Plan
    fc1: Plan
    fc2: Plan


@dataclass(frozen=True)
class DistributedSqueezeExcitation(Network):
    """y = x s, with a number s for each sample and channel: scale_activation(fc2(activation(fc1(mean of x)))).

    The mean is over all features; `fc1` maps it to `squeeze_channels`, and `fc2` back. All dimensions may be split.

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | n_b x n_c x n_{D-1} x ... x n_0 | P_x: P_n x P_c x P_{D-1} x ... x P_0 |
    | `params["fc1"]`, `params["fc2"]` | n_squeeze x n_c, n_c x n_squeeze, and biases | as in `DistributedPointwise` |

    n_b n_c numbers of the block are summed over the workers along the features, forward and backward; if channels are
    split, these and the squeezed ones are gathered along them. Gradients of the parameters are summed over copies.
    Blocks of x may have any length, including 0, along batch and features, and are balanced along the channels.

    **Arguments:**

    - `P_x`: the partition of input and output, of 3 dimensions or more.
    - `input_channels`, `squeeze_channels`: n_c and n_squeeze.
    - `activation`, `scale_activation`: elementwise functions.

    A worker outside P_x gets its x back.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> layer = DistributedSqueezeExcitation(P, input_channels=4, squeeze_channels=2)
    >>> layer(layer.init(jax.random.key(0)), jax.numpy.ones((5, 4, 8))).shape
    (5, 4, 8)

    Source: Hu, Shen and Sun (2018), arXiv:1709.01507; torchvision's SqueezeExcitation.
    """

    P_x: Partition
    input_channels: int
    squeeze_channels: int
    activation: Callable[[Array], Array] = jax.nn.relu
    scale_activation: Callable[[Array], Array] = jax.nn.sigmoid

    def __post_init__(self) -> None:
        DistributedGlobalAvgPool(self.P_x, copies=True)
        for name in ("input_channels", "squeeze_channels"):
            checked_integer(name, getattr(self, name), 1)
        for name in ("activation", "scale_activation"):
            check_function(name, getattr(self, name))

    @cached_property
    def _pool(self) -> DistributedGlobalAvgPool:
        return DistributedGlobalAvgPool(self.P_x, copies=True)

    @cached_property
    def _parts(self) -> tuple[tuple[str, DistributedPointwise], ...]:
        many, few = self.input_channels, self.squeeze_channels
        return ("fc1", DistributedPointwise(self.P_x, many, few)), ("fc2", DistributedPointwise(self.P_x, few, many))

    @property
    def _computes(self) -> str:
        return "scaling"

    def _pack(self, entries: Iterable[Any]) -> dict[str, Any]:
        return dict(zip(("fc1", "fc2"), entries, strict=True))

    def plan(self, x: ShapeDtypes, params: Mapping[int, Any] | None = None) -> ScalingPlan:
        """Plan the layer for all workers' blocks: without communication, with the same result on every worker.

        **Raises:** `PlanError` if x or a parameter does not fit.
        """
        x = taking_part(x, self.P_x.ranks)
        real_grid("x", x, self.P_x, {1: self.input_channels})
        plans = [self._pool.plan(x)]
        scales = plans[0].after(x)
        for name, layer in self._parts:
            plans.append(layer.plan(scales, params_of_part(params, name)))
            scales = plans[-1].after(scales)
        dtypes = {worker: jnp.promote_types(x[worker].dtype, scales[worker].dtype) for worker in self.P_x.ranks}
        blocks = {worker: ShapeDtype(x[worker].shape, np.dtype(dtype)) for worker, dtype in dtypes.items()}
        return ScalingPlan(blocks, *plans)

    def _forward(self, run: RunPart, x: Array) -> Array:
        if not self.P_x.active:
            return outside(self.P_x.world, x)
        with jax.named_scope(type(self).__name__):
            self.plan(exchange_shapes(self.P_x.world, tuple(sorted(self.P_x.ranks)), describe(self), x))  # checks x
            (squeeze, fc1), (excite, fc2) = self._parts
            copied = tuple(range(2, self.P_x.dim))
            squeezed = activated(self.activation, self.P_x, run(squeeze, fc1, self._pool(x)), copied)
            scale = activated(self.scale_activation, self.P_x, run(excite, fc2, squeezed), copied)
            return tie(x * scale, scale)  # JAX drops the dependencies of empty arrays
