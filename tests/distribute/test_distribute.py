"""`dj.distribute`: specs, derivatives from outside, mistakes, and what is sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jobs import run

import distdl_jax as dj
from distdl_jax import TensorSpec


class Block(nnx.Module):
    def __init__(self, features_in: int, features: int, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"rngs": rngs, "param_dtype": jnp.float64}
        self.first = nnx.Conv(features_in, features, (3, 3), **options)
        self.norm = nnx.GroupNorm(features, num_groups=2, **options)
        self.second = nnx.Conv(features, features, (3, 3), **options)

    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.second(nnx.relu(self.norm(self.first(x)))))


class UNet(nnx.Module):
    """Nothing in it knows of workers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"rngs": rngs, "param_dtype": jnp.float64}
        self.fine, self.coarse, self.joined = Block(1, 2, rngs), Block(2, 4, rngs), Block(4, 2, rngs)
        self.up = nnx.ConvTranspose(4, 2, (2, 2), (2, 2), **options)
        self.last = nnx.Conv(2, 1, (1, 1), **options)

    def __call__(self, x: Any) -> Any:
        fine = self.fine(x)
        coarse = self.coarse(nnx.max_pool(fine, (2, 2), (2, 2)))
        return self.last(self.joined(jnp.concatenate([fine, self.up(coarse)], -1)))


def flax_step() -> tuple[Callable[..., Any], Any, Any]:
    """Return a training step of a U-Net with Adam, its parameters and the optimizer's state."""
    graph, params = nnx.split(UNet(nnx.Rngs(0)))
    params = jax.tree.map(lambda p: p + 0.05 * jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), params)
    optimizer = optax.adam(1e-2, eps=1e-3)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, params, optimizer.init(params)


@pytest.mark.parametrize("grid", [[1, 3, 1, 1], [2, 1, 2, 1]])
def test_a_flax_networks_training(grid: list[int]) -> None:
    """Three steps, unmodified, on uneven blocks; and they send what they must, not more."""
    with jax.enable_x64(True):
        step, *state = flax_step()
        x = np.random.default_rng(0).normal(size=(2, 14, 8, 1))
        y = np.tanh(x)
        expected = state
        for _ in range(3):
            *expected, loss = jax.jit(step)(*expected, x, y)

        def program() -> tuple[float, dj.distribute.Plan]:  # type: ignore[name-defined]
            spec = TensorSpec(x.shape, dj.Partition().grid(grid))
            f = dj.distribute(step, (None, None, spec, spec))
            plan, run = f.plan(*state, spec.block(x), spec.block(y)), jax.jit(f)
            found = state
            for _ in range(3):
                *found, value = run(*found, spec.block(x), spec.block(y))
            for a, b in zip(jax.tree.leaves([found, value]), jax.tree.leaves([expected, loss]), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
            return plan

        plan = dj.simulate(int(np.prod(grid)), program)[0]
        sums = [moved for moved in plan.moved if moved.what == "sum"]
        # One for each norm, forward and backward, which carries gradients along, and one for the rest of them.
        assert len(sums) == 7
        assert not [moved for moved in plan.moved if moved.what in ("gather", "blocks")]
        assert f"all {plan.messages}" in " ".join(str(plan).splitlines()[-1].split())


def whole(n: int = 5) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(n, 3)).astype(np.float32)


def loss_of(w: Any, x: Any) -> Any:
    return jnp.mean((x * w) ** 2) + 0.1 * jnp.sum(w**2)


