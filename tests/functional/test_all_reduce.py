"""All-reduce beyond the matrix: numbers without an order or with ties, and how halves are rounded."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refused

import distdl_jax as dj
from distdl_jax.functional.all_reduce import plan_all_reduce
from distdl_jax.plans.shape_dtype import ShapeDtype

pytestmark = [pytest.mark.primitives]

SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 6e-8, -6e-8]


@pytest.mark.world(2)
@pytest.mark.simulated(3)
def test_extrema_are_those_of_jnp() -> None:
    """Of every dtype: infinities, NaN on any worker, both zeros, the ends of the integers; value for value as jnp."""
    P = dj.Partition()
    rng = np.random.default_rng(0)
    draws = {dtype: rng.choice(SPECIAL, (P.size, 200)) for dtype in ("float16", "bfloat16", "float32", "float64")}
    for dtype in ("int8", "uint8", "int32", "uint64"):
        ends = np.iinfo(dtype)
        draws[dtype] = rng.choice(np.array([ends.min, ends.max, 0, 1, 100], dtype), (P.size, 50))
    draws["bool"] = rng.integers(0, 2, (P.size, 20))

    def extrema(of: Callable[[str, Any], Any], xs: dict[str, Any]) -> dict[tuple[str, str], Any]:
        return {(op, dtype): of(op, x) for op in ("max", "min") for dtype, x in xs.items()}

    whole = {dtype: draw.astype(jnp.dtype(dtype)) for dtype, draw in draws.items()}
    wanted = jax.jit(partial(extrema, lambda op, x: getattr(jnp, op)(x, axis=0)))(whole)
    mine = {dtype: draw[P.rank] for dtype, draw in whole.items()}
    got = jax.jit(partial(extrema, lambda op, x: dj.all_reduce(x, P, op)))(mine)
    for (op, dtype), y in got.items():
        assert y.dtype == jnp.dtype(dtype)
        a, b = ((np.float32(x) if dtype == "bfloat16" else np.asarray(x)) for x in (y, wanted[op, dtype]))
        np.testing.assert_array_equal(a, b, err_msg=f"{op} of {dtype}")


@pytest.mark.world(2)
@pytest.mark.simulated(3)
def test_ties_share_the_cotangent_as_in_jnp() -> None:
    """Gradients of a loss of the maximum of numbers with many ties, on workers and in jnp; and of its gradient."""
    P = dj.Partition()
    x, weight = (np.random.default_rng(n).integers(0, 3, (P.size, 30)).astype(float) for n in (1, 2))

    def part(mine: jax.Array) -> jax.Array:
        return jnp.sum(weight[P.rank] * jnp.sin(dj.functional.all_max(mine, P)))

    def whole(x: jax.Array) -> jax.Array:
        return jnp.sum(weight * jnp.sin(jnp.max(x, axis=0)))

    def twice(gradient: Any) -> Any:
        return jax.jit(jax.grad(lambda x: jnp.sum(gradient(x) ** 2)))

    np.testing.assert_allclose(jax.jit(jax.grad(part))(x[P.rank]), jax.jit(jax.grad(whole))(x)[P.rank], atol=1e-14)
    np.testing.assert_allclose(twice(jax.grad(part))(x[P.rank]), twice(jax.grad(whole))(x)[P.rank], atol=1e-13)


@pytest.mark.simulated(2)
def test_what_is_sent_and_what_is_compared_are_one_array() -> None:
    """A compiler may work x out for each use, rounded otherwise; then nobody would hold what was the largest.

    Both uses read the result of a loop, which it runs once. Seen in the compiled program of x = a b + c.
    """
    P = dj.Partition()
    a, b = jnp.arange(64.0), jnp.linspace(-1.0, 1.0, 64)
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(dj.functional.all_max(a * b + a * a, P)))))
    text = gradient.lower(a).compile().as_text()
    program = text[text.index("ENTRY") :]
    # A short loop may stand in a computation of its own (jaxlib 0.12).
    (loop,) = re.findall(r"%([\w.-]+) = \(.*?\) (?:while\(|call\(\S+ to_apply=%while)", program)
    (written,) = re.findall(rf"%([\w.-]+) = f64\[64\]\S* get-tuple-element\(%{re.escape(loop)}\)", program)
    uses = [line for line in program.splitlines() if re.search(rf"%{re.escape(written)}[,)]", line)]
    assert len(uses) == 2 and any("pred[64]" in use for use in uses) and any("s64[64]" in use for use in uses), text


@pytest.mark.simulated(2)
def test_a_policy_that_saves_movements_saves_what_they_keep() -> None:
    """Otherwise the x that is compared would be worked out again, an ulp from the one that was sent."""
    P = dj.Partition()

    @partial(jax.checkpoint, policy=lambda primitive, *_, **__: primitive.name == "custom_vjp_call")
    def loss(a: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(dj.functional.all_max(jnp.tanh(a) * a, P)))

    a = jnp.array([1.0, 2.0]) + P.rank
    program = jax.make_jaxpr(jax.grad(loss))(a)
    again = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name in ("checkpoint", "remat", "remat2")]
    assert len(again) == 1 and "eq " not in str(again[0]) and "eq " in str(program).replace(str(again[0]), "")
    largest = jnp.array([2.0, 3.0])
    expected = jax.grad(lambda a: 2 * jnp.sum(jnp.sin(jnp.tanh(a) * a)))(largest) * (P.rank == 1)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(a), expected, rtol=1e-14)


@pytest.mark.simulated(3)
def test_products_are_differentiated_exactly_at_zero() -> None:
    """One zero among the factors, and two."""
    P = dj.Partition()
    x = np.array([[2.0, 0.0, 0.0], [3.0, 5.0, 0.0], [-4.0, 7.0, 9.0]])
    gradient = jax.grad(lambda mine: jnp.sum(dj.all_reduce(mine, P, "prod")) / 3)(jnp.asarray(x[P.rank]))
    np.testing.assert_array_equal(gradient, np.array([[-12.0, 35.0, 0.0], [-8.0, 0, 0], [6.0, 0, 0]])[P.rank])


@pytest.mark.simulated(3, 4)
@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_products_of_complex_numbers_under_checkpoint(policy: str) -> None:
    """Whatever is saved: JAX's gradient of the product, and of its square, also where one is 0; of none."""
    P = dj.Partition()
    draw = np.random.default_rng(0).normal
    x = draw(size=(P.size, 4)) + 1j * draw(size=(P.size, 4))
    x[1, 2] = 0

    def parts(y: jax.Array) -> jax.Array:
        return jnp.sum(y.real**2 - 3 * y.imag)

    @partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    def loss(mine: jax.Array) -> jax.Array:
        return parts(dj.all_reduce(mine, P, "prod")) / P.size

    want = jax.jit(jax.grad(lambda x: parts(jnp.prod(x, axis=0))))(x)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x[P.rank]), want[P.rank], rtol=0, atol=1e-13)
    assert jax.grad(loss)(jnp.ones(0, complex)).shape == (0,)


