"""Loops that move data: those of JAX that have no adjoint, where no derivative depends on them; and equinox's, with
the solvers that are made of them, against plain JAX on whole arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj

Moved = Callable[[Any], Any]


def until_large(moved: Moved, x: Any) -> Any:
    """A loop that ends by a number that all workers have."""
    start = jnp.sum(moved(x), axis=-1, keepdims=True)
    return lax.while_loop(
        lambda c: jnp.max(c[0]) < 100, lambda c: (moved(jnp.sum(c[1], -1, keepdims=True)), 1.5 * c[1]), (start, x)
    )[1]


def three_times(moved: Moved, x: Any) -> Any:
    """A loop of which only the data say how long it is."""
    return lax.fori_loop(0, jnp.where(jnp.isnan(jnp.sum(x)), 2, 3), lambda i, c: 0.5 * moved(c), x)


def uses(moved: Moved, x: Any) -> Any:
    """This worker's part of a loss; each term needs a loop's value, and no term its derivative."""
    scanned = lax.scan(lambda c, _: (jnp.sin(c) * lax.stop_gradient(three_times(moved, c)), None), x, None, length=2)[0]
    branched = lax.cond(True, lambda x: lax.stop_gradient(until_large(moved, x)) * moved(x), lambda x: x, x)
    again = jax.checkpoint(lambda x: moved(jnp.sin(x)) * until_large(moved, lax.stop_gradient(jnp.sin(x))))(x)
    large = until_large(moved, moved(x) * x)
    terms = (
        lax.stop_gradient(until_large(moved, x)) * x**3,
        moved(lax.stop_gradient(three_times(moved, x)) * x) * x,
        jnp.where(until_large(moved, x) > 60, x**2, 3 * x),
        jnp.round(three_times(moved, x)).astype(jnp.int32) * x**2,
        jnp.argsort(large, axis=-1) * x**2,
        scanned,
        branched,
        again,
        jax.jit(lambda x: lax.stop_gradient(until_large(moved, x)))(x) * x,
    )
    three_times(moved, x)  # and nobody uses it
    return sum(jnp.sum(term) for term in terms)


BLOCKS = np.array([[0.5, 1.25, -0.75], [1.0, 0.25, 2.0]])


def derivatives(loss: Callable[[Any], Any], grad: Callable[..., Any]) -> Callable[[Any], Any]:
    """The gradient, and a second derivative."""
    return lambda x: (grad(loss)(x), grad(lambda x: jnp.sum(jnp.sin(grad(loss)(x))))(x))


@pytest.mark.simulated(2)
@pytest.mark.parametrize("grad", [jax.grad, dj.grad], ids=["jax.grad", "dj.grad"])
def test_loops_that_no_derivative_depends_on(grad: Callable[..., Any]) -> None:
    P = dj.Partition().grid([2])

    def moved(x: Any) -> Any:
        return dj.functional.all_sum_reduce(x, P, axes_reduce=0)

    def in_one_place(x: Any) -> Any:
        return uses(lambda x: jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True), x.shape), x)

    got = dj.jit(derivatives(lambda x: uses(moved, x), grad))(BLOCKS[P.rank])
    wanted = jax.jit(derivatives(in_one_place, jax.grad))(BLOCKS)
    for mine, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, want[P.rank], rtol=1e-12)


@pytest.mark.simulated(2)
def test_a_loop_that_is_differentiated_is_refused() -> None:
    P = dj.Partition().grid([2])

    def loss(x: Any) -> Any:
        return jnp.sum(until_large(lambda x: dj.functional.all_sum_reduce(x, P, axes_reduce=0), x))

    for grad in (jax.grad, dj.grad):
        with pytest.raises(ValueError, match=r"Reverse-mode differentiation does not work for lax.while_loop"):
            grad(loss)(BLOCKS[P.rank])
        with pytest.raises(dj.InvalidTypeError, match=r"apply jax.lax.stop_gradient to its inputs"):
            grad(lambda x: jax.checkpoint(loss)(x))(BLOCKS[P.rank])


# --- equinox ----------------------------------------------------------------------------------------------------------

Loss = Callable[[Moved, Any, Any], Any]
WHOLE = np.arange(4.0)


def compared(loss: Loss) -> None:
    """`loss(shift, x, k)` of blocks, in which `shift` moves data, and of whole arrays: derivatives by k and by x."""
    P = dj.Partition().grid([2])
    spec = dj.TensorSpec((4,), P)

    def of_blocks(k: Any, x: Any) -> Any:
        return loss(lambda u: dj.functional.roll(u, P, 1, 0), x, k)

    def of_whole(k: Any, x: Any) -> Any:
        return loss(lambda u: jnp.roll(u, 1), x, k)

    by_k, by_x = jax.jit(jax.grad(of_whole, (0, 1)))(0.5, jnp.asarray(WHOLE))
    for transform in (dj.jit, lambda fun: fun):
        own, of_x = transform(dj.grad(of_blocks, (0, 1)))(0.5, spec.block(WHOLE))
        np.testing.assert_allclose(sum(P.allgather_data(float(own))), by_k, rtol=1e-12)
        np.testing.assert_allclose(of_x, spec.block(by_x), rtol=1e-12)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_loops_of_equinox(kind: str) -> None:
    while_loop = pytest.importorskip("equinox.internal").while_loop

    def loss(shift: Moved, x: Any, k: Any) -> Any:
        def step(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            return carry[0] + 1, carry[1] + k * jnp.sin(shift(carry[1]))

        return jnp.sum(while_loop(lambda carry: carry[0] < 5, step, (0, x), max_steps=8, kind=kind)[1] ** 2)

    compared(loss)


@pytest.mark.simulated(2)
def test_a_loop_of_equinox_beside_a_derivative_of_the_users_own() -> None:
    """Which moves data: so the movements form a chain, and that must not pass through what the loop has as constant."""
    while_loop = pytest.importorskip("equinox.internal").while_loop

    def loss(shift: Moved, x: Any, k: Any) -> Any:
        own = jax.custom_vjp(shift)
        own.defvjp(lambda u: (shift(u), None), lambda _, du: (shift(shift(shift(du))),))

        def step(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            return carry[0] + 1, jnp.sin(shift(carry[1])) + x

        limit = 3 + 0 * jnp.sum(x)
        y = while_loop(lambda carry: carry[0] < limit, step, (0, own(k * x)), max_steps=8, kind="checkpointed")[1]
        return jnp.sum(y**2) + jnp.sum(own(k * y))

    compared(loss)


@pytest.mark.simulated(2)
def test_an_equation_that_diffrax_solves() -> None:
    diffrax = pytest.importorskip("diffrax")

    def loss(adjoint: Any) -> Loss:
        def solved(shift: Moved, x: Any, k: Any) -> Any:
            term = diffrax.ODETerm(lambda t, u, k: k * shift(u))
            return jnp.sum(
                diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.1, x, args=k, max_steps=16, adjoint=adjoint).ys
                ** 2
            )

        return solved

    compared(loss(diffrax.RecursiveCheckpointAdjoint()))
    compared(loss(diffrax.DirectAdjoint()))
    with pytest.raises(dj.InvalidTypeError, match=r"diffrax and optimistix pass adjoint=RecursiveCheckpointAdjoint"):
        compared(loss(diffrax.BacksolveAdjoint()))


@pytest.mark.simulated(2)
def test_a_fixed_point_that_optimistix_finds() -> None:
    optimistix = pytest.importorskip("optimistix")
    P = dj.Partition()

    def loss(adjoint: Any) -> Loss:
        def found(shift: Moved, x: Any, k: Any) -> Any:
            def largest(u: Any) -> Any:  # on all workers, so that they leave the loop together
                here = optimistix.max_norm(u)
                return here if x.size == 4 else dj.all_reduce(here, P, "max")

            solver = optimistix.FixedPointIteration(rtol=1e-12, atol=1e-12, norm=largest)
            return jnp.sum(
                optimistix.fixed_point(
                    lambda u, k: k * jnp.cos(shift(u)) + x, solver, x, args=k, adjoint=adjoint, max_steps=99
                ).value
                ** 2
            )

        return found

    compared(loss(optimistix.RecursiveCheckpointAdjoint()))
    with pytest.raises(dj.InvalidTypeError, match=r"adjoint=RecursiveCheckpointAdjoint"):
        compared(loss(optimistix.ImplicitAdjoint()))


@pytest.mark.simulated(2)
def test_systems_that_lineax_solves() -> None:
    """One a worker, between movements; one that is split is refused."""
    lineax = pytest.importorskip("lineax")

    def local(shift: Moved, x: Any, k: Any) -> Any:
        return jnp.sum(shift(lineax.linear_solve(lineax.DiagonalLinearOperator(3 + k * x), shift(x)).value) ** 2)

    def split(shift: Moved, x: Any, k: Any) -> Any:
        operator = lineax.FunctionLinearOperator(lambda u: 3 * u + k * shift(u), jax.eval_shape(lambda: x))
        return jnp.sum(lineax.linear_solve(operator, x, lineax.GMRES(1e-9, 1e-9)).value)

    compared(local)
    with pytest.raises(dj.InvalidTypeError, match=r"JAX can't transpose a movement of data between workers"):
        compared(split)
