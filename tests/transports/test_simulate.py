"""dj.simulate: workers that are threads do what workers that are processes do."""

import gc
import sys
import threading
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional import all_sum_reduce, broadcast, collectives, halo_exchange, repartition, sum_reduce

pytestmark = pytest.mark.limit(600)


def partitions():
    """Return all workers, the first of them, and all of them in two dimensions."""
    P = dj.Partition()
    P_root = P.grid([1, 1])
    return P, P_root, P.grid([1, P.size])


def on_root(P, *shape, dtype=float):
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return jax.device_put(x) if P.rank == 0 else dj.zero_volume_tensor(shape[0], dtype)


def test_results_come_in_the_order_of_the_workers():
    def program(a, b):
        P = dj.Partition()
        assert (P.size, P.active) == (5, True) and dj.Partition() == P
        return P.rank, a, b

    assert dj.simulate(5, program, "a", "b") == [(rank, "a", "b") for rank in range(5)]


@pytest.mark.parametrize("size", [1, 3, 9])
def test_a_linear_layer_in_teams_of_all_sizes(size):
    """What the sequential layer gives, with its gradients; 9 workers also broadcast and reduce in one operation."""

    def program():
        P = dj.Partition()
        P_x = P.grid([1, 1])
        P_y = P.grid([1, size])
        P_W = P.grid([size, 1])
        layer = nn.DistributedLinear(P_x, P_y, P_W, in_features=8, out_features=17)
        params = layer.init(jax.random.key(1), float)
        x = on_root(P, 3, 8)
        step = dj.jit(dj.value_and_grad(lambda params, x: jnp.sum(layer(params, x) ** 2), argnums=(0, 1)))
        value, (grads, dx) = step(params, x)
        whole = [dj.gather(tree, layer.param_specs()) for tree in (params, grads)]
        return jax.tree.map(np.asarray, (value, dx, *whole))

    value, dx, params, grads = dj.simulate(size, program)[0]
    x = np.arange(24.0).reshape(3, 8)
    loss = lambda params, x: jnp.sum((x @ params["weight"].T + params["bias"]) ** 2)  # noqa: E731
    expected, (expected_grads, expected_dx) = jax.value_and_grad(loss, (0, 1))(params, x)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-10)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10), grads, expected_grads)


@pytest.mark.parametrize(
    ("dtype", "largest_tree"),
    [("float64", 8), ("bfloat16", 8), ("float16", 1), ("complex64", 1), ("int8", 8), ("bool", 1), ("bool", 8)],
)
def test_every_dtype_travels_also_without_elements(dtype, largest_tree, monkeypatch):
    monkeypatch.setattr(collectives, "LARGEST_TREE", largest_tree)

    def program():
        P, P_root, P_all = partitions()
        x = (np.arange(15) % 3).reshape(3, 5).astype(jnp.dtype(dtype))
        for block in (x, x[:0], x[:, :0]):
            mine = jax.device_put(block) if P.rank == 0 else dj.zero_volume_tensor(3, dtype)
            copied = broadcast(mine, P_root, P_all)
            np.testing.assert_array_equal(copied, block)
            assert copied.dtype == block.dtype
            total = sum_reduce(copied, P_all, P_root)
            expected = block.astype(bool) if dtype == "bool" else 3 * block
            np.testing.assert_array_equal(total, expected if P.rank == 0 else np.zeros((len(block), 0)))
            np.testing.assert_array_equal(all_sum_reduce(copied, P_all, axes_keep=()), expected)
            back = repartition(repartition(mine, P_root, P_all), P_all, P_root)
            assert P.rank != 0 or np.array_equal(back, block)
        return True

    assert all(dj.simulate(3, program))


