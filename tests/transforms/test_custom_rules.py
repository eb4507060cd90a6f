"""Derivatives of the user's own: with movements in them, on all workers or on one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_programs import flat
from jax import lax

import distdl_jax as dj


def same(x: Any) -> Any:
    return x


def summed_backward(
    P: dj.Partition, there: Callable[[Any], Any] = same, back: Callable[[Any], Any] = same
) -> Callable[[Any], Any]:
    """A function of the user's whose own derivative is `back`, then the sum over workers: a movement."""
    own = jax.custom_vjp(there)
    own.defvjp(lambda x: (there(x), None), lambda _, dy: (dj.functional.all_sum_reduce(back(dy), P, axes_keep=()),))
    return own


@pytest.mark.simulated(2)
@pytest.mark.parametrize("transform", [dj.jit, lambda fun: fun], ids=["dj.jit", "eager"])
def test_derivatives_of_the_users_own_that_move_data(transform: Callable[..., Any]) -> None:
    """Each worker uses another one, whose messages would fit each other; one worker uses one; one in a loop."""
    P = dj.Partition()
    copied, x = summed_backward(P), jnp.array([1.0, 2.0]) * (1 + P.rank)

    def others(x: Any) -> Any:
        y, z = copied(x), copied(2 * x)
        return jnp.sum(y**2) if P.rank == 0 else jnp.sum(z**2)

    def one(x: Any) -> Any:
        y, z = lax.scan(lambda c, _: (2 * copied(c), None), x, None, length=2)[0], copied(x)
        return jnp.sum(y * z) if P.rank == 0 else 0.0

    first, second = jnp.array([1.0, 2.0]), jnp.array([2.0, 4.0])
    np.testing.assert_allclose(transform(dj.grad(others))(x), 2 * first + 2 * 2 * (2 * second))
    np.testing.assert_allclose(transform(dj.grad(one))(x), 4 * first + 2 * (2 * (2 * first)))  # summed in each pass


@pytest.mark.simulated(2)
@pytest.mark.parametrize("name", ["jvp", "hvp", "linearize"])
def test_a_derivative_that_moves_data_backward_only_is_not_transposed(name: str) -> None:
    """It would give the sum over workers of what is one value; the same sentence on all, with the line."""
    P = dj.Partition()
    copied, x = summed_backward(P), jnp.array([1.0, 2.0])

    def total(x: Any) -> Any:
        y = copied(x)
        return jnp.sum(y**2) if P.rank == 0 else 0.0

    run = {
        "jvp": lambda x: dj.jvp(total, (x,), (x,)),
        "hvp": lambda x: dj.hvp(total, (x,), (x,)),
        "linearize": lambda x: dj.linearize(total, x)[0],
    }
    said = rf"dj.{name} can't pass through .* at test_custom_rules.py:\d+ in total: .*it moves data, .*replicated"
    with pytest.raises(dj.InvalidArgumentError, match=said) as raised:
        jax.jit(run[name])(x)
    assert len(set(P.allgather_data(str(raised.value)))) == 1


@pytest.mark.simulated(2)
def test_local_derivatives_of_the_users_own_change_nothing() -> None:
    """Beside one without messages the programs stay as they are: no adjoint that nobody needs."""
    P = dj.Partition()
    P_one, P_all = (P.create_partition_inclusive(range(n)) for n in (1, 2))

    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))

    def loss(x: Any, data: Any) -> Any:
        return jnp.sum(doubled(x) * jnp.sum(dj.functional.repartition(data, P_one, P_all)))

    data = jnp.ones(4) if P.rank == 0 else dj.zero_volume_tensor()
    report = dj.check(dj.grad(loss), jnp.ones(3), data)
    assert report.ok and not any(operation.place.backward for operation in flat(report.programs[P.rank]))


@pytest.mark.simulated(2)
def test_what_raises_on_one_worker_raises_on_all() -> None:
    P = dj.Partition()

    def loss(x: Any) -> Any:
        y = dj.functional.all_sum_reduce(x, P, axes_keep=())
        if P.rank == 0:
            return lax.while_loop(lambda y: jnp.sum(y) < 9.0, lambda y: 2 * y, y)[0]
        return 0.0

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        dj.grad(loss)(jnp.ones(1))
    P.allgather_data(None)  # and both can go on


@pytest.mark.simulated(2)
def test_a_derivative_of_the_users_own_that_holds_an_array_on_one_worker() -> None:
    P = dj.Partition()
    factors = np.array([3.0, 4.0])
    own = summed_backward(P, lambda x: x * factors if P.rank else x, lambda dy: dy * factors if P.rank else dy)
    np.testing.assert_allclose(dj.grad(lambda x: jnp.sum(own(x)))(jnp.ones(2)), [4.0, 5.0])


@pytest.mark.simulated(2)
def test_what_a_derivative_of_the_users_own_raises_on_one_worker_is_raised() -> None:
    """And not only that the other, which waits for it in a movement there, does something else."""
    P = dj.Partition()

    def back(dy: Any) -> Any:
        return dy if P.rank == 0 else {}["no such key"]

    error, words = (dj.PlanError, "programs differ") if P.rank == 0 else (KeyError, "no such key")
    own = summed_backward(P, back=back)
    with pytest.raises(error, match=words):
        dj.grad(lambda x: jnp.sum(own(x)))(jnp.ones(2))
    P.allgather_data(None)  # and both can go on
