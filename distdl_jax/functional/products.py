"""Products of x with a weight: x and the weight move to the workers that multiply, and sums of the products to y."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_gather import plan_all_gather, plan_reduce_scatter
from distdl_jax.functional.all_sum_reduce import plan_all_sum_reduce
from distdl_jax.functional.block_checks import zero_volume_shape
from distdl_jax.functional.broadcast import plan_broadcast, plan_sum_reduce
from distdl_jax.functional.plan import MovementPlan, Plan, ShapeDtypes, Unmoved
from distdl_jax.functional.sliding_windows import TransposedWindowsPlan, WindowsPlan
from distdl_jax.functional.weights import WeightPlan
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.plans.alike import derived, workers_of
from distdl_jax.plans.decomposition import balanced_sizes, index_of
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import Workers, World


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
    """The plan of an operation whose output is a sum over workers.

    - `to_work`: the movement of x to the workers that compute; `of_params`: that of the parameters.
    - `products`: the result on each worker of the operation.
    - `to_y`: the sum of the products.
    """

    to_work: MovementPlan
    of_params: WeightPlan
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
    """The plan of an operation that multiplies; products are in the common dtype of x and the weight.

    - `local`: by world rank, the computation of each worker that multiplies.
    - `fetch`: how each worker that holds x gets the entries that its windows read; None if it has them already.
    """

    local: Mapping[int, LocalProduct] = field(hash=False)
    fetch: WindowsPlan | TransposedWindowsPlan | None = None

    def run(self, world: World, params: Mapping[str, Array], x: Array) -> Array:
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


def products(copies: ShapeDtypes, of_params: WeightPlan, local: Mapping[int, LocalProduct]) -> ShapeDtypes:
    """Return the result on each worker after the multiplication of its copies of x; a zero-volume array on others."""

    def product(worker: int) -> ShapeDtype:
        copy = copies[worker]
        shape = local[worker].output(copy.shape) if worker in local else zero_volume_shape(copy.shape, True)
        return ShapeDtype(shape, product_dtype(copy, of_params))

    return derived(product, copies, local)


def product_dtype(copy: ShapeDtype, of_params: WeightPlan) -> np.dtype:
    """Return the dtype of the product of x and the weight."""
    return np.dtype(jnp.promote_types(copy.dtype, of_params.dtype))


# --- affine maps of features ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalAffine:
    """The product of this worker's copy of x with its block of the weight.

    - `weight_shape`: the shape of the block.
    - `adds_bias`: whether the bias is added here; among workers whose products are summed, one adds it.
    """

    weight_shape: tuple[int, ...]
    adds_bias: bool

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the product, from the shape of the copy of x."""
        return *x[:-1], self.weight_shape[0]

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """Multiply x and weight, which have one dtype."""
        y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
        return y if bias is None else y + bias


RouteName = Literal["copied", "sequence", "replicated", "features"]


class Route(NamedTuple):
    """The movement of x to the workers that multiply, P_n x P_fo x P_fi, and, mirrored, of their products to y.

    Both methods take the blocks to move, the partition of x or y, and the workers that multiply.
    """

    gather: Callable[[ShapeDtypes, Partition, Partition], MovementPlan]
    scatter: Callable[[ShapeDtypes, Partition, Partition], MovementPlan]


ROUTES: dict[RouteName, Route] = {
    # P_n x P_f, on any workers: x is copied to the workers that need the same features, and products are summed.
    "copied": Route(
        lambda x, P, work: plan_broadcast(x, P.grid([P.shape[0], 1, P.shape[-1]]), work),
        lambda y, P, work: plan_sum_reduce(y, work, P.grid([P.shape[0], P.shape[-1], 1])),
    ),
    # P_n x (workers that need the same features) x P_f, on the workers that multiply: the sequence is cut over them,
    "sequence": Route(
        lambda x, P, work: plan_all_gather(x, P, P.dim - 2),
        lambda y, P, work: plan_reduce_scatter(y, P, P.dim - 2),
    ),
    # or each of them holds a copy.
    "replicated": Route(lambda x, P, work: Unmoved(x), lambda y, P, work: plan_all_sum_reduce(y, work, 2)),
    # P_n x (workers that need the same features), if these need all of them: the features are cut over them.
    "features": Route(
        lambda x, P, work: plan_all_gather(x, _along_features(P, x), -1),
        lambda y, P, work: plan_reduce_scatter(y, _along_features(P, y), -1),
    ),
}


