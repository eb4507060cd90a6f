"""The block of Fourier neural operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.functional.products import ProductPlan
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.layer import PartitionedLayer
from distdl_jax.nn.conv.conv import CONVOLUTIONS
from distdl_jax.nn.networks.function_runs import activated
from distdl_jax.nn.networks.network import params_of_part
from distdl_jax.nn.spectral.spectral_conv import SPECTRAL_CONVOLUTIONS, SpectralPlan
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.validation import check_key

Params = dict[str, dict[str, Array]]


@dataclass(frozen=True)
class FNOBlockPlan(BlocksPlan):
    """The plans of the two branches from the input to the output, which are added."""

    spectral: SpectralPlan
    pointwise: ProductPlan


@dataclass(frozen=True, init=False)
class DistributedFNOBlock(PartitionedLayer):
    """A layer of a Fourier neural operator: activation(spectral convolution of x + linear map of x's channels).

    x is n_b x n_in x features on P_x, with 1 to 4 feature dimensions; batch and features may be split, in balanced
    blocks; y is n_b x n_out x features, also on P_x. The parameters are those of both layers: `{"spectral":
    DistributedSpectralConv's, "pointwise": a kernel-1 convolution's}`.

    **Arguments:**

    - `P_x`, `in_channels`, `out_channels`, `modes`, `P_W`: as in `DistributedSpectralConv2d`.
    - `activation`: a function of an array; None for none, as in a last block.

    **Raises:** `InvalidArgumentError`, on every worker, if arguments are invalid, or channels are split.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> block = DistributedFNOBlock(P, in_channels=2, out_channels=3, modes=2)
    >>> block(block.init(jax.random.key(0)), jax.numpy.ones((5, 2, 8))).shape
    (5, 3, 8)

    Source: Li et al. (2021), arXiv:2010.08895.
    """

    P_x: Partition
    in_channels: int
    out_channels: int
    modes: tuple[int, ...]
    activation: Callable[[Array], Array] | None
    P_W: Partition

    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        modes: int | Sequence[int],
        activation: Callable[[Array], Array] | None = jax.nn.gelu,
        P_W: Partition | None = None,
    ) -> None:
        check_partitions(P_x=P_x)
        if not 3 <= P_x.dim <= 6 or P_x.shape[1] != 1:
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(P_x.shape)}) must have 3 to 6 dimensions, batch, channels, and features, and one "
                "worker along the channels."
            )
        spectral = SPECTRAL_CONVOLUTIONS[P_x.dim - 2](P_x, in_channels, out_channels, modes, P_W)
        self._store(P_x=P_x, in_channels=in_channels, out_channels=out_channels, activation=activation)
        self._store(modes=spectral.modes, P_W=spectral.P_W)

    @cached_property
    def _layers(self) -> dict[str, Any]:
        dims, c_in, c_out = self.P_x.dim - 2, self.in_channels, self.out_channels
        return {
            "spectral": SPECTRAL_CONVOLUTIONS[dims](self.P_x, c_in, c_out, self.modes, self.P_W),
            "pointwise": CONVOLUTIONS[dims](self.P_x, in_channels=c_in, out_channels=c_out, kernel_size=1),
        }

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """Return this worker's blocks of the initial parameters; each layer has a separate key, split off `key`."""
        check_key("key", key)
        layers = self._layers
        return {name: layers[name].init(k, dtype) for name, k in zip(layers, jax.random.split(key), strict=True)}

    def param_specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Return the global shape and the partition of each parameter."""
        return {name: layer.param_specs() for name, layer in self._layers.items()}

    def plan(self, x: ShapeDtypes, params: Mapping[int, Any] | None = None) -> FNOBlockPlan:
        """Plan the layer for the blocks of all its workers: without communication, with the same result on each.

        **Raises:** `PlanError` if x or a parameter does not fit.
        """
        plans = {name: layer.plan(x, params_of_part(params, name)) for name, layer in self._layers.items()}
        y, other = (plan.outputs for plan in plans.values())
        for worker in self.P_x.ranks:
            if y[worker].shape != other[worker].shape:
                raise PlanError(
                    f"On worker {worker}: `x` has a block of {shape_text(x[worker].shape)}, but its blocks must be "
                    f"balanced along the features, as in a convolution, here {shape_text(other[worker].shape[2:])}."
                )
        dtypes = {worker: jnp.promote_types(block.dtype, other.get(worker, block).dtype) for worker, block in y.items()}
        return FNOBlockPlan({worker: ShapeDtype(block.shape, dtypes[worker]) for worker, block in y.items()}, **plans)

    @layer_call
    def __call__(self, params: Params, x: Array) -> Array:
        """Apply the layer to this worker's block on P_x, and return its block of the output there.

        Elsewhere return a zero-volume array.

        **Raises:** `PlanError`, on every worker of the layer, if x or a parameter does not fit.
        """
        with jax.named_scope("DistributedFNOBlock"):
            y = self._layers["spectral"](params["spectral"], x)
            other = self._layers["pointwise"](params["pointwise"], x)
            if self.P_x.rank is None:
                return y
            y = y + other
            return y if self.activation is None else activated(self.activation, self.P_x, y)

    apply = __call__
