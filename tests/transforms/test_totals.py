"""`dj.total`: the whole value and derivatives of a sum over workers' data, on every worker, as in plain JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import distdl_jax as dj

N = 11  # uneven, and with more workers than three, one without a row of the first tensor
RNG = np.random.default_rng(0)
ROWS, TARGETS = RNG.normal(size=(N, 3)), RNG.normal(size=N)
THETA = {"weight": np.array([0.1, -0.2, 0.3]), "scale": np.float64(0.2)}
Tree = dict[str, Any]


def log_density(theta: Tree, rows: Any = ROWS, targets: Any = TARGETS) -> Any:
    return -jnp.sum(jnp.log(jnp.cosh(rows @ theta["weight"] - targets))) * jnp.exp(theta["scale"])


def prior(theta: Tree) -> Any:
    return -sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(theta))


def split(P: dj.Partition) -> Callable[[Tree], Any]:
    """Return the log density with the rows over the workers."""
    rows = dj.TensorSpec(ROWS.shape, P.grid([P.size, 1])).block(ROWS)
    targets = dj.TensorSpec(TARGETS.shape, P.grid([P.size])).block(TARGETS)
    return dj.total(lambda theta: log_density(theta, rows, targets), P)


def start() -> Tree:
    return jax.tree.map(jnp.asarray, THETA)


def assert_equal_on_all(P: dj.Partition, tree: Any, expected: Any, rtol: float = 1e-12) -> None:
    """Bit for bit on all workers, and to rounding those of plain JAX."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, 1e-13), tree, expected)
    assert len(set(P.allgather_data(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))))) == 1


def dot(one: Tree, other: Tree) -> Any:
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, one, other)))


DIRECTION = jax.tree.map(lambda leaf: leaf + 1.0, THETA)


def hessian_times(f: Callable[[Tree], Any]) -> Callable[[Tree], Any]:
    return jax.grad(lambda theta: dot(jax.grad(f)(theta), DIRECTION))


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "value and gradient": jax.value_and_grad,
    "times a number that all have": lambda f: jax.grad(lambda theta: f(theta) ** 2 + prior(theta)),
    "gradient of the gradient": hessian_times,
    "third derivative": lambda f: jax.grad(lambda theta: dot(hessian_times(f)(theta), DIRECTION)),
    "rows of the Hessian": lambda f: jax.jacrev(jax.grad(f)),
    "in a scan": lambda f: jax.grad(
        lambda theta: jax.lax.scan(lambda x, _: (jax.tree.map(jnp.add, x, jax.grad(f)(x)), None), theta, length=2)[0][
            "scale"
        ]
    ),
    "of a checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}
MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda fun: fun, "jax.jit": jax.jit, "dj.jit": dj.jit}


@pytest.mark.world(2)
@pytest.mark.simulated(4)
@pytest.mark.limit(400)
@pytest.mark.parametrize("mode", MODES)
def test_derivatives_of_any_order_are_those_of_plain_jax(mode: str) -> None:
    """Also of several points at once, as several chains have them."""
    P = dj.Partition()
    points = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), start())
    names = ["value and gradient"] if mode == "eager" else [*DERIVATIVES]

    def all_of(f: Callable[[Tree], Any]) -> Callable[[Tree, Tree], Any]:
        def results(theta: Tree, points: Tree) -> Any:
            if mode == "jax.jit":
                return {name: jax.vmap(DERIVATIVES[name](f))(points) for name in names}
            return {name: DERIVATIVES[name](f)(theta) for name in names}

        return results

    results = MODES[mode](all_of(split(P)))(start(), points)
    assert_equal_on_all(P, results, jax.jit(all_of(log_density))(start(), points))


@pytest.mark.simulated(3)
def test_forward_mode_is_dj_jvp_and_dj_hvp() -> None:
    P, theta = dj.Partition(), start()
    direction = jax.tree.map(jnp.asarray, DIRECTION)
    both = dj.jvp(split(P), (theta,), (direction,)), dj.hvp(split(P), (theta,), (direction,))
    assert_equal_on_all(P, both, (jax.jvp(log_density, (theta,), (direction,)), hessian_times(log_density)(theta)))


