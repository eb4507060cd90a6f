"""dj.simulate: workers that are threads do what workers that are processes do."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.errors import SetupError
from distdl_jax.functional import all_sum_reduce, repartition

pytestmark = pytest.mark.limit(600)


def test_results_come_in_the_order_of_the_workers():
    def program(a, b):
        P = dj.Partition()
        assert (P.size, P.active) == (5, True) and dj.Partition() == P
        return P.rank, a, b

    assert dj.simulate(5, program, "a", "b") == [(rank, "a", "b") for rank in range(5)]


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
    assert "use a newer one" in error.value.__notes__[1]


def test_programs_of_ended_workers_are_freed():
    """Once the last simulation of a process has ended, JAX's caches have nothing of its workers' worlds."""

    def program():
        P = dj.Partition()
        layer = nn.DistributedLinear(P.grid([1, 1]), P.grid([1, 2]), P.grid([2, 1]), 4, 3)
        x = jnp.ones((2, 4)) if P.rank == 0 else dj.zero_volume_tensor(2)
        step = dj.jit(dj.value_and_grad(lambda params: jnp.sum(layer(params, x))))
        step(layer.init(jax.random.key(0)))
        return weakref.ref(P.world)

    worlds = dj.simulate(2, program)
    gc.collect()
    assert [world() for world in worlds] == [None, None]


# Arrays that a worker has not made on its own device, and threads that it starts.


def halves(scale):
    return [scale * jnp.arange(4.0), scale * (4 + jnp.arange(4.0))]


def of_an_earlier_run(scale):
    """Return arrays of workers in reverse order, whose devices are likely to be the other worker's."""
    return dj.simulate(2, lambda: scale * (4 * (1 - dj.Partition().rank) + jnp.arange(4.0)))[::-1]


@pytest.mark.parametrize("jit", [dj.jit, jax.jit, lambda f: f], ids=["dj.jit", "jax.jit", "eager"])
@pytest.mark.parametrize("made", [halves, of_an_earlier_run])
def test_arrays_from_outside(made, jit):
    """Closed over or as arguments, of the main program or of another run: programs that wait for the copy, in another
    thread, are neither overtaken by what comes next, nor in the way of the copies for others."""

    def program(blocks):
        P = dj.Partition().grid([2])
        last = P.grid([1], [1])

        def f(x):
            return repartition(x * x, P, last)

        y = jit(f)(blocks[P.rank])
        other = jit(lambda x: repartition(x + outside[P.rank], P, last))(blocks[P.rank])
        return y, jit(dj.grad(lambda x: f(x).sum()))(blocks[P.rank]), other, blocks[P.rank] + 0

    for scale in (1, 2):
        outside, given = made(scale), made(scale)
        for _ in range(2):
            results = dj.simulate(2, program, given)
            whole = scale * np.arange(8.0)
            np.testing.assert_array_equal(results[1][0], whole**2)
            np.testing.assert_array_equal(results[1][2], 2 * whole)
            for rank, (_, gradient, _, _) in enumerate(results):
                np.testing.assert_array_equal(gradient, 2 * whole[4 * rank : 4 * rank + 4])
            given = [result[3] for result in results]


def test_a_thread_that_a_worker_starts_is_no_worker():
    """Else it would be alone in a world of its own, and compute something else than over MPI."""

    def total(P=None):
        P = P or dj.Partition().grid([2])
        return float(all_sum_reduce(jnp.ones(1), P, axes_reduce=0)[0])

    def program():
        P = dj.Partition().grid([2])
        with ThreadPoolExecutor(1) as pool:
            for task in (pool.submit(total), pool.submit(total, P)):
                with pytest.raises(SetupError, match=r"is not a worker|used by another worker"):
                    task.result()
        return total()

    assert dj.simulate(2, program) == [2.0, 2.0]


def test_workers_compute_in_the_contexts_around_the_call():
    """JAX's, numpy's and Python's, as where each worker runs its program alone."""
    word = ContextVar("word", default="")

    def program():
        P = dj.Partition().grid([2])
        y = all_sum_reduce(jnp.full(1, 1 / 3, float), P, 0)
        return y.dtype, float(y[0]), jax.config.jax_debug_nans, np.geterr()["invalid"], word.get()

    for wide in (True, False):
        token = word.set(f"wide {wide}")
        with jax.enable_x64(wide), jax.debug_nans(wide), np.errstate(invalid="raise"):
            expected = jnp.result_type(float), float(2 * jnp.full((), 1 / 3, float)), wide, "raise", f"wide {wide}"
            assert dj.simulate(2, program) == [expected] * 2
        word.reset(token)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        dj.simulate(2, lambda: all_sum_reduce(jnp.log(jnp.full(1, -1.0)), dj.Partition().grid([2]), 0))
    with jax.disable_jit():
        assert dj.simulate(2, lambda: float(all_sum_reduce(jnp.ones(1), dj.Partition().grid([2]), 0)[0])) == [2.0, 2.0]
    with jax.enable_x64(True):  # the threads that count represent workers
        P = dj.planning_world(2).grid([1, 2])
        costs = dj.cost(nn.Sequential(nn.AllGather(P, 1), lambda x: x * jnp.ones(4)), dj.TensorSpec((2, 4), P))
        assert costs.layers
