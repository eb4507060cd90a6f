"""Arrays that a worker of dj.simulate has not made on its own device, and threads that it starts."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax.errors import SetupError
from distdl_jax.functional import all_sum_reduce, repartition

pytestmark = pytest.mark.limit(300)


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