def test_the_two_ways_of_differentiating() -> None:
    x, w = whole(), np.arange(3, dtype=np.float32)
    value, gradients = jax.value_and_grad(loss_of, (0, 1))(w, x)

    def program() -> None:
        spec = TensorSpec(x.shape, dj.Partition().grid([3, 1]))
        inside = dj.distribute(jax.value_and_grad(loss_of, (0, 1)), (None, spec), (None, (None, spec)))
        outside = dj.value_and_grad(dj.distribute(loss_of, (dj.VARIABLE, spec), dj.PARTS), (0, 1))
        of_the_library = dj.distribute(dj.value_and_grad(loss_of, (0, 1)), (None, spec), (None, (None, spec)))
        for f in (inside, outside, of_the_library):
            found = f(w, spec.block(x))
            for a, b in zip(jax.tree.leaves(found), (value, gradients[0], spec.block(gradients[1])), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        copies = dj.value_and_grad(dj.distribute(loss_of, (dj.VARIABLE, spec), dj.COPIES))(w, spec.block(x))
        np.testing.assert_allclose(copies[0], 3 * value, rtol=1e-5)
        np.testing.assert_allclose(copies[1], 3 * gradients[0], rtol=1e-5)

    dj.simulate(3, program)


@pytest.mark.parametrize(
    ("specs", "out", "words"),
    [((None, "spec"), dj.PARTS, "by `args\\[0\\]`.*dj.VARIABLE.*dj.COPIES"), ((dj.VARIABLE, "spec"), None, "dj.PARTS")],
)
def test_a_derivative_that_could_mean_two_things_is_refused(specs: Any, out: Any, words: str) -> None:
    def program() -> None:
        spec = TensorSpec((5, 3), dj.Partition().grid([2, 1]))
        f = dj.distribute(loss_of, tuple(spec if s == "spec" else s for s in specs), out)
        with pytest.raises(dj.PlanError, match=words):
            dj.value_and_grad(f)(jnp.ones(3), spec.block(whole()))

    dj.simulate(2, program)


def test_a_derivative_by_what_is_closed_over_is_refused() -> None:
    def program() -> None:
        spec = TensorSpec((5, 3), dj.Partition().grid([2, 1]))
        block = spec.block(whole())

        def loss(w: Any) -> Any:
            return dj.distribute(lambda x: loss_of(w, x), (spec,), dj.PARTS)(block)

        with pytest.raises(dj.PlanError, match=r"by a value \(float\d+\[3\]\) that it closes over"):
            dj.grad(loss)(jnp.ones(3))
        expected = loss_of(jnp.ones(3), whole())
        np.testing.assert_allclose(dj.all_reduce(jax.jit(loss)(jnp.ones(3)), spec.partition), expected, rtol=1e-5)

    dj.simulate(2, program)


def test_results_as_they_fall_and_as_they_are_asked_for() -> None:
    x = whole(7)

    def program() -> None:
        P = dj.Partition()
        rows, columns = TensorSpec(x.shape, P.grid([2, 1])), TensorSpec(x.shape, P.grid([1, 2]))
        f = dj.distribute(lambda x: (x.T, x + 1, x.sum(0), "words", x), (rows,), (dj.BLOCKS, columns, None, None, rows))
        fallen, moved, total, words, same = f(rows.block(x))
        fallen_spec = f.output_specs(jax.ShapeDtypeStruct(rows.local_shape, jnp.float32))[0]
        np.testing.assert_array_equal(fallen, fallen_spec.block(x.T))
        np.testing.assert_array_equal(moved, columns.block(x + 1))
        np.testing.assert_allclose(total, x.sum(0), rtol=1e-5)
        assert words == "words"
        np.testing.assert_array_equal(same, rows.block(x))
        large = dj.distribute(lambda x: jnp.sort(x, 0), (rows,), gather=16)
        with pytest.raises(dj.PlanError, match="`gather`"):
            large(rows.block(x))

    dj.simulate(2, program)


def test_parameters_that_are_cut_meet_on_a_refinement() -> None:
    """Data on 2 x 2 workers, and a weight cut in four, as ZeRO does."""
    x, w = whole(6), np.random.default_rng(2).normal(size=(3, 8)).astype(np.float32)

    def program() -> None:
        P = dj.Partition()
        data, weight = TensorSpec(x.shape, P.grid([2, 2])), TensorSpec(w.shape, P.grid([1, 4]))
        f = dj.distribute(lambda w, x: (jnp.sum(jnp.tanh(x @ w)), w * 2), (weight, data), (None, weight))
        loss, doubled = f(weight.block(w), data.block(x))
        np.testing.assert_allclose(loss, np.tanh(x @ w).sum(), rtol=1e-5)
        np.testing.assert_array_equal(doubled, weight.block(2 * w))
        world = dj.planning_world(6)
        with pytest.raises(dj.PlanError, match="no common refinement"):
            six = [TensorSpec((6, 6), world.grid(grid)) for grid in ([2, 3], [3, 2])]
            dj.distribute(jnp.add, tuple(six)).plan(*(jnp.zeros(spec.local_shape) for spec in six))

    dj.simulate(4, program)


def differing(kind: str) -> None:
    P = dj.Partition()
    spec = TensorSpec((4, 3), P.grid([2, 1]))
    x, last = spec.block(whole(4)), P.rank == 1
    f = {
        "program": (lambda x: jnp.sin(x)) if last else (lambda x: jnp.cos(x)),
        "constant": partial(jnp.multiply, 2.0 if last else 3.0),
        "array": lambda x: x * np.arange(3.0 + last)[:3] + np.float32(last),
    }.get(kind, lambda x: x.sum())
    if kind == "error":
        f = lambda x: x.sum() if last else 1 / 0  # noqa: E731
    if kind == "shape":
        x = x[:1] if last else x
    if kind == "dtype":
        x = x.astype(jnp.float16) if last else x
    dj.distribute(f, (spec,), dj.COPIES)(x)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("program", "programs of .* differ: first in `cos` at .*`sin`"),
        ("constant", "programs of .* differ"),
        ("array", "programs of .* differ"),
        ("error", "division by zero|ZeroDivisionError"),
        ("shape", r"`args\[0\]` has the shape \(1, 3\), but this worker's block"),
        ("dtype", "programs of .* differ: first in the arguments"),
    ],
)
def test_what_differs_is_told_to_all(kind: str, words: str) -> None:
    def program() -> None:
        with pytest.raises((dj.DistDLError, ZeroDivisionError), match=words):
            differing(kind)

    dj.simulate(2, program)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda spec: dj.distribute(3, (spec,)), "`f`"),
        (lambda spec: dj.distribute(jnp.sin, ("rows",)), r"`in_specs\[0\]` \(='rows'\)"),
        (lambda spec: dj.distribute(jnp.sin, (dj.PARTS,)), "`in_specs"),
        (lambda spec: dj.distribute(jnp.sin, (spec,), dj.VARIABLE), "`out_specs"),
        (lambda spec: dj.distribute(jnp.sin, (spec,), gather=-1), "`gather`"),
        (lambda spec: dj.distribute(jnp.add, (spec,))(spec.block(whole()), 1), "`in_specs` \\(of 1\\)"),
        (lambda spec: dj.distribute(jnp.sin, (spec,))(x=spec.block(whole())), "by position"),
        (lambda spec: dj.distribute(jnp.sin, (spec,))(whole()), "That is the whole array"),
        (lambda spec: dj.distribute(jnp.sin, (None,))(whole()), "TensorSpec"),
        (
            lambda spec: dj.distribute(lambda x: dj.all_reduce(x, spec.partition), (spec,))(spec.block(whole())),
            "itself",
        ),
        (lambda spec: dj.distribute(lambda x: x > 0, (spec,), dj.PARTS)(spec.block(whole())), "floating"),
        (lambda spec: dj.constrain(jnp.zeros(3), spec), "`x` has the shape"),
    ],
)
def test_mistakes(call: Callable[[TensorSpec], Any], words: str) -> None:
    def program() -> None:
        spec = TensorSpec((5, 3), dj.Partition().grid([2, 1]))
        with pytest.raises(dj.DistDLError, match=words):
            call(spec)

    dj.simulate(2, program)


