"""Scans along split dimensions beside JAX's of whole tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refused
from functional.arrays.beside import beside
from jax import lax
from matrix.partitions import On, on
from sequential import Beside, check_beside, close, cut

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax.functional.scans import plan_associative_scan, plan_cumulative
from distdl_jax.plans.shape_dtype import ShapeDtype


def cumulative(name: str, sizes: Any, P_x: On, axis: int, reverse: bool = False) -> Beside:
    return beside(
        f"{name} along {axis}, {reverse}",
        sizes,
        P_x,
        lambda x, P: getattr(F, name)(x, P, axis, reverse),
        lambda x: getattr(lax, name)(x, axis=axis % x.ndim, reverse=reverse),
        y_sizes=sizes,
    )


def after(first: Any, then: Any) -> Any:
    """h = a h + b, twice."""
    return {"a": first["a"] * then["a"], "b": first["b"] * then["a"] + then["b"]}


def turned(first: Any, then: Any) -> Any:
    """Products of matrices, which don't commute."""
    return jnp.einsum("n...ij,n...jk->n...ik", first, then)


def recurrence(sizes: Any, P_x: On, axis: int, reverse: bool = False) -> Beside:
    """Of which only the state is used: what else moves has an adjoint all the same."""

    def states(scan: Any, x: Any) -> Any:
        return scan(after, {"a": 1 - x**2 / 4, "b": jnp.sin(x)}, reverse=reverse, axis=axis)["b"]

    return beside(
        f"recurrence along {axis}, {reverse}",
        sizes,
        P_x,
        lambda x, P: states(lambda f, x, **options: F.associative_scan(f, x, P, **options), x),
        lambda x: states(lax.associative_scan, x),
        y_sizes=sizes,
    )


CASES = (
    cumulative("cumsum", (3, 7), on(2, 2), 1),
    cumulative("cumsum", (2, [2, 0, 1, 4]), on(1, 4, ranks=(3, 1, 0, 2)), -1, True),
    cumulative("cumprod", (5, 2), on(3, 1, ranks=(2, 3, 1)), 0),
    cumulative("cummax", (2, 6, 3), on(2, 2, 1), 1),
    cumulative("cummin", (3, 6), on(1, 4), 1, True),
    cumulative("cumsum", (4, 3), on(4, 1), 1),
    recurrence((2, 9, 3), on(1, 4, 1), 1),
    recurrence((2, [0, 4, 0, 1]), on(1, 4), 1),
    recurrence((5, 2), on(2, 2), 0, True),
    beside(
        "products of matrices",
        (6, 2, 2),
        on(3, 1, 1),
        lambda x, P: F.associative_scan(turned, x, P),
        lambda x: lax.associative_scan(turned, x),
    ),
)


@pytest.mark.simulated(4)
def test_beside_jax() -> None:
    """Values and gradients: even, uneven, unbalanced and empty blocks, the batch split too, any workers."""
    check_beside(CASES)


@pytest.mark.world(2)
def test_over_mpi() -> None:
    check_beside([cumulative("cumsum", (3, 5), on(1, 2), 1), recurrence((5, 2), on(2, 1, ranks=(1, 0)), 0)])


@pytest.mark.simulated(3)
def test_transformations() -> None:
    """Second derivatives, along a direction; vmap, checkpoint and scan around a scan, with arrays of other lengths."""
    P, line = dj.Partition(), on(3, 1)
    P_x, whole = line.partition(P), np.random.default_rng(4).normal(size=(2, 4, 7, 2))

    def states(x: Any, scan: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            once = jax.vmap(lambda x: scan(after, {"a": jnp.tanh(x[:, :1]), "b": x})["b"])(h * x)
            return jnp.sin(once), None

        return lax.scan(jax.checkpoint(body), jnp.ones(x.shape[1:]), x)[0]

    def second(x: Any, scan: Any, gradient: Any, part: Any = lambda w: w) -> Any:
        weight = part(np.cos(np.arange(4 * 7 * 2.0)).reshape(4, 7, 2))

        def loss(x: Any) -> Any:
            return jnp.sum(weight * states(x, scan) ** 2)

        return gradient(lambda x: jnp.sum(gradient(loss)(x) ** 2))(x)

    def part(whole: Any) -> Any:
        rows = cut(np.moveaxis(np.asarray(whole), -2, 0), on(3, *(1,) * (whole.ndim - 1)), P.rank)
        return np.moveaxis(rows, 0, -2)

    ours = partial(second, scan=lambda f, x: F.associative_scan(f, x, P_x), gradient=dj.grad, part=part)
    want = second(whole, lax.associative_scan, jax.grad)
    close(dj.jit(ours)(part(whole)), part(want), 1e-11, "second derivative")


@pytest.mark.simulated(2)
def test_what_dtypes_become() -> None:
    """As in jnp; half precisions are added in float32, so that a thousand ones are a thousand."""
    P_x = dj.Partition().grid([2])
    names = ("bool", "int8", "uint16", "float16", "bfloat16", "float32", "complex64")
    xs = [np.ones(3, jnp.dtype(name)) for name in names]
    many = np.ones(1000, jnp.bfloat16)
    ys, sums = dj.jit(lambda xs, many: ([F.cumsum(x, P_x, 0) for x in xs], F.cumsum(many, P_x, 0)))(xs, many)
    for x, y in zip(xs, ys, strict=True):
        assert y.dtype == jnp.cumsum(x).dtype
        np.testing.assert_array_equal(np.asarray(y, complex), np.arange(1, 4.0) + 3 * P_x.rank)
    assert float(sums[-1]) == (1000 if P_x.rank == 0 else 2000)


def test_plans_and_refusals() -> None:
    def blocks(*lengths: int) -> dict[int, ShapeDtype]:
        return {worker: ShapeDtype((n, 2), np.dtype("float16")) for worker, n in enumerate(lengths)}

    P = dj.planning_world(4096)
    plan = plan_cumulative("cumsum", blocks(*(3,) * 4096), P.grid([4096, 1]), 0)
    assert plan.output(4095) == ShapeDtype((3, 2), np.dtype("float16"))
    assert plan.fetch.output(4095) == ShapeDtype((4095, 2), np.dtype("float32"))
    assert plan.fetch.part(0) is not None

    def both(P: dj.Partition, *lengths: int) -> Any:
        first, second = blocks(2, 3), blocks(*lengths)
        return plan_associative_scan({worker: (first[worker], second[worker]) for worker in first}, P.grid([2, 1]))

    assert len(both(dj.planning_world(2), 2, 3)) == 2
    x, of_bools = np.ones(2), {worker: ShapeDtype((1,), np.dtype(bool)) for worker in (0, 1)}
    refused(
        2,
        ("equal blocks along dimension 0", dj.PlanError, lambda P: both(P, 3, 2)),
        ("`f`", TypeError, lambda P: F.associative_scan(None, x, P.grid([2]))),
        ("at least one array", ValueError, lambda P: F.associative_scan(max, (), P.grid([2]))),
        ("names dimension 1", ValueError, lambda P: F.cumsum(x, P.grid([2]), 1)),
        ("`reverse` (=3)", TypeError, lambda P: F.cumsum(x, P.grid([2]), 0, 3)),
        ("real numbers, but is bool", dj.PlanError, lambda P: plan_cumulative("cummax", of_bools, P.grid([2]), 0)),
    )