def route(P: Partition, workers: np.ndarray, replicated: bool) -> RouteName | None:
    """Return the route between P and `workers`, the ranks that multiply: P_n x across x along the features.

    Workers across need the same features. None if there is no route.
    """
    p_n, across, along = workers.shape
    if P.dim < 2:
        return None
    between = (1,) * (P.dim - 2)
    if P.shape == (p_n, *between, along):
        return "copied"
    if P.ranks != tuple(workers.ravel().tolist()):
        return None
    if P.shape == (p_n, *between[1:], across, along) and P.dim > 2:
        return "replicated" if replicated else "sequence"
    return "features" if along == 1 and P.shape == (p_n, *between, across) else None


def routes_between(
    P_x: Partition, P_y: Partition, work: Partition, replicated: bool
) -> tuple[RouteName | None, RouteName | None]:
    """Return the routes of x on P_x to the workers that multiply, and of their products to y on P_y.

    - `work`: the workers that multiply, P_n x P_fo x P_fi.
    - `replicated`: whether workers of P_x, or P_y, along the dimension before the features hold copies, not parts.
    """
    workers = np.reshape(work.ranks, work.shape)
    return route(P_x, workers, replicated), route(P_y, workers.swapaxes(1, 2), replicated)


def _along_features(P: Partition, blocks: ShapeDtypes) -> CartesianPartition:
    """Return P with as many dimensions as the blocks have."""
    dims = len(blocks[P.ranks[0]].shape)
    return P.grid([P.shape[0], *(1,) * (dims - 2), P.shape[-1]])


def plan_product(
    x: ShapeDtypes,
    weights: WeightPlan,
    P_x: Partition,
    P_y: Partition,
    work: Partition,
    routes: tuple[RouteName, RouteName],
    in_features: int,
    out_features: int,
) -> ProductPlan:
    """Plan y = x W^T + b, along the last dimension of x.

    - `x`: the blocks on P_x, and placeholders on the other workers of the operation.
    - `weights`: the movement of W and b to `work`, P_n x P_fo x P_fi, the workers that multiply.
    - `routes`: from P_x to `work`, and from there to P_y; see `routes_between`.

    **Raises:** `PlanError` if blocks of x don't have their balanced share of `in_features`.
    """
    _check_features(x, P_x, in_features)
    from_x, to_y = (ROUTES[name] for name in routes)
    to_work = from_x.gather(x, P_x, work)
    local = _affine_maps(work, in_features, out_features)
    summands = products(to_work.after(x), weights, local)
    return ProductPlan(to_work, weights, summands, to_y.scatter(summands, P_y, work), local)


def _affine_maps(work: Partition, in_features: int, out_features: int) -> dict[int, LocalAffine]:
    """Return the product of each worker that multiplies, by world rank."""
    _, p_fo, p_fi = work.shape
    rows, columns = balanced_sizes(out_features, p_fo), balanced_sizes(in_features, p_fi)
    indices = (index_of(rank, work.shape) for rank in range(work.size))
    return {
        worker: LocalAffine((rows[i], columns[j]), adds_bias=j == 0)
        for worker, (_, i, j) in zip(work.ranks, indices, strict=True)
    }


def _check_features(x: ShapeDtypes, P_x: Partition, in_features: int) -> None:
    """Reject blocks of x without their share of the features."""
    shares = balanced_sizes(in_features, P_x.shape[-1])
    for rank, worker in enumerate(P_x.ranks):
        block, shape = rank % len(shares), x[worker].shape
        if len(shape) < 2 or shape[-1] != shares[block]:
            raise PlanError(
                f"On worker {worker}: `x` has shape {shape}, but block {block} must be ... x {shares[block]}: "
                f"{in_features} features, balanced over {len(shares)} workers."
            )