def test_a_primitive_that_cannot_work_on_blocks_is_refused_with_its_line() -> None:
    def program() -> None:
        spec = TensorSpec((4, 4), dj.Partition().grid([2, 1]))
        f = dj.distribute(jnp.linalg.inv, (spec,), dj.COPIES, gather=0)
        with pytest.raises(dj.PlanError, match=r"has no free dimension.*dimension 0 in 2|gather=None"):
            f(jnp.eye(2, 4))

    dj.simulate(2, program)


def test_a_periodic_stencil_is_one_exchange() -> None:
    """Three concatenations and a window along each dimension, corners included."""
    x = np.random.default_rng(0).normal(size=(6, 7))

    def stencil(x: Any) -> Any:
        padded = jnp.pad(x, 1, mode="wrap")
        return sum(padded[i : i + 6, j : j + 7] * (i + 3 * j) for i in range(3) for j in range(3))

    def convolved(x: Any) -> Any:
        padded = jnp.pad(x, 1, mode="wrap")[None, None]
        return jax.lax.conv(padded, jnp.arange(9.0).reshape(1, 1, 3, 3).astype(x.dtype), (1, 1), "VALID")[0, 0]

    def program() -> None:
        spec = TensorSpec(x.shape, dj.Partition().grid([2, 2]))
        for f in (stencil, convolved):
            distributed = dj.distribute(f, (spec,), spec)
            np.testing.assert_allclose(distributed(spec.block(x)), spec.block(f(x)), rtol=1e-4)
        plan = dj.distribute(convolved, (spec,), spec).plan(spec.block(x))
        assert [moved.what for moved in plan.moved] == ["neighbours"]

    dj.simulate(4, program)


