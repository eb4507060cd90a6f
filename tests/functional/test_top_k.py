"""The largest along a split dimension: values, indices in the whole, and the way of the gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block_of
from matrix import reference
from matrix.partitions import blocks, on

import distdl_jax as dj
from distdl_jax.functional.largest import plan_top_k


@pytest.mark.simulated(4)
def test_indices_are_those_of_the_whole_tensor_and_the_first_of_equals_comes_first() -> None:
    """Of floats with NaN and infinities, halves, integers; on uneven and empty blocks; along a negative dimension."""
    P, rng = dj.Partition(), np.random.default_rng(0)
    cases = [
        (on(1, 4), blocks(on(1, 4), 3, (2, 0, 3, 1)), 4, 1, "float32"),
        (on(2, 2, ranks=(3, 1, 2, 0)), blocks(on(2, 2, ranks=(3, 1, 2, 0)), 5, 3), 3, -2, "float64"),
        (on(3, ranks=(2, 0, 3)), blocks(on(3, ranks=(2, 0, 3)), 7), 7, 0, "int8"),
        (on(4), blocks(on(4), 3), 0, -1, "bfloat16"),
        (on(1, 2, 2), blocks(on(1, 2, 2), 2, 3, 5), 2, -1, "float16"),
    ]
    given = []
    for P_x, shapes, _, _, dtype in cases:
        special = [np.nan, np.inf, -np.inf] if dtype.startswith("float") else [5]
        numbers = [rng.choice([*range(-3, 3), *special], shape) for shape in shapes]
        given.append([jnp.asarray(each if i in P_x.ranks else each[:0], dtype) for i, each in enumerate(numbers)])

    def program(xs: list[Any]) -> list[Any]:
        pairs = zip(cases, xs, strict=True)
        return [dj.functional.top_k(x, P_x.partition(P), k, axis) for (P_x, _, k, axis, _), x in pairs]

    own = [arrays[P.rank] for arrays in given]
    for (P_x, _, k, axis, dtype), arrays, (values, places) in zip(cases, given, dj.jit(program)(own), strict=True):
        want_values, want_places = reference.top_k(arrays, P_x.grid, k, axis % len(P_x.shape))
        np.testing.assert_array_equal(np.asarray(values), np.asarray(want_values[P.rank]))
        np.testing.assert_array_equal(places, want_places[P.rank])
        assert values.dtype == dtype and places.dtype == np.int32
        if P.rank in P_x.ranks:
            plan = plan_top_k(dict(enumerate(map(shape_dtype, arrays))), P_x.partition(P), k, axis)
            assert plan.output(P.rank) == shape_dtype(values)


def shape_dtype(x: Any) -> dj.ShapeDtype:
    return dj.ShapeDtype(x.shape, np.dtype(x.dtype))


@pytest.mark.simulated(3)
def test_a_beam_search_chooses_and_differentiates_as_on_one_worker() -> None:
    """Under vmap and scan, with a loss of which each worker adds a third: its copies count once together."""
    P = dj.Partition().grid([1, 3])
    whole = np.random.default_rng(1).normal(size=(4, 2, 7))
    spec = dj.TensorSpec((2, 7), P)
    own = np.stack([block_of(each, spec) for each in whole])

    def loss(xs: Any, top_k: Any, workers: int) -> Any:
        def step(total: Any, x: Any) -> Any:
            values, places = jax.vmap(lambda row: tuple(each[0] for each in top_k(row[None])))(x)
            return total + jnp.sum(jnp.sin(values) * (1 + places)) / workers, places

        return jax.lax.scan(step, 0.0, xs)

    def beside(x: Any) -> Any:
        return dj.functional.top_k(x, P, 3)

    def plain(x: Any) -> Any:
        return jax.lax.top_k(x, 3)

    derivative = dj.value_and_grad(lambda xs: loss(xs, beside, 3), has_aux=True)
    (value, places), gradient = dj.jit(derivative)(own)
    (want, want_places), want_gradient = jax.jit(jax.value_and_grad(lambda xs: loss(xs, plain, 1), has_aux=True))(whole)
    np.testing.assert_array_equal(places, want_places)
    np.testing.assert_allclose(value, want, rtol=1e-13)
    np.testing.assert_allclose(gradient, np.stack([block_of(each, spec) for each in want_gradient]), atol=1e-14)


@pytest.mark.simulated(2)
def test_what_has_no_order_is_refused() -> None:
    P = dj.Partition().grid([2])
    for dtype in (bool, complex):
        with pytest.raises(dj.PlanError, match="must hold real numbers, which have an order"):
            dj.functional.top_k(jnp.ones(2, dtype), P, 1)
    with pytest.raises(dj.InvalidArgumentError, match=r"`k` \(=-1\) must be 0 or more"):
        dj.functional.top_k(jnp.ones(2), P, -1)
