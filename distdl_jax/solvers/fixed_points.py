"""Fixed points of functions of split tensors: deep equilibrium models, implicit time steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distdl_jax.partition import Partition, check_partitions
from distdl_jax.primitives.block_checks import outside
from distdl_jax.solvers.iteration import (
    Info,
    Leaves,
    Limits,
    Program,
    agree_on_sizes,
    as_program,
    check_functions,
    check_like,
    checked_limits,
    cotangents_of,
    nobody,
    real_inner,
    solved,
    summed,
    tied_together,
    with_anchor,
)


def fixed_point(
    f: Callable[[Any, Any], Any],
    params: Any,
    x0: Any,
    P_x: Partition,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int = 100,
) -> tuple[Any, Info]:
    """Solve z = f(params, z) by z <- f(params, z), where z is split over workers: a deep equilibrium model.

    In each step f is applied once, and two numbers are summed over all workers, in one message; so all of them take the
    same steps. Whatever f moves, it moves in each of them, weights that are broadcast as well.

    The derivative is implicit. With J the derivative of f by z at the solution, u = (the cotangent of z) + J* u is
    solved backward, by the same iteration, to the same tolerance; u times the derivative of f by `params` is the
    gradient. Nothing of the steps is stored. It is as exact as both solutions are. Derivatives of any order, in reverse
    mode and by `dj.jvp` and `dj.hvp`, go the same way.

    **Arguments:**

    - `f`: a function of `params` and of z, this worker's blocks of both; it returns blocks like z, of the same
      structure, shapes and dtypes. It has to contract: where it draws points together, as a map of the whole tensor,
      the iteration converges. It may move data, and close over arrays, which have derivatives as `params` have.
    - `params`: this worker's parameters, any pytree.
    - `x0`: this worker's blocks of the z to begin with, an array or a tree of arrays; floating or complex, blocks may
      be uneven and empty. Nothing in it may be a copy of what another worker holds. It has no derivative. Elsewhere
      zero-volume arrays.
    - `P_x`: the workers that take part: those of z, and all others that f moves data to, or parameters from.
    - `tol`, `atol`: it ends where the norm of the last change of z is at most max(tol times the norm of z, atol).
      Numbers, the same on all workers.
    - `maxiter`: the largest number of steps, forward and backward each.

    **Returns:** `(z, info)`: this worker's blocks of z, like x0, whether it has converged or not; `info.converged`,
    `info.steps` and `info.residual`, the norm of the last change, are the same on all workers of P_x. Outside P_x, x0
    and zeros.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker of P_x, where an argument doesn't fit, or
    f returns something else than blocks like x0.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> z, info = fixed_point(lambda a, z: a * jnp.cos(z), 1.0, jnp.ones(2), dj.Partition(), tol=1e-6)
    >>> [round(float(each), 4) for each in z], bool(info.converged)
    ([0.7391, 0.7391], True)

    Source: Bai, Kolter and Koltun (2019), arXiv:1909.01377; Christianson (1994), on the derivative.
    """
    check_partitions(P_x=P_x)
    check_functions(f=f)
    limits = checked_limits(tol, atol, maxiter)
    if not P_x.active:
        return jax.tree.map(lambda leaf: outside(P_x.world, leaf, "x0"), x0), nobody()
    with jax.named_scope("fixed_point"):
        params, x0 = jax.tree.map(jnp.asarray, (params, x0))
        program, consts, fz = as_program(f, params, x0)
        sizes = agree_on_sizes(
            f"fixed_point to {limits}", P_x, "x0", x0, lambda: check_like("`f` must return what is", fz, "x0", x0)
        )
        leaves, structure = jax.tree.flatten(x0)
        system = Iteration(P_x, program, limits, sizes.dtype)
        z, info = solved(_solve, system, [*consts, *jax.tree.leaves(params)], leaves)
        return jax.tree.unflatten(structure, z), info


@dataclass(frozen=True, eq=False)
class Iteration:
    """All that is static: the function, as a program of its inputs and z, and the dtype of norms."""

    P: Partition
    f: Program
    limits: Limits
    dtype: np.dtype

    def iterate(self, inputs: Leaves, x0: Leaves) -> tuple[Leaves, Info]:
        """Return the fixed point, and how the iteration ended."""

        def step(state: Any) -> Any:
            z, _, _, count = state
            new = [y.astype(x.dtype) for x, y in zip(z, self.f(inputs, z), strict=True)]
            change = [y - x for x, y in zip(z, new, strict=True)]
            norms = summed(self.P, real_inner(change, change, self.dtype), real_inner(new, new, self.dtype))
            limit = jnp.maximum(jnp.square(self.limits.tol) * norms[1], jnp.square(self.limits.atol))
            return new, norms[0], limit.astype(self.dtype), count + 1

        def goes_on(state: Any) -> Any:
            _, change, limit, count = state
            return (change > limit) & (count < self.limits.steps)

        start = (x0, jnp.asarray(jnp.inf, self.dtype), jnp.zeros((), self.dtype), jnp.zeros((), jnp.int32))
        z, change, limit, count = lax.while_loop(goes_on, step, start)
        return z, Info(change <= limit, count, jnp.sqrt(change))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(system: Iteration, inputs: Leaves, x0: Leaves) -> Any:
    return with_anchor(*system.iterate(inputs, x0))


def _forward(system: Iteration, inputs: Leaves, x0: Leaves) -> Any:
    first, anchor, rest, info = _solve(system, inputs, x0)
    return (first, anchor, rest, info), (inputs, [first, *rest])


def _backward(system: Iteration, residuals: Any, cotangents: Any) -> Any:
    """z = f(a, z), so dz = f_a da + J dz: with u = cotangent + J* u, the gradient by a is f_a* u."""
    inputs, z = residuals
    dz = cotangents_of(cotangents, z)
    fz, pullback = jax.vjp(lambda inputs, z: system.f.as_one(system.P.world, inputs, z), inputs, z)

    def adjoint(dz: Leaves, u: Leaves) -> Leaves:
        _, back = pullback([a.astype(b.dtype) for a, b in zip(u, fz, strict=True)])
        return [a + b for a, b in zip(dz, back, strict=True)]

    program, consts, _ = as_program(adjoint, dz, dz)
    (first, _, rest, _) = _solve(Iteration(system.P, program, system.limits, system.dtype), [*consts, *dz], dz)
    of_inputs, of_z = pullback([a.astype(b.dtype) for a, b in zip((first, *rest), fz, strict=True)])
    # Of x0, so that it has one on all workers, also where f has no inputs.
    of_inputs, of_x0 = tied_together((of_inputs, [jnp.zeros_like(leaf) for leaf in z]), of_z)
    return of_inputs, of_x0


_solve.defvjp(_forward, _backward)
