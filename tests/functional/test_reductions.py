"""Reductions of split tensors beside jax.numpy's of whole ones: values, and gradients of what is made of the copies."""

from __future__ import annotations

import math
import re
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


def ops(place: int) -> tuple[str, ...]:
    """All for one tensor, and the two of a kind that compute in a way of their own for the others."""
    return OPS if place == 1 else ("mean", "max")


def shape_of(sizes: Any) -> tuple[int, ...]:
    return tuple(n if isinstance(n, int) else sum(n) for n in sizes)


def whole(place: int) -> np.ndarray:
    """Numbers, of which some are equal, on several workers: above all the largest and the smallest."""
    numbers = np.random.default_rng(place).integers(-2, 3, shape_of(TENSORS[place][1])).astype(float)
    return numbers + 0.01 * np.arange(numbers.size).reshape(numbers.shape) * (abs(numbers) < 2)


def made_of(x: Any, reduced: Any, c: Any) -> Any:
    """What a user makes of a tensor and its reductions: entries times numbers that stand for their row."""
    return jnp.sum(c * jnp.sin(x * sum((k + 1) * each for k, each in enumerate(reduced))))


@pytest.mark.simulated(4)
def test_beside_jnp() -> None:
    """On even, uneven and empty blocks, on any teams; dimensions as one, several, negative, all; kept or not."""
    P = dj.Partition()
    xs = {place: whole(place) for place in range(len(TENSORS))}
    cs = {place: np.random.default_rng(9).normal(size=x.shape) for place, x in xs.items()}

    def cut_all(tensors: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        blocks = {k: cut(x, TENSORS[k][0], P.rank, TENSORS[k][1]) for k, x in tensors.items()}
        return {k: np.zeros((2, 0)) if block is None else block for k, block in blocks.items()}

    def program(xs: Any) -> Any:
        own_c, parts, flat = cut_all(cs), [], {}
        for place, (grid, _, axes) in enumerate(TENSORS):
            P_x, x = grid.partition(P), xs[place]
            found = [getattr(F, op)(x, P_x, axes) for op in ops(place)] + [F.var(x, P_x, axes, ddof=1)]
            parts.append(made_of(x, found, own_c[place]))
            flat[place] = [F.mean(x, P_x, axes, keepdims=False), F.max(x, P_x, axes, False), found]
        return sum(parts), flat

    def plain(xs: Any) -> Any:
        parts, flat = [], {}
        for place, (_, _, axes) in enumerate(TENSORS):
            x = xs[place]
            found = [getattr(jnp, op)(x, axis=axes, keepdims=True) for op in ops(place)]
            found.append(jnp.var(x, axis=axes, keepdims=True, ddof=1))
            parts.append(made_of(x, found, cs[place]))
            flat[place] = [jnp.mean(x, axes), jnp.max(x, axes), found]
        return sum(parts), flat

    (value, flat), gradient = dj.jit(dj.value_and_grad(program, has_aux=True))(cut_all(xs))
    (want, whole_flat), slopes = jax.jit(jax.value_and_grad(plain, has_aux=True))(xs)
    close(value, want, 1e-12, "value")
    for place, (grid, sizes, axes) in enumerate(TENSORS):
        if P.rank not in grid.ranks:
            assert flat[place][0].shape == gradient[place].shape == (2, 0)
            continue
        close(gradient[place], cut(np.asarray(slopes[place]), grid, P.rank, sizes), 1e-12, f"gradient of {place}")
        along = range(grid.grid.ndim) if axes is None else np.atleast_1d(axes) % grid.grid.ndim
        kept = [d for d in range(grid.grid.ndim) if d not in along]
        first = np.moveaxis(grid.grid, kept, range(len(kept)))
        row = np.argwhere(first == P.rank)[0][: len(kept)]
        for mine, its in zip(flat[place][:2], whole_flat[place][:2], strict=True):
            for d, (axis, i) in enumerate(zip(kept, row, strict=True)):
                ends = np.cumsum([len(part) for part in np.array_split(np.arange(its.shape[d]), grid.shape[axis])])
                its = np.split(its, ends[:-1], d)[i]
            close(mine, its, 1e-12, f"without dimensions, of {place}")
        for op, mine in zip((*ops(place), "var"), flat[place][2], strict=True):
            assert mine.shape == tuple(1 if d in along else n for d, n in enumerate(gradient[place].shape)), op


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


@pytest.mark.simulated(2)
def test_a_loss_of_copies_is_divided_by_their_number() -> None:
    """As the docs say; else it would count once for each."""
    P = dj.Partition().grid([1, 2])
    x = np.arange(6.0).reshape(2, 3)
    copies = math.prod(P.shape[axis] for axis in (1,))
    step = jax.jit(dj.value_and_grad(lambda x: jnp.sum(F.mean(x, P, 1) ** 2) / copies))
    value, gradient = step(cut(x, on(1, 2), P.rank))
    assert float(value) == 17.0
    np.testing.assert_allclose(gradient, cut(np.repeat(2 * x.mean(1, keepdims=True) / 3, 3, 1), on(1, 2), P.rank))


@pytest.mark.simulated(2)
def test_refusals() -> None:
    """In one sentence on every worker."""
    P = dj.Partition()
    x = dict.fromkeys((0, 1), jnp.ones((2, 3)))

    def called(function: Any, *args: Any, x: Any = x, **options: Any) -> Any:
        return lambda: function(x[P.rank], P.grid([1, 2]), *args, **options)

    complex_numbers, nothing = (
        {w: jnp.ones(shape, dtype) for w in x} for shape, dtype in (((2, 3), complex), ((2, 0), float))
    )
    for sentence, work, error in (
        ("`axes` (=(2,)) names dimension 2, but the partition", called(F.mean, 2), dj.InvalidArgumentError),
        ("`axes` (=(0, -2)) names a dimension twice", called(F.sum, (0, -2)), dj.InvalidArgumentError),
        ("`keepdims` (=2) must be True or False.", called(F.max, 0, 2), dj.InvalidTypeError),
        ("`ddof` (=-1) must be 0 or more.", called(F.std, ddof=-1), dj.InvalidArgumentError),
        ("`x` must hold real numbers, but is complex", called(F.var, x=complex_numbers), dj.PlanError),
        (
            "`x` must hold real numbers, which have an order, but is complex",
            called(F.min, x=complex_numbers),
            dj.PlanError,
        ),
        ("`x` (2 x 0) must have an entry along dimensions (1,)", called(F.max, 1, x=nothing), dj.PlanError),
        (
            "The blocks of `x` don't form a 1 x 2 grid",
            called(F.mean, x={0: jnp.ones((2, 3)), 1: jnp.ones((1, 3))}),
            dj.PlanError,
        ),
    ):
        with pytest.raises(error, match=re.escape(sentence)):
            work()
