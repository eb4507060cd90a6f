"""Conjugate gradients for equations with a Hermitian, positive definite operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.partition import Partition, check_partitions
from distdl_jax.primitives.block_checks import outside
from distdl_jax.solvers.iteration import (
    Info,
    Leaves,
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


def cg(
    A: Callable[[Any], Any],
    b: Any,
    P_x: Partition,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Callable[[Any], Any] | None = None,
) -> tuple[Any, Info]:
    """Solve A x = b by conjugate gradients, where x and b are split over workers: `jax.scipy.sparse.linalg.cg`.

    In each step A is applied once, and two numbers (with `M` three) are summed over all workers, in two messages. So
    all take the same steps, those that plain JAX takes on one worker.

    The derivative is implicit, as in JAX. Backward, A y = (the cotangent of x) is solved, by the same iteration: y is
    the cotangent of b, and -y times the derivative of A x that of all arrays which A closes over. It is as exact as
    the two solutions are. Derivatives of any order, in reverse mode and by `dj.jvp` and `dj.hvp`, go the same way.

    **Arguments:**

    - `A`: a linear function, Hermitian and positive definite as a map of the whole tensor: from this worker's blocks to
      this worker's blocks, of the same structure, shapes and dtypes. It may move data: a halo exchange, a layer.
    - `b`: this worker's blocks, an array or a tree of arrays; real or complex, blocks may be uneven and empty. Nothing
      in it may be a copy of what another worker holds. Elsewhere zero-volume arrays.
    - `P_x`: the workers that take part: those of b, and all others that A moves data to.
    - `x0`: where the iteration begins, like b. Default: zeros. It has no derivative.
    - `tol`, `atol`: it ends where the norm of b - A x is at most max(tol times the norm of b, atol). Numbers, the same
      on all workers.
    - `maxiter`: the largest number of steps. Default: ten times the number of elements of b.
    - `M`: a preconditioner, a function as `A` is, that is close to A's inverse. It has no derivative.

    **Returns:** `(x, info)`: this worker's blocks of x, like b, whether it has converged or not; `info.converged`,
    `info.steps` and `info.residual`, the norm of b - A x, are the same on all workers of P_x. Outside P_x, b and zeros.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker of P_x, where an argument doesn't fit, or
    A or M returns something else than blocks like b.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> x, info = cg(lambda x: 4 * x, jnp.array([4.0, 8.0]), dj.Partition())
    >>> x.tolist(), bool(info.converged), int(info.steps)
    ([1.0, 2.0], True, 1)

    Source: Hestenes and Stiefel (1952); `jax.scipy.sparse.linalg.cg`, `jax.lax.custom_linear_solve`.
    """
    check_partitions(P_x=P_x)
    check_functions(A=A, **({} if M is None else {"M": M}))
    limits = checked_limits(tol, atol, maxiter)
    if not P_x.active:
        return jax.tree.map(lambda leaf: outside(P_x.world, leaf, "b"), b), nobody()
    with jax.named_scope("cg"):
        b = jax.tree.map(jnp.asarray, b)
        x0 = jax.tree.map(jnp.zeros_like, b) if x0 is None else jax.tree.map(jnp.asarray, x0)
        program, of_A, Ab = as_program(A, b)
        preconditioner, of_M, Mb = (None, [], b) if M is None else as_program(M, b)

        def check() -> None:
            for argument, given in {
                "`A` must return what is": Ab,
                "`M` must return what is": Mb,
                "`x0` must be": x0,
            }.items():
                check_like(argument, given, "b", b)

        label = f"cg to {limits}{'' if M is None else ' with M'}"
        sizes = agree_on_sizes(label, P_x, "b", b, check)
        steps = 10 * sizes.elements if limits.steps is None else limits.steps
        system = System(P_x, program, preconditioner, limits.tol, limits.atol, steps, sizes.dtype)
        leaves, structure = jax.tree.flatten(b)
        x, info = solved(_solve, system, (of_A, of_M), jax.tree.leaves(x0), leaves)
        return jax.tree.unflatten(structure, x), info


@dataclass(frozen=True, eq=False)
class System:
    """All that is static of an equation, and how to solve it.

    - `A`, `M`: the operator and the preconditioner, as programs.
    - `steps`: the largest number of steps.
    - `dtype`: of inner products.
    """

    P: Partition
    A: Program
    M: Program | None
    tol: float
    atol: float
    steps: int
    dtype: np.dtype

    def iterate(self, of_A: Leaves, of_M: Leaves, x0: Leaves, b: Leaves) -> tuple[Leaves, Info]:
        """Return the solution, and how the iteration ended; as JAX's, step by step."""

        def applied(program: Program, consts: Leaves, x: Leaves) -> Leaves:
            return [y.astype(like.dtype) for y, like in zip(program(consts, x), x, strict=True)]

        def plus(x: Leaves, factor: Any, y: Leaves) -> Leaves:
            return [(a + factor * c).astype(a.dtype) for a, c in zip(x, y, strict=True)]

        def inner(x: Leaves, y: Leaves) -> Array:
            return real_inner(x, y, self.dtype)

        def preconditioned(r: Leaves, *others: Array) -> tuple[Leaves, Array]:
            """Return z = M r, and the sums <r, r>, <r, z>, and others."""
            if self.M is None:
                sums = summed(self.P, inner(r, r), *others)
                return r, jnp.concatenate([sums[:1], sums])
            z = applied(self.M, of_M, r)
            return z, summed(self.P, inner(r, r), inner(r, z), *others)

        def step(state: Any) -> Any:
            x, r, p, square, gamma, count = state
            Ap = applied(self.A, of_A, p)
            alpha = gamma / summed(self.P, inner(p, Ap))[0]
            x, r = plus(x, alpha, p), plus(r, -alpha, Ap)
            z, (square, new) = preconditioned(r)
            return x, r, plus(z, new / gamma, p), square, new, count + 1

        r = plus(b, -1, applied(self.A, of_A, x0))
        z, (square, gamma, of_b) = preconditioned(r, inner(b, b))
        limit = jnp.maximum(jnp.square(self.tol) * of_b, jnp.square(self.atol)).astype(self.dtype)
        start = (x0, r, z, square, gamma, jnp.zeros((), jnp.int32))
        x, _, _, square, _, count = lax.while_loop(lambda s: (s[3] > limit) & (s[5] < self.steps), step, start)
        return x, Info(square <= limit, count, jnp.sqrt(square))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(system: System, consts: tuple[Leaves, Leaves], x0: Leaves, b: Leaves) -> Any:
    return with_anchor(*system.iterate(*consts, x0, b))


def _forward(system: System, consts: tuple[Leaves, Leaves], x0: Leaves, b: Leaves) -> Any:
    first, anchor, rest, info = _solve(system, consts, x0, b)
    return (first, anchor, rest, info), (consts, [first, *rest])


def _backward(system: System, residuals: Any, cotangents: Any) -> Any:
    """A x = b, so A dx = db - dA x. JAX's cotangents are not conjugated, so A's transpose is its conjugate."""
    (of_A, of_M), x = residuals
    dx = [leaf.conj() for leaf in cotangents_of(cotangents, x)]
    first, _, rest, _ = _solve(system, (of_A, of_M), [jnp.zeros_like(leaf) for leaf in dx], dx)
    db = [leaf.conj() for leaf in (first, *rest)]
    # By x, too: so there is a derivative on all workers, also where A closes over nothing.
    _, pullback = jax.vjp(lambda of_A, x: system.A.as_one(system.P.world, of_A, x), of_A, x)
    of_A, of_x = pullback([-leaf for leaf in db])
    of_A, db = tied_together((of_A, db), of_x)
    return (of_A, None), None, db


_solve.defvjp(_forward, _backward)
