"""What all workers trace again, they agree on again; what one traces again alone is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce

pytestmark = [pytest.mark.world(2), pytest.mark.simulated(2)]


def all_workers():
    return dj.Partition().grid([2])


def test_the_same_again_after_all_have_raised_and_one_was_mended():
    """JAX keeps nothing of a trace that raised; so all trace again, one with other arguments than before."""
    P_all = all_workers()

    for wrap in (jax.jit, dj.jit, lambda fun: jax.jit(dj.jit(fun))):
        step = wrap(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
        for _ in range(2):
            with pytest.raises(dj.DistDLError, match="float32"):
                step(jnp.ones(2 + P_all.rank, "float32"))
        assert step(jnp.ones(2, "float32")).tolist() == [2, 2]


def test_a_function_that_has_changed_is_agreed_on_anew():
    """JAX would not trace it again, but where its cache was cleared, on all workers."""
    P_all = all_workers()
    length = 2

    def total(x):
        return all_sum_reduce(jnp.zeros(length) + x, P_all, axes_keep=())

    for step in (jax.jit(total), dj.jit(total)):
        for length in (2, 3):
            step.clear_cache()
            jax.jit(total).clear_cache()
            assert step(jnp.ones(())).tolist() == length * [2]


def test_equal_functions_share_no_trace():
    """Of 3 and of 4 elements worker 0 has 2, and so the same arguments: all workers trace alike all the same."""
    P_all = all_workers()

    def gathered(n):
        layer = dj.nn.AllGather(P_all, 0)  # equal to those before, which may be gone
        x = jnp.ones(dj.TensorSpec((n,), P_all).local_shape)
        assert dj.check(layer, x).ok
        return dj.jit(layer)(x)

    for n in (3, 4, 3, 4):
        assert gathered(n).tolist() == [1] * n


@pytest.mark.simulated(2)
def test_a_weak_number_that_one_worker_does_not_read() -> None:
    """It is traced as often on all workers: in a trace more, the movement's agreement would be one worker's alone."""
    P = dj.Partition()
    P_0, P_1 = P.grid([1], [0]), P.grid([1], [1])
    traces = []

    def scaled(weight: Any, x: Any) -> Any:
        traces.append(weight)
        y = dj.functional.repartition(x, P_0, P_1, preserve_batch=False)
        return weight * y if P.rank == 1 else y

    y = dj.jit(scaled)(jnp.asarray(2.0), jnp.ones(3) if P.rank == 0 else jnp.zeros(0))
    assert y.tolist() == [2, 2, 2] * P.rank
    assert len(set(P.allgather_data(len(traces)))) == 1
