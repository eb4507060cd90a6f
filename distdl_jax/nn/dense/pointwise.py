"""The linear map of channels, or of features, at each entry, with copies of the weight on all workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_gather import plan_all_gather
from distdl_jax.functional.block_checks import common_dtype, owned_grid
from distdl_jax.functional.copies import ReplicatedPlan
from distdl_jax.functional.plan import (
    BlocksPlan,
    MovementPlan,
    ShapeDtypes,
    Unmoved,
)
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes, plan_replicated_params
from distdl_jax.nn.base.weighted_layer import AffineLayer
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import balanced_sizes, index_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import World
from distdl_jax.validation import checked_axis, checked_integer


@dataclass(frozen=True)
class PointwisePlan(BlocksPlan):
    """The plan of a pointwise linear map.

    - `to_whole`: the movement that gives each worker all of x's channels.
    - `of_params`: for each parameter, the workers that hold copies of it.
    - `dim`: the dimension of the channels. - `dtype`: of the output.
    """

    to_whole: MovementPlan
    of_params: Mapping[str, ReplicatedPlan] = field(hash=False)
    dim: int
    dtype: np.dtype

    def run(self, world: World, params: Params, x: Array) -> Array:
        """Return this worker's block of the output."""
        x = self.to_whole.run(world, x)
        own = {name: plan.run(world, params[name]) for name, plan in self.of_params.items()}
        output = self.output(world.rank)
        if output.size == 0:  # JAX drops the dependencies of empty arrays
            return tie(jnp.zeros(output.shape, self.dtype), x, *own.values())
        wide = accumulation_dtype(self.dtype)
        y = channel_product(x.astype(self.dtype), own["weight"].astype(self.dtype), self.dim, wide)
        if "bias" in own:
            y = y + lax.expand_dims(own["bias"].astype(wide), range(1, x.ndim - self.dim))
        return y.astype(self.dtype)


def channel_product(x: Array, weight: Array, dim: int, wide: np.dtype) -> Array:
    """Return the product of `weight`, n_out x n_in, with dimension `dim` of x, in x's order of dimensions, in `wide`.

    Both have one dtype.
    """
    before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    if len(weight) > after:  # then separate products of the samples would have large gradients of the weight
        y = lax.dot_general(x, weight, (((dim,), (1,)), ((), ())), preferred_element_type=wide)
        return jnp.moveaxis(y, -1, dim)
    weights = jnp.broadcast_to(weight, (before, *weight.shape))
    rows = x.reshape(before, x.shape[dim], after)
    y = lax.dot_general(weights, rows, (((2,), (1,)), ((0,), (0,))), preferred_element_type=wide)
    return y.reshape(*x.shape[:dim], len(weight), *x.shape[dim + 1 :])


@dataclass(frozen=True)
class DistributedPointwise(AffineLayer):
    r"""An affine map of the channels, the same at every entry of all other dimensions, with copies of the weight.

    y[..., o, ...] = sum over i of W[o, i] x[..., i, ...] + b[o], along one dimension of x, `dim`: a convolution with a
    kernel of 1 over N x C x D..., or a dense layer over the last dimension of N x S x E. Every worker multiplies its
    own block; if `dim` is not split, only the gradients of W and b move.

    | tensor | global shape | partition |
    |---|---|---|
    | x | ... x n_in x ... | P_x, of as many dimensions, with P_c workers along `dim` |
    | y | ... x n_out x ... | P_x |
    | W (`params["weight"]`) | n_out x n_in | rows on P_c; copies along all other dimensions of P_x |
    | b (`params["bias"]`) | n_out | P_c; copies along all other dimensions of P_x |

    If `dim` is not split, P_c is 1, and all workers of P_x hold all of W and b. If it is, the blocks of x are gathered
    along it, and each worker computes its rows of y. Gradients of W and b are summed over the copies. Blocks of x may
    have any length in all dimensions, including 0; y's follow x's, and are balanced along `dim`. The output has the
    common dtype of x and the parameters; half precisions are summed in float32.

    `DistributedLinear` splits W over a grid of workers, for matrices too large for one; for the same key its
    initial weights are the same.

    **Arguments:**

    - `P_x`: the partition of input and output.
    - `in_features`, `out_features`: n_in and n_out.
    - `dim`: the dimension of the channels, or features; a negative one counts from the end.
    - `bias`: whether to add b.
    - `replicated`: whether the workers along `dim` hold copies of all channels of x instead of blocks, for instance of
      a time embedding. Then nothing is gathered.

    A worker outside P_x gets its x back.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> layer = DistributedPointwise(P, in_features=3, out_features=2)
    >>> layer(layer.init(jax.random.key(0)), jax.numpy.ones((5, 3, 8))).shape
    (5, 2, 8)

    Source: PyTorch's Linear and Conv1d, 2d, 3d of kernel 1; flax's Dense.
    """

    P_x: Partition
    in_features: int
    out_features: int
    dim: int = 1
    bias: bool = True
    replicated: bool = False

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)
        for name in ("in_features", "out_features"):
            checked_integer(name, getattr(self, name), 1)
        self._store(dim=checked_axis("dim", self.dim, self.P_x.shape))

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.out_features, self.in_features)} | ({"bias": (self.out_features,)} if self.bias else {})

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each parameter, which is replicated."""
        before, after = self.P_x.shape[: self.dim + 1], self.P_x.shape[self.dim + 1 :]
        P_W = self.P_x.create_cartesian_topology_partition([*before, 1, *after])  # rows along `dim`, columns whole
        cut = {"weight": (P_W, (self.dim, self.dim + 1)), "bias": (self.P_x, (self.dim,))}
        return {name: _with_copies(shape, *cut[name]) for name, shape in self._shapes.items()}

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> PointwisePlan:
        dtype = self._checked_dtype(x)
        of_params = plan_replicated_params(params, self.param_specs())
        for plan in of_params.values():
            dtype = np.dtype(jnp.promote_types(dtype, plan.inputs[self.P_x.ranks[0]].dtype))
        rows = balanced_sizes(self.out_features, self.P_x.shape[self.dim])
        blocks = {}
        for rank, worker in enumerate(self.P_x.ranks):
            shape = list(x[worker].shape)
            shape[self.dim] = rows[index_of(rank, self.P_x.shape)[self.dim]]
            blocks[worker] = ShapeDtype(tuple(shape), dtype)
        stays = self.replicated or len(rows) == 1
        to_whole = Unmoved(x) if stays else plan_all_gather(x, self.P_x, self.dim)
        return PointwisePlan(blocks, to_whole, of_params, self.dim, dtype)

    def _checked_dtype(self, x: ShapeDtypes) -> np.dtype:
        """Return the dtype of x, which must have the channels that the weight multiplies."""
        grid = owned_grid("x", self.P_x, x)
        lengths = [stop - start for start, stop in grid.ranges[self.dim]]
        if {*lengths} != {self.in_features} if self.replicated else sum(lengths) != self.in_features:
            each = " on each worker" * self.replicated
            raise PlanError(
                f"`x` ({shape_text(grid.extent)}) must have length {self.in_features}, `in_features`, in dimension "
                f"{self.dim}, `dim`{each}, but has {lengths}."
            )
        return common_dtype("x", x, self.P_x.ranks)


def _with_copies(shape: tuple[int, ...], P: Partition, cut: tuple[int, ...]) -> TensorSpec:
    """Return the spec of a tensor that is split along the dimensions `cut` of P, with copies along all others."""
    return TensorSpec(shape, P, [d for d in range(P.dim) if d not in cut])
