"""Convolutions over 1 to 4 dimensions with weights for the lowest frequencies, for neural operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, owned_grid
from distdl_jax.functional.fourier.fft import on_grid
from distdl_jax.functional.fourier.staged_fft import Forward, Inverse, StagesPlan, plan_stages
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.nn.base.dimensions import in_dimensions
from distdl_jax.nn.base.input_checks import check_features
from distdl_jax.nn.base.layer import PartitionedLayer
from distdl_jax.nn.base.parameters import (
    Params,
    ParamShapeDtypes,
)
from distdl_jax.partitions.initialization import Initializer, initialize_params
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges
from distdl_jax.plans.pencils import Reals, factorizations, largest_block, pencils
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import checked_integer, checked_integers


@dataclass(frozen=True)
class SpectralPlan(BlocksPlan):
    """The plan of a spectral convolution: to the frequencies, a product, and back.

    - `products`: the workers' blocks of the product, by world rank.
    """

    there: StagesPlan
    products: ShapeDtypes = field(hash=False)
    back: StagesPlan

    def run(self, world: World, params: Params, x: Array) -> Array:
        """Return this worker's block of the output."""
        x, weight = self.there.run(world, x), params["weight"]
        product = self.products[world.rank]
        if product.size and x.size:
            wide = np.zeros(0, product.dtype).real.dtype
            complex_weight = lax.complex(weight[..., 0].astype(wide), weight[..., 1].astype(wide))
            x = jnp.einsum(
                "bi...,io...->bo...", x.astype(product.dtype), complex_weight, precision=lax.Precision.HIGHEST
            )
        else:
            x = tie(jnp.zeros(product.shape, product.dtype), x, weight)
        # On every worker, so that under differentiation all of them carry a derivative into the movement.
        x, mine = self.back.run(world, tie(x, weight)), self.blocks[world.rank]
        return x.astype(mine.dtype)


