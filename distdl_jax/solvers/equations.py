"""Equations whose unknown is split over workers: an iteration, and the implicit derivative of the solution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from distdl_jax.functional.all_sum_reduce import plan_all_sum_reduce
from distdl_jax.kernels.dtypes import in_own_width
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.adjoint_order import is_inexact, note_anchor, order_after_previous
from distdl_jax.tracing.marks import never_transposed, reverse_only
from distdl_jax.tracing.scopes import body_scope
from distdl_jax.tracing.tie import nothing, tie
from distdl_jax.tracing.traced import Traced
from distdl_jax.transforms.opaque_call import evaluate_opaquely, with_constants_as_arguments

Leaves = list[Any]


class Info(NamedTuple):
    """The outcome of an iteration, the same on all participating workers; without a derivative.

    - `converged`: whether the tolerance was reached.
    - `steps`: the number of steps.
    - `residual`: the norm to compare with the tolerance.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> x, info = dj.solvers.cg(lambda x: 2 * x, jnp.ones(3), P)
    >>> bool(info.converged), int(info.steps)
    (True, 1)
    """

    converged: Array
    steps: Array
    residual: Array


class Limits(NamedTuple):
    """The end of an iteration: at a tolerance relative to a norm, at an absolute one, or after a number of steps."""

    tol: float
    atol: float
    steps: float


def as_program(fun: Callable[..., Any], *args: Any) -> tuple[Traced, Leaves, Any]:
    """Return `fun`, traced as a program of the leaves of `args`, its closure, and its result's shapes.

    The program is static to JAX. Closure values that may be differentiated become its first arguments.
    """
    traced = Traced(fun, args, {}, range(len(args)))
    traced.program, consts = with_constants_as_arguments(traced.program)
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.program.out_avals]
    return traced, [jnp.asarray(const) for const in consts], traced.result(avals)


def _run(fun: Traced, consts: Leaves, *args: Leaves, whole_in: Any = None) -> Leaves:
    """Return the leaves of a program's result; with a world, differentiated as a whole or not at all, everywhere."""
    leaves = [*consts, *jax.tree.leaves(args)]
    with body_scope():
        if whole_in is None:
            return jax.tree.leaves(fun.result(jaxpr_as_fun(fun.program)(*leaves)))
        return jax.tree.leaves(fun.result(evaluate_opaquely(whole_in.transport, fun.program, leaves)))


@dataclass(frozen=True, eq=False)
class Equation:
    """The static parts of an equation: its workers, when its iteration ends, and the dtype of inner products."""

    P: Partition
    limits: Limits
    dtype: np.dtype

    def inner(self, xs: Sequence[Array], ys: Sequence[Array]) -> Array:
        """Return this worker's part of the real part of <x, y>."""

        def parts(x: Array) -> list[Array]:
            return [part.astype(self.dtype) for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]

        pairs = (pair for x, y in zip(xs, ys, strict=True) for pair in zip(parts(x), parts(y), strict=True))
        return sum((jnp.vdot(a, b, precision=lax.Precision.HIGHEST) for a, b in pairs), jnp.zeros((), self.dtype))

    def summed(self, *values: Array) -> Array:
        """Return the sums over the workers of several numbers, in one message.

        Without an agreement: JAX may trace more of a derivative on one worker than on another.
        """
        numbers = jnp.stack(values)
        known = dict.fromkeys(self.P.ranks, ShapeDtype(numbers.shape, np.dtype(numbers.dtype)))
        sums: Array = plan_all_sum_reduce(known, self.P, axes_keep=()).run(self.P.world, numbers)
        return sums

    def limit(self, square: Array) -> Array:
        """Return the limit for a squared norm at which the iteration ends, from the squared norm it is relative to."""
        limit = jnp.maximum(jnp.square(self.limits.tol) * square, jnp.square(self.limits.atol))
        return limit.astype(self.dtype)


@dataclass(frozen=True, eq=False)
class LinearEquation(Equation):
    """A x = b with a Hermitian, positive definite A, and optionally a preconditioner M."""

    A: Traced
    M: Traced | None

    def iterate(self, consts: tuple[Leaves, Leaves], x0: Leaves, b: Leaves) -> tuple[Leaves, Info]:
        """Return the solution, and the outcome of the iteration; as JAX's, step by step."""
        A_consts, M_consts = consts

        def plus(x: Leaves, factor: Any, y: Leaves) -> Leaves:
            return [(a + factor * c).astype(a.dtype) for a, c in zip(x, y, strict=True)]

        def preconditioned(r: Leaves, *others: Array) -> tuple[Leaves, Array]:
            """Return z = M r, and the sums <r, r>, <r, z>, and others."""
            if self.M is None:
                sums = self.summed(self.inner(r, r), *others)
                return r, jnp.concatenate([sums[:1], sums])
            z = _like(_run(self.M, M_consts, r), r)
            return z, self.summed(self.inner(r, r), self.inner(r, z), *others)

        def step(state: Any) -> Any:
            x, r, p, square, gamma, count = state
            Ap = _like(_run(self.A, A_consts, p), p)
            alpha = gamma / self.summed(self.inner(p, Ap))[0]
            x, r = plus(x, alpha, p), plus(r, -alpha, Ap)
            z, (square, new) = preconditioned(r)
            return x, r, plus(z, new / gamma, p), square, new, count + 1

        r = plus(b, -1, _like(_run(self.A, A_consts, x0), x0))
        z, (square, gamma, b_square) = preconditioned(r, self.inner(b, b))
        limit = self.limit(b_square)
        start = (x0, r, z, square, gamma, jnp.zeros((), jnp.int32))
        x, _, _, square, _, count = lax.while_loop(lambda s: (s[3] > limit) & (s[5] < self.limits.steps), step, start)
        return x, Info(square <= limit, count, jnp.sqrt(square))

    def pull_back(self, consts: tuple[Leaves, Leaves], x: Leaves, dx: Leaves) -> Any:
        """A x = b, so A dx = db - dA x. JAX's cotangents are not conjugated, so A's transpose is its conjugate."""
        A_consts, M_consts = consts
        dx = [leaf.conj() for leaf in dx]
        first, _, rest, _ = _solve(self, (A_consts, M_consts), [jnp.zeros_like(leaf) for leaf in dx], dx)
        db = [leaf.conj() for leaf in (first, *rest)]
        # By x, too, so that there is a derivative on all workers, even if A has no closure.
        _, pullback = jax.vjp(lambda A_consts, x: _run(self.A, A_consts, x, whole_in=self.P.world), A_consts, x)
        A_cotangents, x_cotangents = pullback([-leaf for leaf in db])
        A_cotangents, db = _tied_together((A_cotangents, db), x_cotangents)
        return (A_cotangents, None), None, db


