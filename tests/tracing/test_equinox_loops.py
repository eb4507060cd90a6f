"""Loops of equinox, and solvers made of them, in which data move: `dj.grad` against plain JAX on whole arrays."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import distdl_jax as dj

Shift = Callable[[Array], Array]
Loss = Callable[[Shift, Array, Any], Any]
WHOLE = np.arange(4.0)


def compared(loss: Loss) -> None:
    """`loss(shift, x, k)` of blocks, in which `shift` moves data, and of whole arrays: derivatives by k and by x."""
    P = dj.Partition().grid([2])
    spec = dj.TensorSpec((4,), P)

    def of_blocks(k: Any, x: Array) -> Any:
        return loss(lambda u: dj.functional.roll(u, P, 1, 0), x, k)

    def of_whole(k: Any, x: Array) -> Any:
        return loss(lambda u: jnp.roll(u, 1), x, k)

    by_k, by_x = jax.jit(jax.grad(of_whole, (0, 1)))(0.5, jnp.asarray(WHOLE))
    for transform in (dj.jit, lambda fun: fun):
        own, of_x = transform(dj.grad(of_blocks, (0, 1)))(0.5, spec.block(WHOLE))
        np.testing.assert_allclose(sum(P.allgather_data(float(own))), by_k, rtol=1e-12)
        np.testing.assert_allclose(of_x, spec.block(by_x), rtol=1e-12)


def imported(name: str) -> ModuleType:
    return pytest.importorskip(name)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_loops_of_equinox(kind: str) -> None:
    while_loop = imported("equinox.internal").while_loop

    def loss(shift: Shift, x: Array, k: Any) -> Any:
        def step(carry: tuple[Any, Array]) -> tuple[Any, Array]:
            return carry[0] + 1, carry[1] + k * jnp.sin(shift(carry[1]))

        return jnp.sum(while_loop(lambda carry: carry[0] < 5, step, (0, x), max_steps=8, kind=kind)[1] ** 2)

    compared(loss)


@pytest.mark.simulated(2)
def test_a_loop_of_equinox_beside_a_derivative_of_the_users_own() -> None:
    """Which moves data: so the movements form a chain, and that must not pass through what the loop has as constant."""
    while_loop = imported("equinox.internal").while_loop

    def loss(shift: Shift, x: Array, k: Any) -> Any:
        own = jax.custom_vjp(shift)
        own.defvjp(lambda u: (shift(u), None), lambda _, du: (shift(shift(shift(du))),))

        def step(carry: tuple[Any, Array]) -> tuple[Any, Array]:
            return carry[0] + 1, jnp.sin(shift(carry[1])) + x

        limit = 3 + 0 * jnp.sum(x)
        y = while_loop(lambda carry: carry[0] < limit, step, (0, own(k * x)), max_steps=8, kind="checkpointed")[1]
        return jnp.sum(y**2) + jnp.sum(own(k * y))

    compared(loss)


@pytest.mark.simulated(2)
def test_an_equation_that_diffrax_solves() -> None:
    diffrax = imported("diffrax")

    def loss(adjoint: Any) -> Loss:
        def solved(shift: Shift, x: Array, k: Any) -> Any:
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
    optimistix = imported("optimistix")
    P = dj.Partition()

    def loss(adjoint: Any) -> Loss:
        def found(shift: Shift, x: Array, k: Any) -> Any:
            def largest(u: Array) -> Any:  # on all workers, so that they leave the loop together
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
    lineax = imported("lineax")

    def local(shift: Shift, x: Array, k: Any) -> Any:
        return jnp.sum(shift(lineax.linear_solve(lineax.DiagonalLinearOperator(3 + k * x), shift(x)).value) ** 2)

    def split(shift: Shift, x: Array, k: Any) -> Any:
        operator = lineax.FunctionLinearOperator(lambda u: 3 * u + k * shift(u), jax.eval_shape(lambda: x))
        return jnp.sum(lineax.linear_solve(operator, x, lineax.GMRES(1e-9, 1e-9)).value)

    compared(local)
    with pytest.raises(dj.InvalidTypeError, match=r"JAX can't transpose a movement of data between workers"):
        compared(split)
