"""What linear layers and convolutions have in common: copies of x and of the weight, their products, and the sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.kernels.split_halo import Parts
from distdl_jax.layer.parameters import ParameterPlan, Params
from distdl_jax.layer.sliding_windows import WindowsPlan
from distdl_jax.layer.split_halo import HaloApartPlan
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.block_checks import zero_volume_shape
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.primitives.plan import MovementPlan, Plan, ShapeDtypes
from distdl_jax.tracing.tie import tie
from distdl_jax.world import Workers, World


class LocalProduct(Protocol):
    """What one worker computes: an immutable value."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the block of the weight."""

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is added here: of the workers whose products are summed, one adds it."""

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the product, from that of the copy of x."""

    def __call__(self, x: Any, weight: Array, bias: Array | None) -> Array:
        """The product of the copies of x, as it was fetched, and of the weight; of one dtype."""


@dataclass(frozen=True)
class SummedPlan(Plan):
    """The plan of a layer some of whose workers each work out a part of y, of which y is the sum.

    - `to_work`: the broadcast of x to the workers that do; `of_params`: that of the parameters.
    - `products`: what each worker of the layer has then.
    - `to_y`: the sum of that.
    """

    to_work: MovementPlan
    of_params: ParameterPlan
    products: ShapeDtypes = field(hash=False)
    to_y: MovementPlan

    @property
    def workers(self) -> Workers:
        return tuple(self.products)

    def output(self, worker: int) -> ShapeDtype:
        return self.to_y.output(worker) if worker in self.to_y.workers else self.products[worker]


@dataclass(frozen=True)
class ProductPlan(SummedPlan):
    """The plan of a layer that multiplies; products are in the dtype that x and the weight have in common.

    - `local`: by world rank, what each worker that multiplies computes.
    - `fetch`: how each worker that holds x gets what its windows read; None where it is the block that it holds.
    """

    local: Mapping[int, LocalProduct] = field(hash=False)
    fetch: WindowsPlan | RangesPlan | HaloApartPlan | None = None

    def run(self, world: World, params: Params, x: Array) -> Array:
        """This worker's block of the output; on workers that take no part, `x`."""
        if (product := self.products.get(world.rank)) is None:
            return x
        fetched = self._fetched(world, x)
        local = self.local.get(world.rank)
        weight, bias = self.of_params.run(world, params, local.weight_shape if local else (0,))
        if local is None:
            part = tie(jnp.zeros(product.shape, product.dtype), *jax.tree.leaves(fetched), weight)
        else:
            bias = bias.astype(product.dtype) if bias is not None and local.adds_bias else None
            fetched = jax.tree.map(lambda its: its.astype(product.dtype), fetched)
            part = local(fetched, weight.astype(product.dtype), bias)
        # Every worker's part depends on all that any worker's part depends on, so that whatever is differentiated, all
        # of them carry a derivative into the sum, or none does.
        return self.to_y.run(world, tie(part, *params.values()))

    def _fetched(self, world: World, x: Array) -> Array | Parts:
        if isinstance(self.fetch, HaloApartPlan):  # its parts stay where they are
            return self.fetch.run(world, x)
        return self.to_work.run(world, x if self.fetch is None else self.fetch.run(world, x))


def products(copies: ShapeDtypes, of_params: ParameterPlan, local: Mapping[int, LocalProduct]) -> dict[int, ShapeDtype]:
    """What each worker has after the multiplication, from the copies of x: where it does not multiply, nothing."""
    result = {}
    for worker, copy in copies.items():
        shape = local[worker].output(copy.shape) if worker in local else zero_volume_shape(copy.shape, True)
        dtype = np.dtype(jnp.promote_types(copy.dtype, of_params.dtype))
        result[worker] = ShapeDtype(shape, dtype)
    return result
