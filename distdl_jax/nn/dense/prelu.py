"""The rectifier whose slope below 0 is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.copies import ReplicatedPlan
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.nn.base.input_checks import real_grid
from distdl_jax.nn.base.layer import PartitionedLayer
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes, plan_replicated_params
from distdl_jax.nn.norm.normalization import filled
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import World
from distdl_jax.validation import check_key, checked_integer, is_real


@dataclass(frozen=True)
class PReLUPlan(BlocksPlan):
    """The plan of a rectifier: the workers that hold copies of its slopes, and the dtype of the output."""

    of_params: Mapping[str, ReplicatedPlan] = field(hash=False)
    dtype: np.dtype

    def run(self, world: World, params: Params, x: Array) -> Array:
        """Return this worker's block of the output."""
        weight = self.of_params["weight"].run(world, params["weight"])
        if x.size == 0:  # JAX drops the dependencies of empty arrays
            return tie(jnp.zeros(x.shape, self.dtype), x, weight)
        wide = accumulation_dtype(self.dtype)
        slopes = weight.astype(wide) if weight.size == 1 else lax.expand_dims(weight.astype(wide), range(1, x.ndim - 1))
        x = x.astype(wide)
        return jnp.where(x > 0, x, slopes * x).astype(self.dtype)


@dataclass(frozen=True, init=False)
class DistributedPReLU(PartitionedLayer):
    """y = x where x > 0, otherwise a x: with one learned slope a for all entries, or one for each channel.

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | n_b x n_c x n_{D-1} x ... x n_0 | P_x: P_n x P_c x P_{D-1} x ... x P_0 |
    | a (`params["weight"]`) | 1, or n_c | copies on all workers of P_x; or P_c, copies along all other dimensions |

    There is no communication in the forward pass; the gradient of a is summed over the copies, in float32 for half
    precisions. Blocks of x may have any length; they are balanced along the channels if each has a slope. At 0 the
    derivative is a, as in PyTorch.

    **Arguments:**

    - `P_x`: the partition of input and output.
    - `num_parameters`: the number of slopes, 1 or n_c.
    - `init`: the slope of `layer.init()`.

    A worker outside P_x gets its x back.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = DistributedPReLU(P)
    >>> layer(layer.init(), jax.numpy.array([[-4.0, 2.0]])).tolist()
    [[-1.0, 2.0]]

    Source: He et al. (2015), arXiv:1502.01852; PyTorch's PReLU.
    """

    P_x: Partition
    num_parameters: int
    slope: float

    def __init__(self, P_x: Partition, num_parameters: int = 1, init: float = 0.25) -> None:
        check_partitions(P_x=P_x)
        number = checked_integer("num_parameters", num_parameters, 1)
        if number > 1 and P_x.dim < 2:
            raise InvalidArgumentError(
                f"`num_parameters` (={number}) must be 1 if `P_x` ({shape_text(P_x.shape)}) has one dimension: "
                "channels are the second one."
            )
        if not is_real(init):
            raise InvalidArgumentError(f"`init` (={init!r}) must be a number.")
        self._store(P_x=P_x, num_parameters=number, slope=float(init))

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of the slopes, which are replicated."""
        copied = True if self.num_parameters == 1 else [d for d in range(self.P_x.dim) if d != 1]
        return {"weight": TensorSpec((self.num_parameters,), self.P_x, copied)}

    def init(self, key: Array | None = None, dtype: DTypeLike = jnp.float32) -> Params:
        """Return this worker's initial slopes, all equal and independent of the key."""
        if key is not None:
            check_key("key", key)
        return {name: filled(spec, self.slope, dtype) for name, spec in self.param_specs().items()}

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> PReLUPlan:
        _, dtype = real_grid("x", x, self.P_x, {} if self.num_parameters == 1 else {1: self.num_parameters})
        of_params = plan_replicated_params(params, self.param_specs())
        dtype = np.dtype(jnp.promote_types(dtype, of_params["weight"].inputs[self.P_x.ranks[0]].dtype))
        return PReLUPlan({worker: ShapeDtype(block.shape, dtype) for worker, block in x.items()}, of_params, dtype)
