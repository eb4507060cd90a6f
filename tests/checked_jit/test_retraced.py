"""What one worker traces alone of dj.jit, it takes as it was agreed on; what all trace anew, they agree on anew."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce, broadcast

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


def test_a_cache_that_one_worker_clears():
    """Of the function, of what it calls, or of both."""
    P_all = all_workers()
    traced = []

    def total(x):
        traced.append(x.shape)
        return all_sum_reduce(x, P_all, axes_keep=())

    inner = jax.jit(total)
    outer = dj.jit(lambda x: total(inner(x) / 2) + 1)
    for step in range(4):
        if step == 1 + P_all.rank:
            inner.clear_cache()
            outer.clear_cache()
        if step == 3 and P_all.rank == 1:
            outer.clear_cache()  # what it calls has been kept
        assert outer(jnp.ones(2)).tolist() == [3, 3]
    assert len(traced) >= 4


def test_a_step_of_training_is_traced_again_by_one_worker():
    """In derivatives, and under JAX's settings, which are not those that the step is called with."""
    P_all = all_workers()

    def loss(x):
        return jnp.sum(all_sum_reduce(x, P_all, axes_keep=()) ** 2)

    def precise(x):
        with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("strict"):
            return loss(x)

    steps = [dj.jit(kind) for kind in (dj.value_and_grad(precise), lambda x: dj.jvp(loss, (x,), (x,)))]
    x = jnp.ones(2) * (1 + P_all.rank)
    for turn in range(3):
        if turn == 2 and P_all.rank == 1:
            for step in steps:
                step.clear_cache()
        (value, gradient), (again, tangent) = [step(x) for step in steps]
        assert (value, gradient.tolist()) == (36, [12, 12])  # of both workers' losses
        assert (again, tangent) == (18, 36)


def test_equal_agreements_keep_their_order():
    """What others said may differ where this worker says the same twice."""
    P_all = all_workers()
    P_root = dj.Partition().grid([1])

    def both(x):
        y = x if P_all.rank == 0 else dj.zero_volume_tensor()
        z = jnp.concatenate([x, x]) if P_all.rank == 0 else dj.zero_volume_tensor()
        return broadcast(y, P_root, P_all), broadcast(z, P_root, P_all)

    step = dj.jit(both)
    for turn in range(2):
        if turn == 1 and P_all.rank == 1:
            step.clear_cache()
        y, z = step(jnp.arange(3.0))
        assert (y.tolist(), z.tolist()) == ([0, 1, 2], [0, 1, 2, 0, 1, 2])


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
