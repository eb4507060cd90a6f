"""What was decided where two engineers would decide differently: programs, copies, packing, memory, lazy values."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import TensorSpec
from distdl_jax.tracing.jaxprs import equations

X = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)


def rows(workers: int, shape: tuple[int, ...] = X.shape) -> TensorSpec:
    return TensorSpec(shape, dj.Partition().grid([workers, *[1] * (len(shape) - 1)]))


# --- programs ---------------------------------------------------------------------------------------------------------

HASHED = """
import jax, jax.numpy as jnp, numpy as np
from distdl_jax.distribute.digests import combined, equation_digests, static_digest
closed = jax.make_jaxpr(lambda x: jnp.where(x > 1, jnp.nan, jnp.roll(jax.nn.relu(x), 1)) @ np.ones((3, 2)))(jnp.ones(3))
print(combined(equation_digests(closed)), static_digest(frozenset({"same", "valid", "full"})), static_digest(jnp.sin))
"""


def test_the_digest_of_a_program_is_the_same_in_all_processes() -> None:
    """Whatever the seed of Python's hashes: with a NaN, a static set, a function."""
    seen = set()
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", HASHED], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 1


def test_one_worker_may_ask_for_the_plan_alone() -> None:
    def program() -> None:
        spec = rows(2)
        f = dj.distribute(lambda x: x.sum(0), (spec,), dj.BLOCKS)
        if spec.partition.rank == 1:
            shape = jax.ShapeDtypeStruct(spec.local_shape, jnp.float32)
            assert f.plan(shape).messages == f.plan(spec.block(X)).messages == 1
            assert f.output_specs(shape).global_shape == (4,)

    dj.simulate(2, program)


def test_what_a_result_does_not_need_is_not_sent() -> None:
    def program() -> None:
        spec = rows(2)
        f = dj.distribute(lambda x: (jnp.roll(x, 1, 0), x + 1)[1], (spec,), spec)
        assert not f.plan(spec.block(X)).moved

    dj.simulate(2, program)


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_derivative_by_a_movement_only_is_none() -> None:
    """The argument is a sum of data, behind stop_gradient: its tangent exists for the order of messages alone."""

    def program() -> None:
        spec = rows(3)

        def loss(x: Any) -> Any:
            total = dj.all_reduce(lax.stop_gradient(x).sum(), spec.partition)
            return dj.distribute(lambda c, x: jnp.mean(c * x**2), (None, spec), dj.PARTS)(total, x)

        found = dj.grad(loss)(spec.block(X))
        np.testing.assert_allclose(found, spec.block(2 * X.sum() * X / X.size), rtol=1e-4)

    dj.simulate(3, program)


def test_copies_of_blocks_are_variables_or_copies() -> None:
    """A weight in blocks, of which each row of workers has a copy; also where a worker's block is empty."""
    x, w = np.ones((1, 4), np.float32), np.arange(4, dtype=np.float32)

    def program() -> None:
        P = dj.Partition()
        data = TensorSpec(x.shape, P.grid([2, 2]))
        weight = TensorSpec(w.shape, P.grid([2, 2]), replicated=(0,))

        def loss(w: Any, x: Any) -> Any:
            return jnp.sum((w * x) ** 2)

        args = weight.block(w), data.block(x)
        gradient = dj.grad(dj.distribute(loss, (dj.VARIABLE(weight), data), dj.PARTS))(*args)
        np.testing.assert_allclose(gradient, weight.block(2 * w), rtol=1e-6)
        with pytest.raises(dj.PlanError, match=r"`args\[0\]`.*dj.VARIABLE\(spec\).*dj.COPIES\(spec\)"):
            dj.grad(dj.distribute(loss, (weight, data), dj.PARTS))(*args)
        with pytest.raises(dj.PlanError, match="result 0, of which all workers have copies"):
            dj.grad(lambda w: dj.distribute(lambda w: w * 2, (dj.VARIABLE(weight),), weight)(w).sum())(args[0])

    dj.simulate(4, program)


def test_weak_types_are_kept() -> None:
    """So the second call of a step, with the first one's results, is not traced again."""
    traced = []

    def step(rate: Any, x: Any) -> Any:
        traced.append(0)
        return rate * 2, (x * rate).sum()

    def program() -> None:
        spec = rows(2)
        run, rate = jax.jit(dj.distribute(step, (None, spec))), 0.5
        for _ in range(3):
            rate, _ = run(jnp.asarray(rate) if isinstance(rate, float) else rate, spec.block(X))
        assert rate.weak_type

    dj.simulate(2, program)
    assert len(traced) == 2  # once on each worker


