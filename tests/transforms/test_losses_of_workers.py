"""What each worker's loss may be: a number of whatever kind on some of them, or an exception."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj


@pytest.mark.simulated(2)
@pytest.mark.parametrize("constant", [0.0, np.float64(0), jnp.zeros(())])
def test_losses_that_are_numbers_on_some_workers(constant: Any) -> None:
    """Of Python, of numpy or of JAX, in a step that is jitted and in one that is not."""
    x, rank = jnp.asarray([1, 2, 3], "float32"), dj.Partition().rank

    def loss(x: Any) -> Any:
        return jnp.sum(x**2) if rank == 0 else constant

    for jit in (dj.jit, lambda step: step):
        (value, aux), gradient = jit(dj.value_and_grad(lambda x: (loss(x), 1.0), has_aux=True))(x)
        assert (value, aux, gradient.dtype) == (14, 1, "float32")
        assert value.dtype == ("float32" if type(constant) is float else "float64")  # Python's numbers don't count
        np.testing.assert_array_equal(gradient, 2 * x if rank == 0 else 0 * x)
        value, gradient = jit(dj.value_and_grad(lambda x: 1.5))(x)
        assert (value, value.dtype) == (3, "float64") and not gradient.any()


@pytest.mark.simulated(2)
@pytest.mark.parametrize("jit", [dj.jit, lambda step: step])
@pytest.mark.parametrize("moves", [True, False])
def test_losses_that_are_numbers_under_vmap(jit: Any, moves: bool) -> None:
    """A number is as many as what is mapped over: the parameters, the data, by position or by name, or both in turn."""
    P, w, xs = dj.Partition(), jnp.arange(1.0, 4.0), jnp.arange(12.0).reshape(2, 2, 3)

    def loss(w: Any, x: Any) -> Any:
        y = dj.functional.all_sum_reduce(w * x, P, axes_keep=()) if moves else w * x
        return jnp.sum(y**2) if P.rank == 0 else 2.0

    def by_name(w: Any, x: Any) -> Any:
        return jax.vmap(lambda x: step(w, x=x))(x)

    step, times = dj.value_and_grad(loss), 4 if moves else 1
    of_data = jax.vmap(step, (None, 0))
    for mapped, w_or_more, x in (
        (of_data, w, xs[0]),
        (by_name, w, xs[0]),
        (jax.vmap(step), xs[0], xs[1]),
        (jax.vmap(of_data, (None, 0)), w, xs),
    ):
        value, gradient = jit(mapped)(w_or_more, x)
        np.testing.assert_allclose(value, times * jnp.sum((w_or_more * x) ** 2, -1) + 2)
        assert value.shape == x.shape[:-1] and gradient.shape == x.shape


@pytest.mark.simulated(2)
@pytest.mark.parametrize("raises_first", [True, False])
def test_what_raises_on_one_worker_is_raised_there(raises_first: bool) -> None:
    """Whether the others are in the same function still, or have come to its end."""
    P = dj.Partition()

    def loss(x: Any) -> Any:
        if P.rank == 1 and raises_first:
            raise KeyError("a name of the user's")
        y = jnp.sum(dj.functional.all_sum_reduce(x, P, axes_keep=()))
        if P.rank == 1:
            raise KeyError("a name of the user's")
        return y

    with pytest.raises(KeyError if P.rank == 1 else dj.PlanError, match="a name" if P.rank == 1 else "loss") as raised:
        dj.jit(dj.value_and_grad(loss))(jnp.ones(1))
    assert raises_first or P.rank == 1 or 'KeyError: "a name of the user\'s"' in str(raised.value)
    P.allgather_data(None)


def test_what_raises_is_what_comes_out_of_a_simulation() -> None:
    """Not that the others wait for it, which they may be told first."""

    def program() -> Any:
        P = dj.Partition()
        here, there = (P.grid([1], [w]) for w in (0, 1))

        def loss(x: Any) -> Any:
            if P.rank == 1:
                raise KeyError("a name of the user's")
            return jnp.sum(dj.functional.repartition(x, here, there))

        return dj.value_and_grad(loss)(jnp.ones(3) if P.rank == 0 else dj.zero_volume_tensor())

    for _ in range(5):
        with pytest.raises(KeyError, match="a name"):
            dj.simulate(3, program)


@pytest.mark.world(2)
@pytest.mark.simulated(2)
@pytest.mark.parametrize("jit", [dj.jit, jax.jit, lambda step: step], ids=["dj.jit", "jax.jit", "eager"])
def test_rows_of_the_hessian_where_a_worker_adds_nothing_to_it(jit: Any) -> None:
    """Under `jax.vmap` that worker maps what it sends, too: its part is constant, linear, or has second derivatives."""
    P = dj.Partition()
    P_0 = P.create_partition_inclusive([0])
    x, rows = (jnp.array([1.0, 2.0]), jnp.eye(2)) if P.rank == 0 else (jnp.zeros(0), jnp.zeros((2, 0)))
    point = jnp.array([1.0, 2.0]) - P.rank / 2  # together 1.5 and 3.5

    def hessian(move: Any, part: Any, x: Any, rows: Any) -> Any:
        def loss(x: Any) -> Any:
            y = move(x)
            return jnp.sum(y**3) if P.rank == 0 else part(y)

        return jit(jax.vmap(lambda v: dj.hvp(loss, (x,), (v,))))(rows)

    for part in (lambda y: 0.0, jnp.sum, lambda y: 0.0 * jnp.sum(y**2)):
        found = hessian(lambda x: dj.functional.broadcast(x, P_0, P, preserve_batch=False), part, x, rows)
        np.testing.assert_allclose(found, [[6, 0], [0, 12]] if P.rank == 0 else np.zeros((2, 0)))
        found = hessian(lambda x: dj.functional.all_sum_reduce(x, P, axes_keep=()), part, point, jnp.eye(2))
        np.testing.assert_allclose(found, [[2 * 6 * 1.5, 0], [0, 2 * 6 * 3.5]])