@dataclass(frozen=True, eq=False)
class FixedPointEquation(Equation):
    """z = f(a, z), with f a program of its inputs a and z."""

    f: Traced

    def iterate(self, inputs: Leaves, x0: Leaves, _: Leaves) -> tuple[Leaves, Info]:
        """Return the fixed point, and the outcome of the iteration."""

        def step(state: Any) -> Any:
            z, _, _, count = state
            new = _like(_run(self.f, inputs, z), z)
            change = [y - x for x, y in zip(z, new, strict=True)]
            norms = self.summed(self.inner(change, change), self.inner(new, new))
            return new, norms[0], self.limit(norms[1]), count + 1

        start = (x0, jnp.asarray(jnp.inf, self.dtype), jnp.zeros((), self.dtype), jnp.zeros((), jnp.int32))
        z, change, limit, count = lax.while_loop(lambda s: (s[1] > s[2]) & (s[3] < self.limits.steps), step, start)
        return z, Info(change <= limit, count, jnp.sqrt(change))

    def pull_back(self, inputs: Leaves, z: Leaves, dz: Leaves) -> Any:
        """z = f(a, z), so dz = f_a da + J dz: with u = cotangent + J* u, the gradient by a is f_a* u."""
        fz, pullback = jax.vjp(lambda inputs, z: _run(self.f, inputs, z, whole_in=self.P.world), inputs, z)

        def adjoint(dz: Leaves, u: Leaves) -> Leaves:
            _, back = pullback(_like(u, fz))
            return [a + b for a, b in zip(dz, back, strict=True)]

        program, consts, _ = as_program(adjoint, dz, dz)
        first, _, rest, _ = _solve(FixedPointEquation(self.P, self.limits, self.dtype, program), [*consts, *dz], dz, [])
        input_cotangents, z_cotangents = pullback(_like((first, *rest), fz))
        # Of x0, so that there is one on all workers, even if f has no inputs.
        both = input_cotangents, [jnp.zeros_like(leaf) for leaf in z]
        return *_tied_together(both, z_cotangents), []


def _like(values: Sequence[Array], others: Sequence[Array]) -> Leaves:
    """Return arrays in the dtypes of others."""
    return [value.astype(other.dtype) for value, other in zip(values, others, strict=True)]


# --- solutions, which are differentiated as a whole -------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(equation: Any, consts: Any, x0: Leaves, b: Leaves) -> tuple[Array, Array, Leaves, Info]:
    """Return the solution, whose first leaf comes with the anchor of the whole, and the outcome of the iteration."""
    leaves, info = equation.iterate(consts, x0, b)
    return leaves[0], tie(nothing(leaves[0].dtype), *leaves), leaves[1:], info


def _forward(equation: Any, consts: Any, x0: Leaves, b: Leaves) -> Any:
    first, anchor, rest, info = _solve(equation, consts, x0, b)
    return (first, anchor, rest, info), (consts, [first, *rest])


def _backward(equation: Any, residuals: Any, cotangents: Any) -> Any:
    consts, x = residuals
    first, anchor_cotangent, rest, _ = cotangents
    dx = _like((first, *rest), x)
    return equation.pull_back(consts, x, [tie(dx[0], anchor_cotangent), *dx[1:]])


_solve.defvjp(in_own_width(_forward), in_own_width(_backward))


def solved(equation: Equation, *args: Any) -> tuple[Leaves, Info]:
    """Return the solution of an equation, from its constants, its start and its right-hand side.

    To `dj.grad` it is one movement: the second result of `_solve` is an anchor. The last argument with leaves is
    ordered after the previous movement.
    """
    consts, x0, b = jax.tree.map(lambda x: reverse_only(x) if is_inexact(x) else x, args)
    last = b or x0
    last[0] = order_after_previous(last[0])
    with body_scope():
        first, anchor, rest, info = _solve(equation, consts, x0, b)
    note_anchor(anchor)
    return [never_transposed(x) for x in (first, *rest)], Info(*map(lax.stop_gradient, info))


def _tied_together(cotangents: Any, *others: Any) -> Any:
    """Return `cotangents`, each of which depends on all of them, and on `others`, by zero.

    So if any of it is differentiated again on some worker, all of it is, as on the others.
    """

    def is_tied(x: Any) -> bool:
        return x.dtype != jax.dtypes.float0 and is_inexact(x)

    inexact = list(filter(is_tied, jax.tree.leaves((cotangents, others))))
    anchor = tie(nothing(inexact[0].dtype), *inexact)
    return jax.tree.map(lambda x: tie(x, anchor) if is_tied(x) else x, cotangents)