# --- functions with rules and derivatives of their own ----------------------------------------------------------------


@jax.custom_vjp
def clipped(x: Any) -> Any:
    """The identity, whose cotangent is clipped by its norm over the whole array."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, dy: (dy * jnp.minimum(1, 0.1 / jnp.sqrt(jnp.sum(dy**2))),))


@jax.custom_jvp
def logistic(x: Any, scale: Any) -> Any:
    return scale / (1 + jnp.exp(-x))


logistic.defjvps(lambda dx, y, x, scale: dx * y * (1 - y / scale), lambda dscale, y, x, scale: dscale * y / scale)


@jax.jit
def median(x: Any) -> Any:
    """A user's function with the name of one of JAX's."""
    return jnp.sin(x) * 3


def in_a_scan(function: Callable[..., Any], x: Any) -> Any:
    return lax.scan(lambda c, _: (function(c), None), x, None, length=2)[0]


@pytest.mark.parametrize(
    "function",
    [
        clipped,
        partial(in_a_scan, clipped),
        jax.checkpoint(lambda x: clipped(jnp.sin(x))),
        lambda x: logistic(x, 2.0) + logistic(lax.stop_gradient(x), jnp.mean(x)) + logistic(x, jnp.max(x)),
        partial(in_a_scan, lambda x: logistic(x, jnp.mean(x))),
        jax.vmap(clipped),
        median,
        jax.nn.relu,
    ],
)
def test_derivatives_of_functions_with_their_own(function: Callable[[Any], Any]) -> None:
    with jax.enable_x64(True):
        x = np.concatenate([np.zeros((1, 4)), X.astype(np.float64)])

        def loss(x: Any) -> Any:
            return jnp.sum(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) * function(x))

        expected = jax.grad(loss)(jnp.asarray(x))

        def program() -> None:
            spec = rows(3, x.shape)
            block = spec.block(x)
            inside = dj.distribute(jax.grad(loss), (spec,), spec)(block)
            outside = dj.grad(dj.distribute(loss, (spec,), dj.PARTS))(block)
            for found in (inside, outside):
                np.testing.assert_allclose(found, spec.block(expected), rtol=1e-10, atol=1e-12)

        dj.simulate(3, program)


# --- sums -------------------------------------------------------------------------------------------------------------


def test_statistics_are_as_accurate_as_those_of_one_process() -> None:
    """In float32, of numbers around 1e4: Flax's mean and mean of squares in one message, jnp.var in two."""
    x = (1e4 + np.random.default_rng(1).normal(size=(7, 400))).astype(np.float32)
    exact = x.astype(np.float64).var()

    def fast(x: Any) -> Any:
        return jnp.maximum(jnp.mean(lax.square(x)) - lax.square(jnp.mean(x)), 0)

    for function, messages in ((fast, 1), (jnp.var, 2)):
        alone = abs(float(jax.jit(function)(x)) - exact)

        def program(function: Any = function, messages: int = messages, alone: float = alone) -> None:
            spec = rows(3, x.shape)
            f = dj.distribute(function, (spec,))
            assert f.plan(spec.block(x)).messages == messages
            assert abs(float(jax.jit(f)(spec.block(x))) - exact) <= 2 * alone + 1e-5

        dj.simulate(3, program)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_masked_sum_of_what_is_not_finite_is_not_finite(bad: float) -> None:
    """A whole value counts once: by selection, since 0 * inf is NaN."""

    def program() -> None:
        spec = rows(2)
        f = dj.distribute(lambda c, x: (jnp.sum(x) + c, jnp.sum(x) * 2 + jnp.float32(1)), (None, spec))
        block = spec.block(X)
        total, finite = f(jnp.float32(bad), block)
        np.testing.assert_equal(float(total), bad)
        np.testing.assert_allclose(finite, 2 * X.sum() + 1, rtol=1e-5)
        if spec.partition.rank == 1:
            block = block.at[0, 0].set(bad)
        assert not np.isfinite(f(jnp.float32(0), block)[1])

    dj.simulate(2, program)


# --- memory -----------------------------------------------------------------------------------------------------------


def sizes(closed: Any) -> Iterator[int]:
    for eqn in equations(closed.eqns):
        yield from (int(np.prod(var.aval.shape)) for var in eqn.outvars if hasattr(var.aval, "shape"))


def noisy_loss(x: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(1), 0.7, x.shape)
    return jnp.sum(x * keep + jax.random.normal(jax.random.key(2), x.shape))


def dropout_in_a_scan(x: Any) -> Any:
    def step(c: Any, key: Any) -> Any:
        return jnp.tanh(c * jax.random.bernoulli(key, 0.7, c.shape)), None

    return jnp.sum(lax.scan(step, x, jax.random.split(jax.random.key(0), 3))[0])


