"""What a plate conducts, from how heat has spread in it: a least-squares problem on a grid that is split over workers.

    mpirun -n 4 python -m distdl_jax examples/gauss_newton.py
    python examples/gauss_newton.py --simulate 4
    python examples/gauss_newton.py

A hot spot on a plate of n x n cells spreads for a while; what is measured is the temperature u at the end. Sought is m,
the logarithm of the conductivity, cell by cell:

    u' = div(exp(m) grad u)            minimise |u(m) - measured|^2 + alpha |m|^2

Gauss-Newton replaces u by its linear part at m, J, and solves for the step by conjugate gradients, which need J v
(`dj.linearize`) and J* w (`jax.vjp`), never J. All fields are in blocks on one grid of workers, and every time step
takes rows and columns of cells from the neighbours. The same functions solve it on one worker, with `jax.linearize`.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import launch

TIME_STEP = 0.1  # stable below 0.25 / the largest conductivity
DIFFERENCE = 1e-8  # how far apart the two solutions may end up
REDUCTION = 100  # by how much the misfit has to fall

Field = jax.Array


class Calculus(NamedTuple):
    """What makes the program distributed or sequential: on blocks, or on whole fields.

    - `widened`: a field with a cell more on each side: the neighbours', or at the border of the plate the same again.
    - `total`: the sum of a number over all workers.
    - `linearize`: a function's value, and its derivative along a direction.
    - `jit`: compiles a step.
    """

    widened: Callable[[Field], Field]
    total: Callable[[jax.Array], jax.Array]
    linearize: Callable[..., tuple[Any, Callable]]
    jit: Callable[[Callable], Callable]


def sequential() -> Calculus:
    """Whole fields, in plain JAX."""
    return Calculus(lambda u: jnp.pad(u, 1, mode="edge"), lambda x: x, jax.linearize, jax.jit)


def distributed(P: dj.CartesianPartition) -> Calculus:
    """Blocks on P; all workers are in it."""

    def widened(u: Field) -> Field:
        wide = dj.functional.halo_exchange(u, P, ((1, 1), (1, 1)))
        ends = zip(P.index, P.shape, strict=True)
        return jnp.pad(wide, [(int(i == 0), int(i == p - 1)) for i, p in ends], mode="edge")

    total = partial(dj.functional.all_sum_reduce, P_x=P, axes_keep=())
    return Calculus(widened, total, dj.linearize, dj.jit)


def temperature(calculus: Calculus, m: Field, spot: Field, steps: int) -> Field:
    """Compute the temperature after `steps`, from that at the beginning; no heat leaves the plate."""
    conductivity = calculus.widened(jnp.exp(m))

    def step(u: Field, _: None) -> tuple[Field, None]:
        wide = calculus.widened(u)
        gained = jnp.zeros_like(u)
        for axis, other in ((0, 1), (1, 0)):
            k, v = (lax.slice_in_dim(x, 1, -1, axis=other) for x in (conductivity, wide))
            between = (lax.slice_in_dim(k, 1, None, axis=axis) + lax.slice_in_dim(k, 0, -1, axis=axis)) / 2
            gained += jnp.diff(between * jnp.diff(v, axis=axis), axis=axis)
        return u + TIME_STEP * gained, None

    return lax.scan(step, spot, length=steps)[0]


def gauss_newton(
    calculus: Calculus, spot: Field, measured: Field, options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[Field, list[float]]:
    """Return the logarithm of the conductivity, and the objective before each step and after the last."""

    def residuals(m: Field) -> tuple[Field, Field]:
        return temperature(calculus, m, spot, options.steps) - measured, math.sqrt(options.alpha) * m

    def inner(x: Any, y: Any) -> jax.Array:
        return calculus.total(sum(jnp.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True)))

    @calculus.jit
    def step(m: Field) -> tuple[Field, jax.Array]:
        values, J = calculus.linearize(residuals, m)
        _, pullback = jax.vjp(residuals, m)

        def adjoint(w: Any) -> Field:
            return pullback(w)[0]

        rest = -adjoint(values)

        def towards(state: tuple[Field, ...], _: None) -> tuple[tuple[Field, ...], None]:
            s, rest, direction, square = state
            image = J(direction)
            far = square / inner(image, image)
            rest = rest - far * adjoint(image)
            new_square = inner(rest, rest)
            return (s + far * direction, rest, rest + new_square / square * direction, new_square), None

        start = (jnp.zeros_like(m), rest, rest, inner(rest, rest))
        (s, *_), _ = lax.scan(towards, start, length=options.inner)
        return m + s, inner(values, values)

    m, objectives = jnp.zeros_like(spot), []
    for number in range(options.iterations + 1):
        begun = time.perf_counter()
        moved, objective = step(m)
        objectives.append(float(objective))
        seconds = time.perf_counter() - begun
        say(f"  step {number:2}  objective {objectives[-1]:.6e}  {seconds:.3f} s{'  (compiles)' * (number == 0)}")
        m = moved if number < options.iterations else m
    return m, objectives


def plate(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the true logarithm of the conductivity, a disc and a bar, and the temperature at the beginning."""
    y, x = np.mgrid[:size, :size] / size
    truth = 0.6 * (np.hypot(x - 0.35, y - 0.4) < 0.15) - 0.5 * ((abs(x - 0.7) < 0.08) & (abs(y - 0.55) < 0.25))
    return truth, np.exp(-20 * ((x - 0.5) ** 2 + (y - 0.5) ** 2))


