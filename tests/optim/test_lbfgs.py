"""L-BFGS and line searches on blocks are optax's on the whole tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.test_optim import compare, cut, drawn, on_one_worker

import distdl_jax as dj
from distdl_jax.optim.line_search import with_synced_loops

TARGET = drawn(7)


def specs_of_two() -> dict[str, Any]:
    """For two workers: rows, something on the second alone, copies on both."""
    P = dj.Partition()
    second = P.grid([1], [1])
    return {
        "matrix": dj.TensorSpec((5, 3), P.grid([2, 1])),
        "bias": dj.TensorSpec((5,), second),
        "scale": dj.TensorSpec((), second),
        "gain": dj.TensorSpec((4,), P.grid([2]), replicated=True),
    }


def whole_loss(params: Any, weight: Any = 1.0) -> Any:
    """Convex; the sum of all parameters couples them."""
    apart = sum(jnp.sum(jnp.cosh(0.3 * (x - TARGET[name]))) for name, x in params.items())
    return weight * apart + sum(jnp.sum(x) for x in params.values()) ** 2 / 20


def part_of_loss(params: Any, weight: Any = 1.0) -> Any:
    P, its = dj.Partition(), specs_of_two()
    target = cut(TARGET, its)
    params = {**params, "gain": dj.replicated(params["gain"], P)}
    counted = {name: x for name, x in params.items() if its[name].counts}
    apart = sum((jnp.sum(jnp.cosh(0.3 * (x - target[name]))) for name, x in counted.items()), jnp.zeros(()))
    own = sum((jnp.sum(x) for x in counted.values()), jnp.zeros(()))
    return weight * apart + dj.functional.all_sum_reduce(own, P, axes_keep=()) ** 2 / 20 / P.size


SEARCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "zoom": lambda: {"learning_rate": 0.5},
    "backtracking": lambda: {
        "linesearch": optax.scale_by_backtracking_linesearch(20, store_grad=True),
        "memory_size": 2,
        "scale_init_precond": False,
    },
}


@pytest.mark.simulated(2)
@pytest.mark.parametrize("name", SEARCHES)
def test_lbfgs_with_a_line_search(name: str) -> None:
    """Steps, values and gradients from the state as on whole tensors; a keyword goes to the loss."""
    options, its = SEARCHES[name](), specs_of_two()

    def steps(optimiser: Any, from_state: Any, loss: Any) -> Any:
        def step(params: Any, state: Any) -> Any:
            value, gradient = from_state(params, weight=2.0, state=state)
            updates, state = optimiser.update(
                gradient, state, params, value=value, grad=gradient, value_fn=loss, weight=2.0
            )
            return optax.apply_updates(params, updates), state, value

        return step

    optimiser = dj.optim.lbfgs(its, **options)
    ours = dj.jit(steps(optimiser, dj.optim.value_and_grad_from_state(part_of_loss), part_of_loss))

    def theirs() -> list[Any]:
        plain = optax.lbfgs(**options)
        step = jax.jit(steps(plain, optax.value_and_grad_from_state(whole_loss), whole_loss))
        params = {name: drawn(0)[name] for name in its}
        state, found = plain.init(params), []
        for _ in range(6):
            params, state, value = step(params, state)
            found.append((value, state[2].learning_rate, params, state[2].grad))
        return found

    params, values = cut(drawn(0), its), []
    state = optimiser.init(params)
    wanted = on_one_worker(theirs)
    for want, rate, *_ in wanted:
        params, state, value = ours(params, state)
        np.testing.assert_allclose(value, want, 1e-12)
        np.testing.assert_allclose(state[2].learning_rate, rate, 1e-12)
        values.append(float(value))
    for got, whole in zip((params, state[2].grad), wanted[-1][2:], strict=True):
        compare(got, cut(whole, its), 1e-12)
    assert values[-1] < values[1] < values[0]
    told = state[2]._replace(value=jnp.full_like(state[2].value, 123))
    assert ours(params, (*state[:2], told))[2] == 123  # which was not evaluated


@pytest.mark.simulated(3)
@pytest.mark.parametrize("name", SEARCHES)
def test_some_workers_search_alone(name: str) -> None:
    """Traced, which needs all who take part: worker 1 does not. A step leaves dtypes as they are."""
    P = dj.Partition().create_partition_inclusive([2, 0])
    if not P.active:
        return
    spec = dj.TensorSpec((4,), P.grid([2]))
    optimiser = dj.optim.lbfgs([spec, spec], **SEARCHES[name](), partition=P)

    def loss(params: Any) -> Any:
        return sum(jnp.sum(jnp.cosh(x)) for x in params)

    def step(params: Any, state: Any) -> Any:
        value, gradient = dj.optim.value_and_grad_from_state(loss, partition=P)(params, state=state)
        updates, state = optimiser.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
        return optax.apply_updates(params, updates), state

    narrow = "bfloat16" if name == "zoom" else float  # optax's other one takes no such parameters
    params = [jnp.ones(2), jnp.ones(2, narrow)]
    before = params, optimiser.init(params)
    after = jax.eval_shape(step, *before)
    assert jax.tree.map(jnp.dtype, after) == jax.tree.map(lambda x: x.dtype, before)


@pytest.mark.simulated(2)
def test_a_search_that_meets_nan() -> None:
    """Steps out of the domain, on one worker: all take back as much. Complex numbers end where plain optax brings their
    real and imaginary parts."""
    P = dj.Partition()
    spec = dj.TensorSpec((3,), P.grid([2]))
    theirs = optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(20))
    ours = optax.chain(optax.sgd(1.0), dj.optim.line_search(optax.scale_by_zoom_linesearch(20), spec))

    def loss(x: Any, a: Any) -> Any:
        return jnp.sum(-a * jnp.log(x.real) + x.real**2 + x.imag**2)

    def loss_of_pairs(pairs: Any, a: Any) -> Any:
        return loss(jax.lax.complex(pairs[0], pairs[1]), a)

    def steps(jit: Any, optimiser: Any, value_and_grad: Any, loss: Any, x: Any, a: Any) -> Any:
        @jit
        def step(x: Any, state: Any, a: Any) -> Any:
            value, gradient = value_and_grad(loss)(x, a)
            updates, state = optimiser.update(
                jnp.conj(gradient), state, x, value=value, grad=gradient, value_fn=lambda x: loss(x, a)
            )
            return optax.apply_updates(x, updates), state

        state = optimiser.init(x)
        for _ in range(4):
            x, state = step(x, state, a)
        return x

    x, a, mine = np.array([0.1 + 2j, 3.0 - 1j, 10.0]), np.array([30.0, 2.0, 1.0]), slice(*spec.box[0])
    pairs = jnp.stack([x.real, x.imag])
    want = on_one_worker(lambda: steps(jax.jit, theirs, jax.value_and_grad, loss_of_pairs, pairs, a))
    got = steps(dj.jit, ours, dj.value_and_grad, loss, jnp.asarray(x[mine]), a[mine])
    np.testing.assert_allclose(got, (want[0] + 1j * want[1])[mine], 1e-12)


@pytest.mark.simulated(2)
def test_the_first_worker_decides() -> None:
    """A search that keeps no gradient: worker 1, which was told a wrong value, would be content sooner."""
    spec = dj.TensorSpec((3,), dj.Partition().grid([2]))
    search = optax.scale_by_backtracking_linesearch(20)
    x, mine = jnp.array([1.0 + 2j, -3.0, 2.0 - 1j]), slice(*spec.box[0])

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.abs(x) ** 4)

    def step(search: Any, value: Any, gradient: Any, x: Any) -> Any:
        updates, state = search.update(
            -jnp.conj(gradient), search.init(x), x, value=value, grad=gradient, value_fn=loss
        )
        return updates, state.learning_rate, state.value

    value, gradient = jax.value_and_grad(loss)(x)
    want = on_one_worker(lambda: jax.jit(partial(step, search))(value, gradient, x))
    assert want[1] < 0.1
    ours = dj.jit(partial(step, dj.optim.line_search(search, spec)))
    updates, *found = ours(value + 1e9 * spec.partition.rank, gradient[mine], x[mine])
    np.testing.assert_allclose(updates, want[0][mine], 1e-12)
    np.testing.assert_allclose(found, want[1:], 1e-12)


@pytest.mark.simulated(3)
def test_loops_end_together() -> None:
    """Workers that would leave a loop after different passes, because their numbers differ, leave with the first."""
    P = dj.Partition()

    def passes(step: Any, block: Any) -> Any:
        return jax.lax.while_loop(
            lambda carried: carried[0] < 1,
            lambda carried: (carried[0] + step, carried[1] + 1, 2 * carried[2]),
            (step, 0, block),
        )

    step, block = jnp.array([0.3, 0.5, 1.5])[P.rank], jnp.ones(P.rank + 1)
    far, count, block = dj.jit(with_synced_loops(jax.jit(passes), P))(step, block)
    assert (count, float(far)) == (3, 0.3 + 0.3 + 0.3 + 0.3)
    np.testing.assert_array_equal(block, np.full(P.rank + 1, 8.0))