@pytest.mark.simulated(4)
def test_means_round_once_and_of_integers_are_floats() -> None:
    P = dj.Partition()
    assert float(dj.all_reduce(jnp.int32(P.rank), P, "mean")) == 1.5
    assert dj.all_reduce(jnp.array([True, P.rank == 0]), P, "mean").tolist() == [1.0, 0.25]
    half = dj.all_reduce(jnp.float16(2048 if P.rank == 0 else 1), P, "mean")
    assert half.dtype == jnp.float16 and float(half) == float(np.float16(2051 / 4))
    huge = dj.all_reduce(jnp.float16(60000), P, "mean")  # the sum would overflow
    assert float(huge) == float(np.float16(60000))


@pytest.mark.simulated(4)
def test_teams_and_workers_outside() -> None:
    """By default all of P_x is one team, and the operation a sum; outside everything comes back as it is."""
    P = dj.Partition()
    pair = P.create_partition_inclusive([3, 1])
    for op, expected in (("max", 3), ("sum", 4)):
        assert float(dj.all_reduce(jnp.float32(P.rank), pair, op)) == (P.rank if P.rank in (0, 2) else expected)
    assert float(dj.all_reduce(jnp.float32(P.rank), P.grid([2, 2]), axes_keep=0)) == 4 * (P.rank // 2) + 1


@pytest.mark.simulated(2)
def test_what_does_not_fit_is_refused_on_all_workers() -> None:
    P = dj.Partition()
    with pytest.raises(dj.PlanError, match=r"On worker 0: `x` is complex64\[2\], but complex numbers have no order"):
        dj.functional.all_max(jnp.ones(2, "complex64"), P)
    for op in ("max", "mean", "prod"):
        with pytest.raises(dj.PlanError, match="`x` must have the same shape and dtype on all workers"):
            dj.all_reduce(jnp.ones(2 + P.rank), P, op)


def test_arguments_are_named() -> None:
    bad, f = dj.InvalidArgumentError, dj.functional
    refused(
        3,
        (
            "`op` (='product') must be one of 'sum', 'mean', 'max', 'min'",
            bad,
            lambda P: f.all_reduce(1.0, P, "product"),
        ),
        ("one of `axes_reduce` (=0) and `axes_keep` (=0)", bad, lambda P: f.all_reduce(1.0, P, "max", 0, 0)),
        ("`axes_reduce` (=(2,)) names dimension 2", bad, lambda P: f.all_max(1.0, P, 2)),
    )


def test_plans_know_the_dtypes() -> None:
    blocks = {worker: ShapeDtype((2,), np.dtype("int8")) for worker in range(3)}
    P = dj.planning_world(3, 1)
    assert plan_all_reduce(blocks, P, "mean").outputs == {w: ShapeDtype((2,), np.dtype(float)) for w in range(3)}
    assert plan_all_reduce(blocks, P, "min").outputs == plan_all_reduce(blocks, P, "prod").outputs == blocks