def numbers_alone(x: Any) -> Any:
    return jnp.sum(lax.iota(jnp.int32, x.size) % 7) + jnp.sum(jnp.tril(jnp.ones(x.shape))) + jnp.sum(x)


def collected_noise(x: Any) -> Any:
    """A loop whose carry starts as zeros, and that blocks never meet."""

    def step(c: Any, key: Any) -> Any:
        return c + jax.random.normal(key, c.shape), None

    return jnp.sum(lax.scan(step, jnp.zeros(x.shape), jax.random.split(jax.random.key(0), 3))[0]) + jnp.sum(x)


@pytest.mark.parametrize("function", [noisy_loss, dropout_in_a_scan, numbers_alone, collected_noise])
def test_nothing_of_global_size(function: Callable[[Any], Any]) -> None:
    x = np.random.default_rng(2).normal(size=(32, 24)).astype(np.float32)
    expected = jax.jit(function)(x)

    def program() -> None:
        spec = rows(4, x.shape)
        f = dj.distribute(function, (spec,), gather=0)
        np.testing.assert_allclose(jax.jit(f)(spec.block(x)), expected, rtol=1e-4)
        for g in (f, dj.grad(dj.distribute(function, (spec,), dj.PARTS))):
            # A worker's block has 192 numbers, of which a scan of three passes stacks three.
            assert max(sizes(jax.make_jaxpr(g)(spec.block(x)).jaxpr)) <= 3 * 192 < x.size

    dj.simulate(4, program)


def temporary(f: Callable[..., Any], *args: Any) -> int:
    return int(jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes)


def deep(checkpointed: bool, w: Any, x: Any) -> Any:
    """Ten layers of each of which the derivative needs several arrays."""

    def layer(x: Any) -> Any:
        return jnp.sin(jnp.tanh(jnp.cos(jnp.sin(x * w))) * jnp.roll(x, 1, 0))

    for _ in range(10):
        x = (jax.checkpoint(layer) if checkpointed else layer)(x)
    return jnp.mean(x**2)


def test_checkpoint_saves_the_share_of_memory_that_it_saves_in_plain_jax() -> None:
    x, w = np.random.default_rng(0).normal(size=(64, 500)).astype(np.float32), np.ones(500, np.float32)
    plain = [temporary(jax.value_and_grad(partial(deep, checkpointed)), w, x) for checkpointed in (False, True)]
    expected = jax.value_and_grad(partial(deep, True))(w, x)

    def program() -> None:
        spec = rows(2, x.shape)
        # From outside, JAX keeps the results of what has an effect, so a layer also keeps what it has fetched.
        for way, at_most in ((_inside, 1.2), (_outside, 2)):
            step = way(partial(deep, True), spec)
            for a, b in zip(jax.jit(step)(w, spec.block(x)), expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
            found = [temporary(way(partial(deep, each), spec), w, spec.block(x)) for each in (False, True)]
            assert found[1] / found[0] <= at_most * plain[1] / plain[0] < 0.8, (found, plain)

    dj.simulate(2, program)


def _inside(loss: Callable[..., Any], spec: TensorSpec) -> Any:
    return dj.distribute(jax.value_and_grad(loss), (None, spec))


def _outside(loss: Callable[..., Any], spec: TensorSpec) -> Any:
    return dj.value_and_grad(dj.distribute(loss, (dj.VARIABLE, spec), dj.PARTS))


def attention(x: Any) -> Any:
    return jax.nn.softmax(x @ x.T / 8, -1) @ x + x


def test_large_gathered_values_are_gathered_again() -> None:
    """Keys of attention, which a worker needs whole: above `gather` bytes they don't stay until the backward pass."""
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)

    def loss(x: Any) -> Any:
        for _ in range(4):
            x = attention(x)
        return jnp.mean(x**2)

    expected = jax.grad(loss)(x)

    def program() -> None:
        spec = rows(4, x.shape)
        used, gathers = [], []
        for gather in (None, 64):
            f = dj.distribute(jax.grad(loss), (spec,), spec, gather=gather)
            np.testing.assert_allclose(jax.jit(f)(spec.block(x)), spec.block(expected), rtol=1e-3, atol=1e-6)
            used.append(temporary(f, spec.block(x)))
            gathers.append(sum(moved.what == "gather" for moved in f.plan(spec.block(x)).moved))
        assert used[1] < used[0] and gathers[0] <= 8 < gathers[1], (used, gathers)

    dj.simulate(4, program)
