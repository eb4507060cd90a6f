"""Means, extrema and softmax of entries with the same number, beside JAX's of the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refused
from blocks import block
from matrix.partitions import On, on

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax.functional.segments import plan_grouped
from distdl_jax.plans.shape_dtype import ShapeDtype


class Case(NamedTuple):
    """`operation` on x of `shape`, of which so many segments along `axis` are numbered by `ids`."""

    operation: str
    P_x: On
    P_y: On | None
    shape: tuple[int, ...]
    ids: list[int]
    n: int
    axis: int = 0

    @property
    def x(self) -> np.ndarray:
        """Numbers of which several are equal."""
        return np.random.default_rng(len(self.ids)).integers(-3, 4, self.shape) / 4.0

    @property
    def w(self) -> np.ndarray:
        shape = list(self.shape)
        shape[self.axis] = shape[self.axis] if self.operation == "softmax" else self.n
        return np.random.default_rng(self.n).normal(size=shape)

    def ours(self, P: dj.Partition) -> Callable[[Any], Any]:
        function, where = getattr(F, f"segment_{self.operation}"), {}
        if self.P_y is not None:
            where["P_y"] = self.P_y.partition(P)
        return lambda x: function(x, self.P_x.partition(P), self.ids, self.n, self.axis, **where)

    def plain(self, x: Any) -> Any:
        rows, ids = jnp.moveaxis(x, self.axis, 0), np.array(self.ids)
        if self.operation == "mean":
            counts = np.maximum(np.bincount(ids, minlength=self.n), 1)
            rows = jax.ops.segment_sum(rows, ids, self.n) / counts.reshape(-1, *(1,) * (x.ndim - 1))
        elif self.operation == "softmax":
            masks = jnp.asarray(ids[:, None] == ids)
            same = jnp.moveaxis(jnp.where(jnp.expand_dims(masks, range(2, x.ndim + 1)), rows, -jnp.inf), 1, 0)
            rows = jnp.exp(rows - jax.scipy.special.logsumexp(same, 0))
        else:
            rows = getattr(jax.ops, f"segment_{self.operation}")(rows, ids, self.n)
        return jnp.moveaxis(rows, 0, self.axis)


CASES = (
    Case("max", on(3, ranks=(3, 0, 2)), None, (8,), [2, 0, 2, 2, 3, 0, 1, 3], 4),
    Case("max", on(2, 2), on(4, 1, ranks=(2, 0, 3, 1)), (5, 3), [1, 0, 1, 0, 1], 2),
    Case("min", on(2, ranks=(1, 3)), on(2, ranks=(0, 2)), (5,), [0, 2, 2, 1, 0], 3),
    Case("mean", on(2, 2), None, (3, 6), [4, 0, 2, 2, 0, 0], 5, -1),
    Case("softmax", on(4, 1, ranks=(3, 1, 0, 2)), None, (7, 2), [2, 0, 2, 2, 0, 1, 0], 3),
    Case("softmax", on(2, 2), None, (2, 3), [1, 0, 1], 2, 1),
)  # fmt: skip


@pytest.mark.simulated(4)
def test_beside_those_of_the_whole() -> None:
    """Values and gradients: ties share, blocks are uneven or empty, teams disjoint, segments empty."""
    P = dj.Partition()

    def loss(f: Callable[[Any], Any], x: Any, w: Any) -> Any:
        y = f(x)
        return jnp.sum(jnp.where(jnp.isfinite(y), y, 1.0) * w), y

    def both(functions: list[Any], xs: list[Any], ws: list[Any], value_and_grad: Any) -> list[Any]:
        its = zip(functions, xs, ws, strict=True)
        return [value_and_grad(lambda x, f=f, w=w: loss(f, x, w), has_aux=True)(x) for f, x, w in its]

    where = [[case.P_x.partition(P), (case.P_y or case.P_x).partition(P)] for case in CASES]
    ours = [case.ours(P) for case in CASES]
    xs = [block(case.x, P_x) for case, (P_x, _) in zip(CASES, where, strict=True)]
    ws = [block(case.w, P_y) for case, (_, P_y) in zip(CASES, where, strict=True)]
    found = dj.jit(lambda xs, ws: both(ours, xs, ws, dj.value_and_grad))(xs, ws)
    plain = [case.plain for case in CASES]
    wanted = jax.jit(lambda xs, ws: both(plain, xs, ws, jax.value_and_grad))(
        [case.x for case in CASES], [case.w for case in CASES]
    )
    for case, ((value, y), dx), ((want, want_y), want_dx), (P_x, P_y) in zip(CASES, found, wanted, where, strict=True):
        assert abs(value - want) < 1e-12, case
        if P_y.active:
            np.testing.assert_allclose(y, block(np.asarray(want_y), P_y), rtol=1e-12, err_msg=str(case))
        if P_x.active:
            np.testing.assert_allclose(dx, block(np.asarray(want_dx), P_x), rtol=1e-12, atol=1e-14, err_msg=str(case))


@pytest.mark.simulated(2)
def test_dtypes() -> None:
    """Integers have extrema and floating means; the softmax of half precision is computed in float32."""
    P = dj.Partition()
    ids, numbers = [0, 1, 1, 1], np.array([2, -5, 7, 4])
    y = F.segment_max(block(numbers, P, np.int8), P, ids, 2)
    assert (y.dtype, y.tolist()) == (np.int8, [[2], [7]][P.rank])
    mean = F.segment_mean(block(numbers, P, np.int32), P, ids, 3)
    assert mean.dtype == np.float32 and mean.tolist() == [[2, 2], [0]][P.rank]
    half = F.segment_softmax(block(numbers / 8, P, jnp.bfloat16), P, ids, 2)
    wanted = np.exp(numbers / 8) / np.array([np.exp(0.25), *[np.exp(numbers[1:] / 8).sum()] * 3])
    np.testing.assert_array_equal(half, block(wanted, P, jnp.bfloat16))


def test_refusals() -> None:
    def planned(dtype: Any, ids: Any, **options: Any) -> Any:
        blocks = dict.fromkeys(range(2), ShapeDtype((2,), np.dtype(dtype)))
        return lambda P: plan_grouped(blocks, P.grid([2]), ids, 3, **options)

    few, square = [0, 1, 2], [[0, 1], [2, 2]]
    refused(
        2,
        ("must hold real numbers, but is complex64", dj.PlanError, planned("complex64", [*few, 2])),
        ("must hold floating numbers, but is int32", dj.PlanError, planned("int32", [*few, 2], operation="softmax")),
        ("`segment_ids` (of length 3) must have a number for each", dj.PlanError, planned("float32", few)),
        ("must have one dimension", dj.InvalidArgumentError, planned("float32", square)),
    )
