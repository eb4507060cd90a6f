"""Rules of reductions, running sums, and of what works along whole dimensions: sorting, Fourier transforms, factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from distdl_jax.distribute.interpreter import LINEAR, Site, rule
from distdl_jax.distribute.layouts import Axes, Cut
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.functional.all_reduce import ProdPlan
from distdl_jax.functional.all_sum_reduce import AllSumPlan
from distdl_jax.functional.largest import argmax_of, plan_top_k
from distdl_jax.functional.reductions import plan_reduction
from distdl_jax.functional.scans import plan_cumulative, running
from distdl_jax.plans.shape_dtype import ShapeDtype


def _without(cut: Cut, dims: Sequence[int]) -> list[Axes]:
    return [axes for d, axes in enumerate(cut) if d not in dims]


def _along(cut: Cut, dims: Sequence[int]) -> list[int]:
    return [a for d in dims for a in cut[d]]


@rule("reduce_sum")
def reduce_sum(site: Site, x: Tensor) -> Tensor:
    """The sum of each worker's entries is a term."""
    cut, dims = x.readable(), site.params["axes"]
    return site.value(site.bind(x.at(cut)), _without(cut, dims), _along(cut, dims))


@rule("psum", "pmax", "pmin")
def of_a_mapped_axis(site: Site, *xs: Tensor) -> list[Tensor]:
    """A reduction over an axis of `jax.vmap`, which has become a dimension."""
    dims, results = site.params["axes"], []
    if not all(isinstance(d, int) for d in dims):
        raise site.refuse(
            f"is a collective along the mesh axes {dims}: a distributed function has none of its own", *xs
        )
    for n, x in enumerate(xs):
        if site.name == "psum":
            cut = x.readable()
            results.append(site.value(jnp.sum(x.at(cut), dims), _without(cut, dims), _along(cut, dims), n))
        else:
            results.append(_extreme(site, x, dims, site.name[1:], n))
    return results


@rule("reduce_max", "reduce_min")
def reduce_extreme(site: Site, x: Tensor) -> Tensor:
    """The extreme of the workers' extremes; the gradient is shared by all ties, wherever they are."""
    return _extreme(site, x, site.params["axes"], site.name[-3:])


def _extreme(site: Site, x: Tensor, dims: Sequence[int], op: Any, n: int = 0) -> Tensor:
    cut, movements = x.readable(), site.movements
    if not _along(cut, dims):
        return site.value((jnp.max if op == "max" else jnp.min)(x.at(cut), tuple(dims)), _without(cut, dims), n=n)
    plan = plan_reduction(movements.blocks(cut, x.shape, x.dtype), site.mesh.partition(cut), op, tuple(dims))
    y = movements.compute(plan, x.at(cut), op, x.shape, cut, tuple(() if d in dims else a for d, a in enumerate(cut)))
    return site.value(lax.squeeze(y, tuple(dims)).astype(site.outs[n].dtype), _without(cut, dims), n=n)


@rule("reduce_or", "reduce_and", "reduce_xor", "reduce_prod")
def reduce_other(site: Site, x: Tensor) -> Tensor:
    """Each worker's entries, and then the workers' results."""
    cut, dims, movements = x.readable(), site.params["axes"], site.movements
    over = _along(cut, dims)
    if over and site.name != "reduce_prod" and (x.dtype != np.bool_ or site.name == "reduce_xor"):
        cut = x.whole_along(dims)
        return site.value(site.bind(x.at(cut)), _without(cut, dims))
    y, after = site.bind(x.at(cut)), tuple(_without(cut, dims))
    if over and site.name == "reduce_prod":
        team = site.mesh.team(over)
        inputs = dict.fromkeys(team, ShapeDtype(tuple(y.shape), np.dtype(y.dtype)))
        y = movements.compute(ProdPlan(AllSumPlan((team,), inputs)), y, "product", site.shape, after, after)
    elif over:
        y = ~movements.all_sum(~y, over) if site.name == "reduce_and" else movements.all_sum(y, over)
    return site.value(y, after)


@rule("argmax", "argmin")
def arg_extreme(site: Site, x: Tensor) -> Tensor:
    """The smallest index of the extreme; NaN comes first."""
    cut, (d,) = x.readable(), site.params["axes"]
    negated = site.name == "argmin"
    if not cut[d] or (negated and not jnp.issubdtype(x.dtype, jnp.floating)) or jnp.issubdtype(x.dtype, np.bool_):
        cut = x.whole_along([d])
        return site.value(site.bind(x.at(cut)), _without(cut, (d,)))
    block = -x.at(cut) if negated else x.at(cut)
    P, grid, after = site.mesh.partition(cut), site.mesh.grid(cut, x.shape), tuple(_without(cut, (d,)))
    y = site.movements.computed(lambda x: argmax_of(x, P, grid, d), block, "argmax", x.shape, cut, after)
    return site.value(y.astype(site.outs[0].dtype), after)


