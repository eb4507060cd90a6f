"""Reductions of split tensors beside jax.numpy's of whole ones: values, and gradients of what is made of the copies."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.partitions import On, on
from sequential import close, cut

import distdl_jax as dj
from distdl_jax import functional as F

# Partitions, lengths of blocks, and dimensions.
TENSORS: tuple[tuple[On, Any, Any], ...] = (
    (on(2, 2, ranks=(3, 1, 2, 0)), (3, 5), -1),
    (on(1, 2, 2), (2, [0, 3], [4, 1]), (1, 2)),
    (on(1, 3, ranks=(3, 0, 2)), (2, [2, 0, 3]), None),
    (on(2, 1), (3, 2), 1),
    (on(3,), ([0, 0, 4],), (0,)),
)  # fmt: skip
OPS = ("sum", "mean", "max", "min", "var", "std")


def whole(place: int) -> np.ndarray:
    """Numbers, of which some are equal, on several workers: above all the largest and the smallest."""
    shape = [n if isinstance(n, int) else sum(n) for n in TENSORS[place][1]]
    numbers = np.random.default_rng(place).integers(-2, 3, shape).astype(float)
    return numbers + 0.01 * np.arange(numbers.size).reshape(numbers.shape) * (abs(numbers) < 2)


@pytest.mark.simulated(4)
def test_beside_jnp() -> None:
    """On even, uneven and empty blocks, on any teams; dimensions as one, several, negative, all; kept or not. And
    gradients of what a user makes of a tensor and its reductions: entries times numbers that stand for their row."""
    P = dj.Partition()
    xs = [whole(place) for place in range(len(TENSORS))]
    cs = [np.random.default_rng(9).normal(size=x.shape) for x in xs]

    def cut_all(wholes: Any) -> Any:
        blocks = [cut(np.asarray(x), grid, P.rank, sizes) for x, (grid, sizes, _) in zip(wholes, TENSORS, strict=True)]
        return [np.zeros((2, 0)) if block is None else block for block in blocks]

    def program(reduced: Any, xs: Any, cs: Any) -> Any:
        loss, results = 0.0, []
        for x, c, (grid, _, axes) in zip(xs, cs, TENSORS, strict=True):
            kept = [reduced(op, x, grid, axes, True) for op in OPS] + [reduced("var", x, grid, axes, True, ddof=1)]
            loss += jnp.sum(c * jnp.sin(x * sum((k + 1) * each for k, each in enumerate(kept))))
            results.append((kept, [reduced(op, x, grid, axes, False) for op in ("mean", "max")]))
        return loss, results

    def ours(op: str, x: Any, grid: On, axes: Any, keepdims: bool, **options: int) -> Any:
        return getattr(F, op)(x, grid.partition(P), axes, keepdims, **options)

    def plain(op: str, x: Any, grid: On, axes: Any, keepdims: bool, **options: int) -> Any:
        return getattr(jnp, op)(x, axes, keepdims=keepdims, **options)

    of_blocks = dj.jit(dj.value_and_grad(partial(program, ours), has_aux=True))
    (value, found), gradient = of_blocks(cut_all(xs), cut_all(cs))
    (want, wanted), slopes = jax.jit(jax.value_and_grad(partial(program, plain), has_aux=True))(xs, cs)
    close(value, want, 1e-12, "value")
    for mine, its, what in zip(gradient, cut_all(slopes), TENSORS, strict=True):
        close(mine, its, 1e-12, f"gradient of {what}")
    for (kept, flat), (its, _), (grid, sizes, axes) in zip(found, wanted, TENSORS, strict=True):
        if P.rank not in grid.ranks:
            assert all(y.shape == (2, 0) for y in (*kept, *flat))
            continue
        along = {axis % len(sizes) for axis in (range(len(sizes)) if axes is None else np.atleast_1d(axes).tolist())}
        ones = [p if d in along else n for d, (n, p) in enumerate(zip(sizes, grid.shape, strict=True))]  # one a worker
        lengths = [n if isinstance(n, int) else sum(n) for n in ones]
        wants = [cut(np.broadcast_to(y, lengths), grid, P.rank, ones) for y in its]
        for op, mine, want in zip((*OPS, "var"), kept, wants, strict=True):
            close(mine, want, 1e-12, f"{op} of {grid}")
        for mine, want in zip(flat, (wants[1], wants[2]), strict=True):
            close(mine, np.squeeze(want, tuple(along)), 1e-12, f"without dimensions, of {grid}")


@pytest.mark.simulated(2)
def test_dtypes() -> None:
    """Those of jnp; half precisions are summed in float32, also to the number of those that tie; complex numbers."""
    P = dj.Partition().grid([1, 2])
    x = np.tile([[100.0, 102.0]], 1500)
    for dtype in ("float16", "bfloat16"):
        found = jax.jit(lambda x: [getattr(F, op)(x, P, 1) for op in ("mean", "var", "std", "max", "min")])
        y = found(jnp.asarray(cut(x, on(1, 2), P.rank), dtype))
        assert [float(each[0, 0]) for each in y] == [101, 1, 1, 102, 100] and {str(each.dtype) for each in y} == {dtype}
    ties = jax.jit(jax.grad(lambda x: jnp.sum(F.max(x, P, 1) * (P.rank == 0))))(jnp.ones((1, 2050 + P.rank), "float16"))
    np.testing.assert_array_equal(ties, np.full(ties.shape, 1 / 4101, "float16"))
    integers = jnp.array([[3, -4]], "int8") + jnp.int8(P.rank)
    y = jax.jit(lambda x: [getattr(F, op)(x, P, (0, 1)) for op in OPS])(integers)
    want = [getattr(jnp, op)(jnp.array([3, -4, 4, -3], "int8")) for op in OPS]
    assert [each.dtype for each in y] == [each.dtype for each in want]
    np.testing.assert_allclose(np.ravel(y), np.ravel(want), rtol=1e-6)
    assert F.max(jnp.array([[P.rank == 1]]), P).tolist() == [[True]]
    assert F.mean(jnp.array([[1j + P.rank]]), P).tolist() == [[0.5 + 1j]]
    assert np.isnan(F.max(jnp.array([[1.0, jnp.nan if P.rank else 2.0]]), P)).all()
    assert np.isnan(F.mean(jnp.ones((1, 0)), P)).all() and F.sum(jnp.ones((1, 0)), P).tolist() == [[0.0]]


@pytest.mark.simulated(4)
def test_variances_of_numbers_far_from_zero() -> None:
    """In float32 to a few units in the last place, up to a mean of a million deviations, where jnp has no digit left;
    of blocks with other means, of a first number that is far from the others, of uneven blocks, one empty. The same on
    all workers."""
    P, grid, sizes, draw = dj.Partition(), on(1, 4), [3000, 0, 20, 7001], np.random.default_rng(0).standard_normal
    rows = []
    for mean in (0, 1, 1e2, 1e4, 1e6):
        numbers = mean + draw((2, sum(sizes)))
        numbers[0, 0] = 0
        rows += [*numbers, numbers[1] + np.linspace(-2, 2, sum(sizes))]
    x = np.float32([*rows, np.full(sum(sizes), 0.1)])
    means, variances = (getattr(np, op)(np.float64(x), axis=1, keepdims=True) for op in ("mean", "var"))
    block = cut(x, grid, P.rank, [len(x), sizes])
    F_var = partial(F.var, P_x=grid.partition(P), axes=1)
    found = np.asarray(dj.jit(F_var)(block))
    np.testing.assert_allclose(found[:-1], variances[:-1], rtol=5e-7)
    assert 0 <= found[-1, 0] < 1e-16
    assert all(each == found.ravel().tolist() for each in P.allgather_data(found.ravel().tolist()))
    slopes = dj.jit(dj.grad(lambda x: jnp.sum(F_var(x)) / 4))(block)
    wide = np.float64(block - np.float32(means)) - (means - np.float32(means))  # first the near part: it is exact
    np.testing.assert_allclose(slopes, 2 * wide / x.shape[1], rtol=2e-6, atol=1e-10)


@pytest.mark.parametrize("workers", [4, 4096])
def test_messages_of_a_variance_do_not_grow_with_the_workers(workers: int) -> None:
    P = dj.planning_world(workers).grid([1, workers])
    blocks = dict.fromkeys(range(workers), dj.ShapeDtype((3, 2), np.dtype("float32")))
    moments = F.reductions.plan_reduction(blocks, P, "var", (1,)).moments
    forward = [(each.kind, each.count) for plan in (moments.sums, moments.pairs) for each in plan.operations(1)]
    assert forward == [("allreduce", 3), ("allreduce", 6)]
    assert [each.count for each in moments.pairs.operations(1, adjoint=True)] == [6]


@pytest.mark.simulated(2)
def test_refusals() -> None:
    """In one sentence on every worker."""
    P = dj.Partition()

    real = np.ones((2, 3))

    def called(function: Any, *args: Any, x: Any = real, **options: Any) -> Any:
        return lambda: function(jnp.asarray(x), P.grid([1, 2]), *args, **options)

    ones, nothing = np.ones((2, 3), complex), np.ones((2, 0))
    for sentence, error, work in (
        ("`axes` (=(2,)) names dimension 2, but the partition", dj.InvalidArgumentError, called(F.mean, 2)),
        ("`axes` (=(0, -2)) names a dimension twice", dj.InvalidArgumentError, called(F.sum, (0, -2))),
        ("`keepdims` (=2) must be True or False.", dj.InvalidTypeError, called(F.max, 0, 2)),
        ("`ddof` (=-1) must be 0 or more.", dj.InvalidArgumentError, called(F.std, ddof=-1)),
        ("`x` must hold real numbers, but is complex", dj.PlanError, called(F.var, x=ones)),
        ("hold real numbers, which have an order, but is complex", dj.PlanError, called(F.min, x=ones)),
        ("`x` (2 x 0) must have an entry along dimensions (1,)", dj.PlanError, called(F.max, 1, x=nothing)),
        ("The blocks of `x` don't form a 1 x 2 grid", dj.PlanError, called(F.mean, x=np.ones((2 - P.rank, 3)))),
    ):
        with pytest.raises(error, match=re.escape(sentence)):
            work()
