"""dj.jit is jax.jit with a comparison of programs; dj.check tells what they would communicate."""

import copy
import pickle
import xml.etree.ElementTree as ET
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce, broadcast
from distdl_jax.transforms import checked_jit

pytestmark = pytest.mark.world(4)


@pytest.fixture
def P():
    return dj.Partition()


@pytest.fixture
def spread(P):
    """From the first worker to all."""
    return lambda x: broadcast(x, P.grid([1, 1]), P.grid([2, 2]))


def on_root(P, *shape):
    return (
        jnp.arange(np.prod(shape), dtype=float).reshape(shape)
        if P.rank == 0
        else dj.zero_volume_tensor(shape[0], float)
    )


@dj.jit
def doubled(x):
    return 2 * x


def test_a_copy_is_the_function_itself_and_a_pickle_its_name(P):
    assert copy.copy(doubled) is copy.deepcopy({"step": doubled})["step"] is doubled
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    alone = dj.jit(partial(jnp.add, 1))
    assert copy.deepcopy(alone) is alone and alone(1) == 2
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(dj.jit(lambda x: x))


def test_methods_decorators_and_nesting(P, spread):
    @dj.jit
    def inner(x):
        return spread(x)

    class Model:
        scale = 3

        @dj.jit
        def double(x):
            return 2 * inner(x)

        @dj.jit(static_argnums=0)
        def scaled(self, x):
            """Scaled."""
            return self.scale * inner(x)

    x = on_root(P, 2, 2)
    expected = np.arange(4.0).reshape(2, 2)
    np.testing.assert_array_equal(Model.double(x), 2 * expected)
    np.testing.assert_array_equal(Model().scaled(x), 3 * expected)
    assert Model.scaled.__doc__ == "Scaled." and Model.scaled.__name__ == "scaled"
    assert "scaled" in repr(Model.scaled)
    assert dj.jit(inner).lower(x).as_text().count("mpi_") > 0


def test_transformations_around_and_inside(P, spread):
    f = dj.jit(lambda x: jnp.sum(spread(x) ** 2))
    x = on_root(P, 2, 2)
    expected = 8 * np.arange(4.0).reshape(2, 2)
    for gradient in (jax.grad(f)(x), dj.jit(jax.grad(f))(x), jax.jit(jax.grad(f))(x)):
        np.testing.assert_allclose(gradient, expected if P.rank == 0 else np.zeros((2, 0)))
    batch = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(dj.jit(jax.vmap(f))(batch), [14, 56])


def mismatch_of(P, fun, *args):
    """The one sentence that all workers raise."""
    with pytest.raises(dj.PlanError) as raised:
        dj.jit(fun)(*args)
    said = P.allgather_data(str(raised.value))
    assert len(set(said)) == 1
    return said[0]


@pytest.mark.parametrize("place", ["scan", "cond", "while", "remat", "jit", "custom_vjp", "vmap"])
def test_a_mismatch_is_found_wherever_it_is(P, place, spread):
    """Worker 2's backward pass lacks an operation: it stands in each of JAX's structures in turn."""

    def loss(x):
        y = spread(x if P.rank != 2 else jax.lax.stop_gradient(x))
        return jnp.sum(y**2)

    def fun(x):
        g = jax.grad(loss)
        match place:
            case "scan":
                return jax.lax.scan(lambda c, _: (c + jnp.sum(g(x)), None), 0.0, None, length=3)
            case "cond":
                return jax.lax.cond(jnp.sum(x) < 0, lambda x: g(x), lambda x: x, x)
            case "while":
                return jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (g(c[0]), c[1] + 1), (x, 0))
            case "remat":
                return jax.grad(jax.checkpoint(loss))(x)
            case "jit":
                return jax.jit(jax.jit(g))(x)
            case "custom_vjp":
                return jax.vjp(loss, x)[1](1.0)
            case "vmap":
                return jax.vmap(g)(jnp.stack([x, x]))

    said = mismatch_of(P, fun, on_root(P, 2, 3))
    assert "in the backward pass" in said and "worker 2" in said
    assert "test_checking.py" in said and "let the loss use every output" in said


def test_after_a_mismatch_the_program_can_go_on(P, spread):
    x = on_root(P, 2, 3)
    for _ in range(3):
        with pytest.raises(dj.PlanError, match="The workers' programs differ"):
            dj.jit(lambda x: spread(x) if P.rank else all_sum_reduce(x, P, axes_keep=()))(x)
        np.testing.assert_array_equal(spread(x), np.arange(6.0).reshape(2, 3))


def test_a_report_lists_counts_and_draws(P, spread):
    def fun(x):
        def step(total, _):
            return total + jnp.sum(spread(x)), None

        return all_sum_reduce(jax.lax.scan(step, 0.0, None, length=5)[0], P, axes_keep=())

    report = dj.check(fun, on_root(P, 2, 3))
    assert report.ok and report.problem is None
    messages = report.messages()
    assert sum(count for count, _ in messages.values()) == 5 * 3
    assert sum(size for _, size in messages.values()) == 5 * 3 * 6 * 8
    assert all(source != dest for source, dest in messages)
    text = str(report)
    assert "completes on all workers" in text and "(5 times)" in text and "allreduce in the team [0, 1, 2, 3]" in text
    assert "test_checking.py" in report.listing(0)
    assert str(dj.draw(report, in_order=False)).endswith(report.matrix())
    root = ET.fromstring(dj.draw(report, in_order=False).svg)
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    for (source, dest), (count, size) in messages.items():
        assert f"{source} to {dest}: {count:,} messages, {size:,} bytes" in titles
    assert P.allgather_data(text) == [text] * 4


def test_a_report_of_a_mismatch_runs_nothing(P, spread):
    def fun(x):
        y = spread(x)
        return jnp.sum(y**2) if P.rank else jnp.sum(x)

    report = dj.check(jax.grad(fun), on_root(P, 2, 3))
    assert not report.ok and report.problem in str(report)
    assert P.allgather_data(report.problem) == [report.problem] * 4


def test_the_comparison_is_made_once_a_trace(P, monkeypatch):
    compared = []
    compare = checked_jit._compare
    monkeypatch.setattr(checked_jit, "_compare", lambda *arguments: (compared.append(1), compare(*arguments))[1])
    f = dj.jit(lambda x: all_sum_reduce(x, P, axes_keep=()))
    for _ in range(5):
        f(jnp.ones(3))
    assert len(compared) == 1
    f(jnp.ones(4))
    assert len(compared) == 2


def test_options_of_the_compiler_are_passed_on(P):
    f = dj.jit(lambda x: all_sum_reduce(x, P, axes_keep=()), compiler_options={"xla_backend_optimization_level": 0})
    np.testing.assert_array_equal(f(jnp.ones(3)), 4 * np.ones(3))