def test_transformations():
    """jit, grad, vmap, checkpoint, scan, while_loop and cond, and their nestings, of a halo exchange and a sum."""

    def program():
        P = dj.Partition().grid([3])

        def f(x):
            left, right = (P.rank > 0) * 1, (P.rank < 2) * 1
            y = halo_exchange(x, P, ((left, right),))
            return all_sum_reduce(jnp.sum(y**2), P, axes_keep=()) * 1.0

        gradient = jax.grad(f)

        @dj.jit
        def transformed(x):
            return {
                "plain": f(x),
                "grad": gradient(x),
                "grad of grad": jax.grad(lambda x: jnp.sum(gradient(x) ** 2))(x),
                "vmap of grad": jax.vmap(gradient)(jnp.stack([x, 2 * x])),
                "checkpoint": jax.grad(jax.checkpoint(f))(x),
                "grad of scan": jax.grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0])(
                    x
                ),
                "while": jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (gradient(c[0]) / 9, c[1] + 1), (x, 0))[0],
                "cond": jax.lax.cond(f(x) > 0, gradient, lambda x: x, x),
            }

        x = jnp.arange(4.0) + 4 * P.rank
        found = transformed(x)
        np.testing.assert_array_equal(gradient(x), found["grad"])
        return jax.tree.map(np.asarray, found)

    results = dj.simulate(3, program)
    x = np.arange(12.0)
    weight = 3 * np.array([1, 1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 1])  # how often an element counts, on three workers
    grad = 2 * weight * x
    for rank, found in enumerate(results):
        part = slice(4 * rank, 4 * rank + 4)
        np.testing.assert_allclose(found["plain"], np.sum(weight * x**2) / 3)
        for name in ("grad", "checkpoint", "cond"):
            np.testing.assert_allclose(found[name], grad[part], rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(found["grad of grad"], 8 * (weight**2 * x)[part], rtol=1e-12)
        np.testing.assert_allclose(found["grad of scan"], 2 * grad[part], rtol=1e-12)
        np.testing.assert_allclose(found["vmap of grad"], [grad[part], 2 * grad[part]], rtol=1e-12)
        np.testing.assert_allclose(found["while"], ((2 * weight / 9) ** 3 * x)[part], rtol=1e-12)


# Functions that all workers share: a trace for one must never serve another, or the next call of simulate.


@jax.jit
def shared(x):
    return all_sum_reduce(x * (dj.Partition().rank + 1), dj.Partition(), axes_keep=())


@dj.jit
def shared_and_checked(x):
    return shared(x) * (dj.Partition().rank + 1)


@jax.jit
def shared_scan(x):
    return jax.lax.scan(lambda c, _: (c + shared(x), c * dj.Partition().rank), jnp.zeros(2), None, length=2)


@jax.custom_vjp
def shared_custom(x):
    return x * dj.Partition().rank


shared_custom.defvjp(lambda x: (shared_custom(x), None), lambda _, dy: (dy * (10 + dj.Partition().rank),))
shared_gradient = jax.jit(jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: shared_custom(x))(x))))
shared_vmap = jax.jit(jax.vmap(lambda x: x * dj.Partition().rank))


@pytest.mark.parametrize("size", [2, 4, 2])
def test_functions_that_workers_share_are_traced_for_each(size):
    def program():
        rank, x = dj.Partition().rank, jnp.ones(2)
        total = size * (size + 1) / 2
        for _ in range(2):
            np.testing.assert_array_equal(shared(x), [total, total])
            np.testing.assert_array_equal(shared_and_checked(x), [(rank + 1) * total] * 2)
            last, rows = shared_scan(x)
            np.testing.assert_array_equal(last, [2 * total] * 2)
            np.testing.assert_array_equal(rows, [[0, 0], [rank * total] * 2])
            np.testing.assert_array_equal(shared_gradient(x), [10 + rank] * 2)
            np.testing.assert_array_equal(shared_vmap(x), [rank] * 2)
            assert jax.eval_shape(shared, x).shape == (2,)
            assert str(jax.make_jaxpr(shared_vmap)(x)).count(f" {rank}.0:") > 0
            assert "callback" in shared.lower(x).as_text()
        return float(jax.jit(lambda x: x * dj.Partition().rank)(1.0))

    assert dj.simulate(size, program) == list(range(size))


