"""A call of dj.jit whose program communicates: from C++ like any other, with the same results, in the same order."""

import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI
from private_parts import MOST_LOOKS

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce, broadcast
from distdl_jax.transports.open_world import open_world
from distdl_jax.watchdog.watch.status import worker_status
from distdl_jax.watchdog.watch.thread_sampler import Sampler, main_stack, runs_own_program

pytestmark = pytest.mark.world(2)


class Both(NamedTuple):
    first: object
    second: object


@jax.tree_util.register_pytree_node_class
class Converting:
    """A node that takes arrays and numbers, and nothing else in their place."""

    def __init__(self, x):
        self.x = jnp.asarray(x)

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@pytest.fixture
def summed():
    """The sum over all workers, in one message at least."""
    P = dj.Partition()
    P = P.grid([P.size])
    return lambda x: all_sum_reduce(x, P, axes_reduce=(0,))


def python_of_jax(call):
    """The functions of Python in JAX that a call runs."""
    called = set()

    def note(frame, event, arg):
        if event == "call" and "/jax/_src/" in frame.f_code.co_filename:
            called.add((frame.f_code.co_filename.rsplit("/", 1)[-1], frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {file for file, _ in called}


def test_it_runs_none_of_jaxs_python_for_arguments_and_results(summed):
    xs = [jnp.full(3, float(n)) for n in range(6)]

    def fun(xs):
        return [summed(xs[0]), *xs[2:], xs[1] + 1]

    checked, plain = dj.jit(fun), jax.jit(fun)
    for f in (checked, plain):
        jax.block_until_ready(f(xs)), jax.block_until_ready(f(xs))
    assert not {"pjit.py", "pxla.py", "dispatch.py"} & python_of_jax(lambda: checked(xs))
    assert "pxla.py" in python_of_jax(lambda: plain(xs))


def test_the_watchdog_sees_that_it_runs(summed):
    """In its second call, which has no frame of JAX's: by the name of ours."""
    checked, comm, seen = dj.jit(summed), MPI.COMM_WORLD, []
    checked(jnp.ones(3))
    if comm.rank == 1:
        comm.recv(source=0)
        checked(jnp.ones(3))
        return
    sampler = Sampler(worker_status())

    def watch():
        for look in range(MOST_LOOKS):
            sample = sampler.look(float(look))
            if sample.run and sample.run.token is None:
                seen.append(main_stack())
                break
            time.sleep(0.01)
        comm.send(None, dest=1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    checked(jnp.ones(3))
    watcher.join()
    (stack,) = seen
    assert runs_own_program(stack) and Path(stack[0].file).name == "checked_jit.py"


CONSTANT = np.arange(3.0, dtype=np.float32)


def call(fun, *args, options=(), **kwargs):
    """A function of the sum, x and so on, its arguments, and the options of jit."""
    return fun, args, kwargs, dict(options)


STATIC = {"static_argnums": 1, "static_argnames": "axis"}
SIGNATURES = {
    "no arguments": lambda: call(lambda s: s(jnp.ones(3))),
    "a constant": lambda: call(lambda s, x: s(x) + CONSTANT, np.ones(3, np.float32)),
    "Python's numbers": lambda: call(lambda s, x, n: (s(jnp.ones(2)) * x, n + 1, x), 2.5, 3),
    "a key": lambda: call(lambda s, key: (s(jax.random.normal(key, (2,))), jax.random.split(key)), jax.random.key(3)),
    "keywords": lambda: call(lambda s, x, *, scale=1.0: s(x) * scale, np.ones(2), scale=3.0),
    "a static tuple": lambda: call(
        lambda s, x, shape, axis: s(x.reshape(shape)).sum(axis), np.ones(6), (2, 3), axis=1, options=STATIC
    ),
    "unused, and None": lambda: call(lambda s, x, unused, none: (s(x), none, ()), np.ones(2), np.ones(5), None),
    "trees": lambda: call(
        lambda s, both: {"b": Both(s(both.second["x"]), both.first), "a": [both.first, both.first]},
        Both(np.arange(4), {"x": np.ones(2)}),
    ),
    "a node that converts": lambda: call(lambda s, node: [Converting(s(node.x)), node], Converting(np.ones(2))),
    "loops": lambda: call(
        lambda s, x: lax.scan(lambda x, _: (s(x) / 2 + 1, x[0]), x, None, length=4), np.ones(3, np.float32)
    ),
    "a result that is an input": lambda: call(lambda s, x, y: (y, s(x), x, y), jnp.ones(3), jnp.ones(4)),
    "a derivative": lambda: call(lambda s, x: jax.value_and_grad(lambda x: jnp.sum(s(x) ** 2))(x), jnp.ones(3)),
    "donated": lambda: call(lambda s, x: s(x) + 1, x=jnp.ones(3), options={"donate_argnames": "x"}),
    "a sharding": lambda: call(
        lambda s, x: s(x),
        jnp.ones(3),
        options={"out_shardings": jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])},
    ),
}


@pytest.mark.parametrize("case", SIGNATURES)
def test_it_gives_what_jax_jit_gives(summed, case):
    """Values, dtypes, weak types, trees and devices, in the call that compiles and in the next ones."""
    fun, *_, options = SIGNATURES[case]()
    checked, plain = (jit(partial(fun, summed), **options) for jit in (dj.jit, jax.jit))
    for _ in range(3):
        (_, args, given, _), (_, same, again, _) = SIGNATURES[case](), SIGNATURES[case]()
        ours, theirs = checked(*args, **given), plain(*same, **again)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert (jax.typeof(a), a.committed, a.devices()) == (jax.typeof(b), b.committed, b.devices())
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_array_equal(a, b)
        if case == "donated":
            assert given["x"].is_deleted() and again["x"].is_deleted()


def test_programs_run_in_the_order_of_the_calls(summed):
    """Called in all ways, one long, one short, none waited for: a message of another program would be a wrong number,
    or of another size. Both workers draw the same numbers."""
    draw = np.random.default_rng(7)

    def work(x, n, size):
        """`n` parts of work that take some ms, and messages of a size of their own."""
        y = lax.fori_loop(0, n, lambda _, y: y @ y / 200, jnp.ones((200, 200)))
        return x + jnp.sum(summed(jnp.full(size, 1.0))) + 0 * y[0, 0]

    def gradient(x, n, size):
        return x + jax.grad(lambda x: jnp.sum(summed(x) ** 2))(jnp.ones(size))[0] + 0 * work(x, n, size)

    ways = [dj.jit(work, static_argnums=(1, 2)), jax.jit(work, static_argnums=(1, 2)), work]
    ways += [
        dj.jit(gradient, static_argnums=(1, 2)),
        dj.jit(lambda x, n, size: work(x, 0, size), static_argnums=(1, 2)),
    ]
    expected, results = [], []
    for _ in range(40):
        way, n, size = int(draw.integers(len(ways))), int(draw.choice([0, 2])), int(draw.choice([2, 5]))
        results.append(ways[way](jnp.float32(1.0), n, size))  # of nothing before it: only the calls are in order
        expected.append(1 + (8 if way == 3 else 2 * size))
        if draw.random() < 0.05:
            jax.effects_barrier()
    np.testing.assert_allclose(results, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "local",
    [
        lambda x: jnp.einsum("i,j->j", x, x),
        lambda x: x * jnp.searchsorted(jnp.arange(3.0), x),
        lambda x: x[jnp.nonzero(x, size=3)[0]],
        lambda x: jnp.ldexp(x, 2),
    ],
    ids=["einsum", "searchsorted", "nonzero", "ldexp"],
)
def test_operations_that_newer_releases_of_jax_lower_in_two_steps(summed, local):
    x = jnp.arange(3.0) + dj.Partition().rank

    def fun(x):
        return local(summed(x) * x)

    np.testing.assert_array_equal(dj.jit(fun)(x), jax.jit(fun)(x))


@pytest.mark.parametrize("first", ["over MPI", "in dj.simulate"])
def test_a_function_of_both_kinds_of_worlds_is_in_the_order_of_each(summed, first):
    """Whatever it was called in last, over MPI it waits for the program before, and the next one for it; and its calls
    over MPI count there, those of threads don't: two at a time would count differently on each worker."""

    @dj.jit
    def both(x, n):
        P = dj.Partition()
        P = P.grid([P.size])
        y = lax.fori_loop(0, n, lambda _, y: y @ y / 200, jnp.ones((200, 200)))
        return all_sum_reduce(x + 0 * y[0, 0], P, axes_reduce=(0,))

    long, short = dj.jit(lambda x: 3 * both(x, 200)), dj.jit(summed)
    x, log = jnp.ones(3), open_world().calls
    calls = {
        "over MPI": lambda: np.testing.assert_array_equal(both(x, 1), 2 * x),
        "in dj.simulate": lambda: np.testing.assert_array_equal(dj.simulate(3, lambda: both(np.ones(3), 1)), 3),
    }
    for where in (first, *calls, *calls):
        counted = log.number
        calls[where]()
        assert log.number == counted + (where == "over MPI")
    short(x), long(x)
    jax.effects_barrier()
    before = both(x, 200)
    after = short(x)
    assert before.is_ready()  # it takes 100 ms, and a call that does not wait some microseconds
    before = long(x)
    np.testing.assert_array_equal(both(x, 1), 2 * x)
    assert before.is_ready()
    np.testing.assert_array_equal([before, after], [6 * x, 2 * x])


def test_an_argument_that_is_not_read_may_be_gone_or_donated(summed):
    def fun(x, unread):
        return summed(x), unread["of"].shape

    for jit in (jax.jit, dj.jit):
        gone = {"of": jnp.ones((2, 3)), "key": jax.random.key(0)}
        gone["of"].delete()
        y, shape = jit(fun)(jnp.ones(3), gone)
        np.testing.assert_array_equal(y, np.full(3, dj.Partition().size))
        assert shape == (2, 3)
        with warnings.catch_warnings(action="error"):
            jit(fun, donate_argnums=1)(jnp.ones(3), {"of": jnp.ones(5)})
    kept = dj.jit(fun, keep_unused=True)
    with pytest.raises(RuntimeError, match="deleted"):
        kept(jnp.ones(3), gone)


def test_cache_cleared_on_one_worker_raises():
    P_all, P_root = dj.Partition().grid([2]), dj.Partition().grid([1])
    step = dj.jit(lambda x: broadcast(x, P_root, P_all))
    x = jnp.ones(2) if P_all.rank == 0 else dj.zero_volume_tensor()
    step(x)
    if P_all.rank == 1:
        step.clear_cache()
    with pytest.raises(dj.PlanError, match=r"Worker 1 traces .* that worker alone has lost what JAX keeps"):
        step(x)
        P_all.allgather_data(0)