@dataclass(frozen=True, init=False)
class DistributedSpectralConv(PartitionedLayer):
    """The base of the spectral convolutions, of any number of dimensions; see `DistributedSpectralConv2d`.

    Each movement carries only the remaining frequencies: after transforming along a dimension, a worker drops the high
    ones, before the tensor moves to the next grid."""

    dims: ClassVar[int]
    P_x: Partition
    in_channels: int
    out_channels: int
    modes: tuple[int, ...]
    P_W: Partition

    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        modes: int | Sequence[int],
        P_W: Partition | None = None,
    ) -> None:
        check_partitions(P_x=P_x, **({} if P_W is None else {"P_W": P_W}))
        counts = checked_integers("modes", modes, or_one=True)
        counts = counts * self.dims if len(counts) == 1 else counts
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            checked_integer(name, channels, 1)
        if len(counts) != self.dims or min(counts) < 1:
            raise InvalidArgumentError(f"`modes` (={modes!r}) must be an integer, 1 or more, or {self.dims} of them.")
        check_features(P_x, self.dims)
        self._store(P_x=P_x, in_channels=in_channels, out_channels=out_channels, modes=counts)
        if P_W is None:
            P_W = P_x.create_cartesian_topology_partition(_grid_of_modes(P_x.shape, in_channels, self._frequencies))
        if P_W.dim != P_x.dim or P_W.shape[:2] != (1, 1):
            raise InvalidArgumentError(
                f"`P_W` ({shape_text(P_W.shape)}) must have shape 1 x 1 x ..., {self.dims + 2} dimensions, split only "
                "along the frequencies: the channels of a frequency are on one worker."
            )
        self._store(P_W=P_W)

    @property
    def _frequencies(self) -> tuple[int, ...]:
        """The number of frequencies along each dimension."""
        return (*(2 * m for m in self.modes[:-1]), self.modes[-1])

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of the weight."""
        shape = (self.in_channels, self.out_channels, *self._frequencies, 2)
        return {"weight": TensorSpec(shape, self.P_W.create_cartesian_topology_partition((*self.P_W.shape, 1)))}

    def init(
        self, key: Array, dtype: DTypeLike = jnp.float32, *, weight_init: Initializer | None = None
    ) -> dict[str, Array]:
        """Return this worker's block of the initial weight; global values depend on the key, not on partitions.

        `key` is a JAX random key, the same on every worker, and `weight_init` a function of (key, shape, dtype) that
        sees the global shape. Default: uniform from 0 to 1/(in_channels out_channels), as in Li et al.
        """
        default = jax.nn.initializers.uniform(1 / (self.in_channels * self.out_channels))
        return initialize_params(self.param_specs(), key, dtype, {"weight": weight_init or default})

    @cached_property
    def _team(self) -> Workers:
        return tuple(sorted({*self.P_x.ranks, *self.P_W.ranks}))

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> SpectralPlan:
        dtype, grid = common_dtype("x", x, self.P_x.ranks), owned_grid("x", self.P_x, x)
        self._check(dtype, grid.extent)
        of_y = np.dtype(jnp.promote_types(dtype, params[self.P_W.ranks[0]]["weight"].dtype))
        axes = range(2, self.P_x.dim)
        modes, lengths = dict(zip(axes, self._frequencies, strict=True)), dict(zip(axes, grid.extent[2:], strict=True))
        same = self.P_W.ranks == self.P_x.ranks
        path = pencils(
            grid.extent,
            self.P_x.shape,
            tuple(modes.items()),
            self.P_W.shape,
            same_team=same,
            reals=Reals(before=True),
        )
        grids = [self.P_W if k == len(path) - 1 else on_grid(self.P_x, s.shape) for k, s in enumerate(path)]
        halved, first = self.P_x.dim - 1, next(k for k, stage in enumerate(path) if stage.axes)
        forward, inverse = [], []
        for k, (P, stage) in enumerate(zip(grids, path, strict=True)):
            sizes = tuple((a, modes[a]) for a in stage.axes)
            forward.append((P, Forward(sizes, halved) if sizes else None))
            sizes = tuple((a, lengths[a]) for a in stage.axes)
            inverse.append((P, Inverse(sizes, halved, last=k == first) if sizes else None))
        # Frequencies are balanced like the weight, in separate blocks, even if there are as many as x is long.
        there = plan_stages(x, grid, dtype, forward, grid, rebalanced=axes)
        ranges = list(there.grid.ranges)
        ranges[1] = balanced_ranges(self.out_channels, 1)
        between = ProductGrid(there.grid.ranks, tuple(ranges))
        products = {
            worker: ShapeDtype(
                (block.shape[0], self.out_channels, *block.shape[2:]) if worker in between.cell_of else block.shape,
                np.dtype(jnp.promote_types(there.dtype, of_y)),
            )
            for worker, block in there.blocks.items()
        }
        of_product = products[between.ranks[0]].dtype
        like = ProductGrid(
            grid.ranks, (grid.ranges[0], balanced_ranges(self.out_channels, self.P_x.shape[1]), *grid.ranges[2:])
        )
        back = plan_stages(products, between, of_product, inverse[::-1], like)
        blocks = {worker: ShapeDtype(block.shape, of_y) for worker, block in back.outputs.items()}
        return SpectralPlan(blocks, there, products, back)

    def _check(self, dtype: np.dtype, extent: tuple[int, ...]) -> None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise PlanError(f"`x` must hold real floating-point numbers, not {dtype}.")
        if extent[1] != self.in_channels:
            raise PlanError(f"`x` (of shape {extent}) must have {self.in_channels} channels.")
        most = (*(n // 2 for n in extent[2:-1]), extent[-1] // 2 + 1)
        if any(m > limit for m, limit in zip(self.modes, most, strict=True)):
            raise PlanError(
                f"`modes` (={self.modes}) must be at most {most} for features of {shape_text(extent[2:])}: half of the "
                "length, and one more along the last dimension."
            )


@lru_cache(maxsize=64)
def _grid_of_modes(shape: tuple[int, ...], channels: int, frequencies: tuple[int, ...]) -> tuple[int, ...]:
    """Return the grid for the frequencies: among the most even ones, the one with the fewest movements.

    Movements are counted for tensors with twice as many frequencies as are kept.
    """
    grids = [(1, 1, *grid) for grid in factorizations(prod(shape), len(frequencies))]
    whole = (1, 1, *frequencies)
    least = min(largest_block(whole, grid) for grid in grids)
    extent = (1, channels, *(2 * n for n in frequencies))
    lengths = tuple((d, n) for d, n in enumerate(frequencies, 2))

    def rank(grid: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        path = pencils(extent, shape, lengths, grid, reals=Reals(before=True))
        return len(path), grid

    return min((grid for grid in grids if largest_block(whole, grid) == least), key=rank)


_spectral_conv = in_dimensions(
    """
    y = irfftn(W rfftn(x)), with W a complex n_in x n_out matrix at each kept frequency, 0 at the others