def main() -> int:
    launch.simulate_if_asked()
    parser = argparse.ArgumentParser(description="Find a conductivity by Gauss-Newton on partitioned fields.")
    parser.add_argument("--size", type=int, default=24, help="cells along each side of the plate")
    parser.add_argument("--steps", type=int, default=8, help="time steps")
    parser.add_argument("--iterations", type=int, default=4, help="steps of Gauss-Newton")
    parser.add_argument("--inner", type=int, default=10, help="steps of conjugate gradients in each")
    parser.add_argument("--alpha", type=float, default=1e-5, help="the weight of |m|^2")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    P_world = dj.Partition()
    rows = max(n for n in range(1, math.isqrt(P_world.size) + 1) if P_world.size % n == 0)
    P = P_world.grid([rows, P_world.size // rows])
    spec = dj.TensorSpec((options.size, options.size), P)

    def say(text: str) -> None:
        if P_world.rank == 0:
            print(text, flush=True)

    truth, spot = plate(options.size)
    measured = jax.jit(partial(temperature, sequential(), steps=options.steps))(jnp.asarray(truth), jnp.asarray(spot))
    say(f"{P_world.size} workers, {P.shape[0]} x {P.shape[1]}, a plate of {options.size} x {options.size} cells")
    m, objectives = gauss_newton(distributed(P), spec.block(spot), spec.block(measured), options, say)
    found = dj.gather(m, spec)

    good = True
    if P_world.rank == 0:  # nothing in here moves data between workers
        say("On one worker, in plain JAX:")
        whole, theirs = gauss_newton(sequential(), jnp.asarray(spot), measured, options, say)
        difference = float(jnp.max(jnp.abs(found - whole)))
        apart = max(abs(a - b) / theirs[0] for a, b in zip(objectives, theirs, strict=True))
        say(f"The objective has fallen by a factor of {objectives[0] / objectives[-1]:.0f}.")
        say(f"Largest difference between the two conductivities: {difference:.1e}")
        say(f"Largest difference between their objectives: {apart:.1e}")
        good = max(difference, apart) < DIFFERENCE and objectives[0] > REDUCTION * objectives[-1]
        if not good:
            say(f"FAILED: the differences must be below {DIFFERENCE:.0e}, and the objective must fall by {REDUCTION}.")
    return 0 if P_world.broadcast_data(good) else 1


if __name__ == "__main__":
    sys.exit(main())