def test_rules_of_functions() -> None:
    x = whole(6)

    def program() -> None:
        spec = TensorSpec(x.shape, dj.Partition().grid([2, 1]))
        seen = []

        def how(site: Any, v: Any) -> Any:
            seen.append(v.shape)
            return site.value(jnp.sin(v.at(v.cut)), v.cut)

        f = dj.with_rule(jnp.sin, how)
        found = dj.distribute(lambda x: (f(x), jax.grad(lambda x: f(x).sum())(x), jax.vmap(f)(x)), (spec,), spec)
        for a, b in zip(found(spec.block(x)), (np.sin(x), np.cos(x), np.sin(x)), strict=True):
            np.testing.assert_allclose(a, spec.block(b), rtol=1e-6)
        assert seen == [(6, 3)]  # neither the derivative nor the batched function

    dj.simulate(2, program)


def test_one_worker_sends_nothing() -> None:
    spec = TensorSpec((5, 3), dj.planning_world(1).grid([1, 1]))
    assert str(dj.distribute(lambda x: jnp.sort(x, 0) / x.sum(), (spec,)).plan(whole())) == "Nothing moves."


OVER_MPI = """
import jax, jax.numpy as jnp, numpy as np, distdl_jax as dj
P = dj.Partition()
spec = dj.TensorSpec((7, 3), P.grid([P.size, 1]))
x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
step = jax.value_and_grad(lambda w, x: jnp.mean(jax.nn.softmax(jnp.roll(x, 1, 0) * w, 0) ** 2))
loss, gradient = dj.jit(dj.distribute(step, (None, spec)))(jnp.ones(3), spec.block(x))
expected = step(jnp.ones(3), x)
np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-7)
# A leaf that is a function has another address in each process.
f = dj.distribute(lambda act, x: act(x).sum(), (None, spec))
np.testing.assert_allclose(f(lambda x: jnp.sin(x), spec.block(x)), np.sin(x).sum(), rtol=1e-4)
"""


def test_over_mpi() -> None:
    status, output = run(3, "-c", OVER_MPI)
    assert status == 0, output


def test_workers_outside_get_zero_volume_arrays() -> None:
    x = whole(4)

    def program() -> Any:
        P = dj.Partition()
        spec = TensorSpec(x.shape, P.grid([2, 1], [2, 0]))
        f = dj.distribute(lambda x: (x + 1, x.sum(0)), (spec,), (spec, None))
        return [np.shape(y) for y in f(spec.block(x))]

    assert dj.simulate(3, program) == [[(2, 3), (3,)], [(4, 0), (0,)], [(2, 3), (3,)]]


def test_leaves_that_are_no_arrays() -> None:
    """Under dj.jit, too: they are part of the program's key, by equality."""
    x = whole(6)
    traced = []

    def f(model: Any, x: Any) -> Any:
        traced.append(model["name"])
        return {"name": model["name"], "loss": jnp.mean(model["activation"](x * model["scale"]))}

    def program() -> None:
        spec = TensorSpec(x.shape, dj.Partition().grid([2, 1]))
        step = dj.jit(dj.distribute(f, (None, spec)))
        for name, activation in (("a", jnp.tanh), ("a", jnp.tanh), ("b", jnp.sin)):
            found = step({"name": name, "activation": activation, "scale": 2.0}, spec.block(x))
            assert found["name"] == name
            np.testing.assert_allclose(found["loss"], np.mean(activation(2 * x)), rtol=1e-5)
        with pytest.raises(
            dj.InvalidTypeError, match=r"`args\[0\]\['name'\]` \(=\{1\}\) must be an array, or hashable"
        ):
            step({"name": {1}, "activation": jnp.tanh, "scale": 2.0}, spec.block(x))

    dj.simulate(2, program)
    assert sorted(set(traced)) == ["a", "b"] and traced.count("a") == traced.count("b")


def test_the_first_worker_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def printing(x: Any) -> Any:
        jax.debug.print("sum {}", x.sum())
        return x.sum()

    def program() -> None:
        spec = TensorSpec((4, 3), dj.Partition().grid([2, 1]))
        jax.block_until_ready(jax.jit(dj.distribute(printing, (spec,)))(jnp.ones((2, 3), jnp.float32)))
        jax.effects_barrier()
        with pytest.raises(dj.PlanError, match="would print blocks"):
            dj.distribute(lambda x: jax.debug.print("{}", x), (spec,), gather=0)(jnp.ones((2, 3)))

    dj.simulate(2, program)
    assert capfd.readouterr().out.count("sum 12.0") == 1