The layer of Fourier neural operators, neuralop's `SpectralConv`. Batch, channels and features may all be split.

| tensor | global shape | partition |
|---|---|---|
| x | n_b x n_in x $n | P_x: P_n x P_c x $P |
| y | n_b x n_out x $n | P_x, the same blocks along batch and features |
| W (`params["weight"]`) | n_in x n_out x $frequencies x 2 | P_W: 1 x 1 x $Q x 1 |

Along a feature dimension W has the frequencies 0, 1, ..., m - 1, -m, ..., -1; along the last one, which is halved for
real data, 0 to m - 1. They are in balanced blocks on P_W, which may be empty. The last dimension has their real and
imaginary parts, so that optimisers need not handle complex numbers.

x holds real floating-point numbers; y has the dtype to which those of x and W promote. Outside P_x a worker passes
a zero-volume tensor, and gets one.

**Arguments:**

- `P_x`: the partition of x and y.
- `in_channels`, `out_channels`: n_in and n_out.
- `modes`: m, an integer, or one for each feature dimension: the number of kept frequencies, at most half of the length,
  and one more along the last.
- `P_W`: the partition of the frequencies, 1 x 1 x $Q, on any workers. Default: the workers of P_x, split as evenly as
  possible, with the fewest movements.

**Raises:** `InvalidArgumentError`, on every worker, if arguments are invalid; when applied, `PlanError` if x or the
weight doesn't fit, or x has too few frequencies.

>>> import distdl_jax as dj
>>> P = dj.planning_world(4).grid([1, 1, $grid])
>>> layer = $name(P, in_channels=2, out_channels=3, modes=$modes)
>>> layer.param_specs()["weight"].block_shapes
$blocks

Source: Li et al. (2021), arXiv:2010.08895; Grady et al. (2023), arXiv:2204.01205, on many workers.
""",
    frequencies=("m_0", "2 m_1 x m_0", "2 m_2 x 2 m_1 x m_0", "2 m_3 x 2 m_2 x 2 m_1 x m_0"),
    modes=("4", "(4, 3)", "(4, 3, 2)", "(4, 3, 2, 2)"),
    blocks=(
        "{0: (2, 3, 1, 2), 1: (2, 3, 1, 2), 2: (2, 3, 1, 2), 3: (2, 3, 1, 2)}",
        "{0: (2, 3, 2, 3, 2), 1: (2, 3, 2, 3, 2), 2: (2, 3, 2, 3, 2), 3: (2, 3, 2, 3, 2)}",
        "{0: (2, 3, 8, 3, 1, 2), 1: (2, 3, 8, 3, 1, 2), 2: (2, 3, 8, 3, 1, 2), 3: (2, 3, 8, 3, 1, 2)}",
        "{0: (2, 3, 8, 3, 4, 1, 2), 1: (2, 3, 8, 3, 4, 1, 2), 2: (2, 3, 8, 3, 4, 1, 2), 3: (2, 3, 8, 3, 4, 1, 2)}",
    ),
)


@_spectral_conv
class DistributedSpectralConv1d(DistributedSpectralConv):
    """A spectral convolution over 1 feature dimension: a product at each low frequency."""

    dims = 1


@_spectral_conv
class DistributedSpectralConv2d(DistributedSpectralConv):
    """A spectral convolution over 2 feature dimensions: a product at each low frequency."""

    dims = 2


@_spectral_conv
class DistributedSpectralConv3d(DistributedSpectralConv):
    """A spectral convolution over 3 feature dimensions: a product at each low frequency."""

    dims = 3


@_spectral_conv
class DistributedSpectralConv4d(DistributedSpectralConv):
    """A spectral convolution over 4 feature dimensions (space and time): a product at each low frequency."""

    dims = 4


SPECTRAL_CONVOLUTIONS = {
    layer.dims: layer
    for layer in (
        DistributedSpectralConv1d,
        DistributedSpectralConv2d,
        DistributedSpectralConv3d,
        DistributedSpectralConv4d,
    )
}
"""The class of each number of feature dimensions."""