@pytest.mark.world(3)
@pytest.mark.simulated(4)
@pytest.mark.limit(300)
@pytest.mark.parametrize("mode", ["jax.jit", "dj.jit"])
def test_a_part_moves_data_which_only_one_worker_uses(mode: str) -> None:
    """A wave over split cells, seen by receivers on the first worker: the others' parts are constants."""
    P = dj.Partition()
    cells = dj.TensorSpec((13,), P.grid([P.size]))
    bump = np.exp(-((np.arange(13.0) - 6) ** 2))

    def simulated(theta: Any, u: Any, roll: Callable[[Any], Any]) -> Any:
        return jax.lax.scan(lambda u, _: (u + theta * (roll(u) - u), None), u, length=3)[0]

    def part(theta: Any) -> Any:
        u = simulated(theta, cells.block(bump), lambda u: dj.functional.roll(u, cells.partition, 1, 0))
        return jnp.sum(u[:2] ** 3) if P.rank == 0 else 0.0

    def plain(theta: Any) -> Any:
        return jnp.sum(simulated(theta, jnp.asarray(bump), lambda u: jnp.roll(u, 1))[:2] ** 3)

    def both(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda theta: (jax.value_and_grad(f)(theta), jax.grad(jax.grad(f))(theta))

    results = MODES[mode](both(dj.total(part, P)))(jnp.float64(0.3))
    assert_equal_on_all(P, results, jax.jit(both(plain))(jnp.float64(0.3)))


@pytest.mark.simulated(4)
def test_several_results_are_summed_and_other_arguments_are_own() -> None:
    """Teams with totals of their own; the gradient by a worker's own argument is its own block of the whole one."""
    world = dj.Partition()
    P = world.create_partition_inclusive([0, 1] if world.rank < 2 else [2, 3])

    def part(theta: Any, x: Any, *, power: int) -> Any:
        return theta * jnp.sum(x**power), {"count": x.size, "largest two": jnp.ones(2)}

    whole = dj.total(part, P)
    x = jnp.arange(2 + P.rank, dtype=jnp.float32)  # 0, 1 and 0, 1, 2
    (value, aux), (by_theta, by_x) = jax.value_and_grad(
        lambda theta, x: whole(theta, x, power=2), argnums=(0, 1), has_aux=True
    )(jnp.float32(3), x)
    assert value.dtype == by_theta.dtype == jnp.float32
    assert (float(value), float(by_theta), int(aux["count"]), aux["largest two"].tolist()) == (18, 6, 5, [2, 2])
    assert by_x.tolist() == (6 * x).tolist()


@pytest.mark.world(2)
@pytest.mark.limit(400)
def test_a_chain_of_blackjax_is_the_one_of_all_data() -> None:
    """NUTS, whose trajectories depend on values: two chains at once, equal on all workers and to plain JAX's."""
    import blackjax

    P = dj.Partition()

    def chains(log_likelihood: Callable[[Tree], Any]) -> Any:
        nuts = blackjax.nuts(
            lambda theta: prior(theta) + log_likelihood(theta),
            step_size=0.3,
            inverse_mass_matrix=jnp.ones(4),
            max_num_doublings=3,
        )

        def chain(key: Any, theta: Tree) -> Any:
            def step(state: Any, key: Any) -> Any:
                state, info = nuts.step(key, state)
                return state, (state.position, info.num_integration_steps)

            return jax.lax.scan(step, nuts.init(theta), jax.random.split(key, 8))[1]

        starts = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), start())
        return jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0)), starts)

    drawn = chains(split(P))
    assert float(jnp.std(drawn[0]["weight"])) > 0.05  # it moved
    assert_equal_on_all(P, drawn, chains(log_density), rtol=1e-10)


@pytest.mark.simulated(3)
@pytest.mark.limit(300)
def test_minimisers_of_optimistix_and_scipy_take_the_steps_of_all_data() -> None:
    import optimistix

    P = dj.Partition()

    def found(log_likelihood: Callable[[Tree], Any]) -> Any:
        def misfit(theta: Tree, _: Any) -> Any:
            return -prior(theta) - log_likelihood(theta)

        return optimistix.minimise(
            misfit,
            optimistix.BFGS(rtol=1e-8, atol=1e-8),
            start(),
            options={"autodiff_mode": "bwd"},
        ).value

    def found_by_scipy(log_likelihood: Callable[[Tree], Any]) -> Any:
        of_weight = jax.jit(jax.value_and_grad(lambda x: -log_likelihood({"weight": x, "scale": jnp.float64(0)})))
        return minimize(of_weight, THETA["weight"], jac=True, method="L-BFGS-B").x

    for search in (found, found_by_scipy):
        assert_equal_on_all(P, search(split(P)), search(log_density), rtol=1e-7)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(dj.DistDLError) as raised:
        call()
    return str(raised.value)


@pytest.mark.simulated(3)
def test_wrong_use_is_refused() -> None:
    P = dj.Partition()
    whole, theta = split(P), start()
    for call in (lambda: dj.value_and_grad(whole)(theta), lambda: dj.grad(jax.jit(whole))(theta)):
        assert "is called in a function whose results dj.grad or dj.value_and_grad adds up" in refusal(call)
    assert "whose results dj.total adds up" in refusal(lambda: dj.total(whole, P)(theta))
    assert "`part` (=3) must be a function" in refusal(lambda: dj.total(3))  # type: ignore[arg-type]
    assert "`P` (=3) must be a partition" in refusal(lambda: dj.total(log_density, 3))  # type: ignore[arg-type]
    assert "Use dj.jvp" in refusal(lambda: jax.jvp(whole, (theta,), (theta,)))
    text = refusal(lambda: dj.total(lambda theta: jnp.ones(1 + P.rank), P)(theta))
    assert "`part` must return the same tree, of equal shapes, on all workers, but returns float64[1]" in text
    text = refusal(lambda: dj.total(log_density, P)(theta if P.rank else theta | {"scale": jnp.ones(2)}))
    assert "must have the same shape and dtype on all workers that hold copies of it" in text
    if P.rank == 2:
        alone = P.create_partition_inclusive([0, 1])
        assert "worker 2, which is not in `P`" in refusal(lambda: dj.total(log_density, alone)(theta))
