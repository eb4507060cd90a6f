"""Plans of linear layers and convolutions: copies of x and of the weight, their products, and sums of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.functional.block_checks import zero_volume_shape
from distdl_jax.functional.halo_exchange import RangesPlan
from distdl_jax.functional.plan import MovementPlan, Plan, ShapeDtypes
from distdl_jax.nn.base.parameters import ParameterPlan, Params
from distdl_jax.nn.base.sliding_windows import WindowsPlan
from distdl_jax.plans.alike import derived, workers_of
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.world import Workers, World


class LocalProduct(Protocol):
    """The product that one worker computes: an immutable value."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight's block."""

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is added here: among workers whose products are summed, one adds it."""

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the product, from the shape of the copy of x."""

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """Return the product of the copies of x and of the weight, which have one dtype."""


@dataclass(frozen=True)
class SummedPlan(Plan):
    """The plan of a layer whose output is a sum over workers.

    - `to_work`: the broadcast of x to the workers that compute; `of_params`: that of the parameters.
    - `products`: the result on each worker of the layer.
    - `to_y`: the sum of the products.
    """

    to_work: MovementPlan
    of_params: ParameterPlan
    products: ShapeDtypes = field(hash=False)
    to_y: MovementPlan

    @property
    def workers(self) -> Workers:
        return workers_of(self.products)

    def output(self, worker: int) -> ShapeDtype:
        return self.to_y.output(worker) if worker in self.to_y.workers else self.products[worker]

    @property
    def outputs(self) -> ShapeDtypes:
        return self.to_y.after(self.products)


@dataclass(frozen=True)
class ProductPlan(SummedPlan):
    """The plan of a layer that multiplies; products are in the common dtype of x and the weight.

    - `local`: by world rank, the computation of each worker that multiplies.
    - `fetch`: how each worker that holds x gets the entries that its windows read; None if it has them already.
    """

    local: Mapping[int, LocalProduct] = field(hash=False)
    fetch: WindowsPlan | RangesPlan | None = None

    def run(self, world: World, params: Params, x: Array) -> Array:
        """Return this worker's block of the output; `x` on workers that take no part."""
        if (product := self.products.get(world.rank)) is None:
            return x
        copy = self.to_work.run(world, x if self.fetch is None else self.fetch.run(world, x))
        local = self.local.get(world.rank)
        weight, bias = self.of_params.run(world, params, local.weight_shape if local else (0,))
        if local is None:
            summand = tie(jnp.zeros(product.shape, product.dtype), copy, weight)
        else:
            bias = bias.astype(product.dtype) if bias is not None and local.adds_bias else None
            summand = local(copy.astype(product.dtype), weight.astype(product.dtype), bias)
        # Every worker's summand depends on everything that any worker's depends on, so that under differentiation
        # either all of them carry a derivative into the sum, or none does.
        return self.to_y.run(world, tie(summand, *params.values()))


def products(copies: ShapeDtypes, of_params: ParameterPlan, local: Mapping[int, LocalProduct]) -> ShapeDtypes:
    """Return the result on each worker after the multiplication of its copies of x; a zero-volume array on others."""

    def product(worker: int) -> ShapeDtype:
        copy = copies[worker]
        shape = local[worker].output(copy.shape) if worker in local else zero_volume_shape(copy.shape, True)
        return ShapeDtype(shape, product_dtype(copy, of_params))

    return derived(product, copies, local)


def product_dtype(copy: ShapeDtype, of_params: ParameterPlan) -> np.dtype:
    """Return the dtype of the product of x and the weight."""
    return np.dtype(jnp.promote_types(copy.dtype, of_params.dtype))