def test_a_plan_check_compares_and_reports():
    def program():
        P, P_root, P_all = partitions()
        step = dj.jit(lambda x: broadcast(x, P_root, P_all))
        for _ in range(3):
            step(on_root(P, 2, 3))
        return dj.check(step, on_root(P, 2, 3))

    first, *others = dj.simulate(4, program)
    assert first.ok and all(str(first) == str(other) for other in others)
    assert sum(count for count, _ in first.messages().values()) == 3
    assert "test_simulate.py" in first.listing(0) and "send to worker" in first.listing(0)


def test_data_of_python_is_copied_between_workers():
    def program():
        P = dj.Partition()
        mine = {"rank": [P.rank]}
        everyone = P.allgather_data(mine)
        everyone[(P.rank + 1) % P.size]["rank"].append("changed")
        root = P.broadcast_data(mine, root=2)
        root["rank"].append(P.rank)
        return mine["rank"], root["rank"]

    assert dj.simulate(3, program) == [([0], [2, 0]), ([1], [2, 1]), ([2], [2, 2])]


def test_arrays_come_and_go():
    """Arrays made outside are arguments, and results are arrays of JAX that the caller goes on with."""
    outside = jnp.arange(4.0)
    results = dj.simulate(2, lambda x: (x + outside) * dj.Partition().rank, outside)
    np.testing.assert_array_equal(sum(results) + outside, 3 * np.arange(4.0))
    assert len(dj.simulate(2, lambda x: x + results[0], results[1])) == 2


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_sums_of_infinities_and_beyond_the_largest_number_warn_of_nothing():
    def program():
        P = dj.Partition()
        return np.asarray(all_sum_reduce(jnp.array([-np.inf if P.rank else np.inf, 3e38], "float32"), P, 0))

    for total in dj.simulate(2, program):
        np.testing.assert_array_equal(total, [np.nan, np.inf])


def test_workers_see_their_own_world_only():
    """A thread that is no worker has none of it, and a partition of one run differs from that of another."""
    (first,), (second,) = (dj.simulate(1, dj.Partition) for _ in range(2))
    assert first != second
    names = dj.simulate(2, lambda: threading.current_thread().name)
    assert names == ["worker 0 of 2", "worker 1 of 2"] and threading.current_thread().name not in names


@pytest.mark.skipif(sys.version_info < (3, 11, 8), reason="what the next test is about")
def test_all_workers_may_read_arrays_at_once(tmp_path):
    """np.load parses Python, also where other threads do, and garbage is collected."""
    np.save(tmp_path / "x.npy", np.arange(3))
    switching, collecting = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    gc.set_threshold(5)
    try:
        loads = dj.simulate(12, lambda: [int(np.load(tmp_path / "x.npy").sum()) for _ in range(300)])
    finally:
        sys.setswitchinterval(switching)
        gc.set_threshold(*collecting)
    assert loads == [[3] * 300] * 12


def test_an_old_python_that_parses_in_one_thread_only_is_named(monkeypatch):
    def program():
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr(sys, "version_info", (3, 11, 2))
    with pytest.raises(SystemError) as error:
        dj.simulate(2, program)
    assert "take a newer one" in error.value.__notes__[1]


def test_programs_of_ended_workers_are_freed():
    """Once the last simulation of a process has ended, JAX's caches have nothing of its workers' worlds."""

    def program():
        P = dj.Partition()
        layer = nn.DistributedLinear(P.grid([1, 1]), P.grid([1, 2]), P.grid([2, 1]), 4, 3)
        x = on_root(P, 2, 4)
        step = dj.jit(dj.value_and_grad(lambda params: jnp.sum(layer(params, x))))
        step(layer.init(jax.random.key(0)))
        return weakref.ref(P.world)

    worlds = dj.simulate(2, program)
    gc.collect()
    assert [world() for world in worlds] == [None, None]