@rule("cumsum", "cumprod", "cummax", "cummin")
def cumulative(site: Site, x: Tensor) -> Tensor:
    """Each worker's own, combined with the last result of the workers before."""
    cut, d, reverse = x.readable(), site.params["axis"], site.params["reverse"]
    if not cut[d]:
        return site.value(site.bind(x.at(cut)), cut)
    plan = plan_cumulative(
        site.name, site.movements.blocks(cut, x.shape, x.dtype), site.mesh.partition(cut), d, reverse
    )
    world = site.mesh.world
    y = site.movements.computed(
        lambda x: running(site.name, plan, world, x, d, reverse), x.at(cut), "running sums", x.shape, cut, cut
    )
    return site.value(y.astype(x.dtype), cut)


LINEAR["cumsum"] = lambda site: (0,)


@rule("top_k")
def top_k(site: Site, x: Tensor) -> list[Tensor]:
    """The largest of the workers' largest."""
    cut, d = x.readable(), site.params.get("axis", -1) % len(x.shape)
    if not cut[d]:
        return [site.value(y, cut, n=n) for n, y in enumerate(site.bind(x.at(cut)))]
    plan = plan_top_k(site.movements.blocks(cut, x.shape, x.dtype), site.mesh.partition(cut), site.params["k"], d)
    after = tuple(() if e == d else axes for e, axes in enumerate(cut))
    results = site.movements.compute(plan, x.at(cut), "top k", x.shape, cut, after)
    return [site.value(y.astype(site.outs[n].dtype), after, n=n) for n, y in enumerate(results)]


@rule("tridiagonal_solve")
def tridiagonal_solve(site: Site, *xs: Tensor) -> Tensor:
    """The right-hand side's last dimension, and leading ones, are a batch."""
    *diagonals, b = xs
    n = len(b.shape)
    cut = list(claimed_elsewhere(site, b, [n - 2]))
    return site.value(site.bind(*(x.at(cut[: n - 1]) for x in diagonals), b.at(cut)), cut)


def _last_two(site: Site, x: Tensor) -> Sequence[int]:
    return range(len(x.shape) - 2, len(x.shape))


WHOLE_ALONG = {
    "cumlogsumexp": lambda site, x: [site.params["axis"]],
    "sort": lambda site, x: [site.params["dimension"]],
} | dict.fromkeys(
    (
        "cholesky",
        "cholesky_update",
        "qr",
        "householder_product",
        "geqrf",
        "geqp3",
        "eigh",
        "lu",
        "svd",
        "eig",
        "hessenberg",
        "schur",
    ),
    _last_two,
)
"""By primitive: the dimensions along which it works; in the others it is elementwise."""


@rule(*WHOLE_ALONG)
def on_whole_dimensions(site: Site, *xs: Tensor) -> list[Tensor]:
    """The dimensions along which it works are made whole: their cuts move to others, or are gathered."""
    dims = list(WHOLE_ALONG[site.name](site, xs[0]))
    largest = max(xs, key=lambda x: x.size)
    cut = claimed_elsewhere(site, largest, dims)
    results = site.bind(*(x.at(cut[: len(x.shape)]) for x in xs))
    results = results if site.eqn.primitive.multiple_results else [results]
    n = len(xs[0].shape)
    return [
        site.value(y, (*cut, *((),) * y.ndim)[: min(y.ndim, n)] + ((),) * (y.ndim - n), n=i)
        for i, y in enumerate(results)
    ]


def claimed_elsewhere(site: Site, x: Tensor, dims: Sequence[int]) -> Cut:
    """Return the cut with `dims` whole, or refuse: all of a large value would have to be gathered."""
    cut = x.whole_along(dims)
    gather = site.run.gather
    lost = {a for axes in x.natural() for a in axes} - {a for axes in cut for a in axes}
    if lost and gather is not None and x.bytes > gather:
        raise site.refuse(f"has no free dimension to move the cut of {list(dims)} to", x)
    return cut


@rule("triangular_solve")
def triangular_solve(site: Site, a: Tensor, b: Tensor) -> Tensor:
    """Leading dimensions are a batch."""
    dims = _last_two(site, b)
    cut = claimed_elsewhere(site, b, list(dims))
    return site.value(site.bind(a.at(cut), b.at(cut)), cut)
