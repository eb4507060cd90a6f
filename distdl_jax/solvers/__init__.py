"""Solvers of equations for tensors that are split over workers: all workers take the same steps.

An inner product or a norm is the sum over all workers, so each of them leaves a loop after the same step. The
derivative is that of the solution, not of the steps: it solves one more equation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.functional.block_checks import outside
from distdl_jax.functional.collectives import accumulation_dtype
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.solvers.equations import FixedPointEquation, Info, Limits, LinearEquation, as_program, solved
from distdl_jax.transports.agreement import agree, shape_dtype_of
from distdl_jax.validation import check_function, checked_integer, is_real

__all__ = ["Info", "cg", "fixed_point"]


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

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker of P_x, if an argument doesn't fit, or
    A or M returns something else than blocks like b.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> x, info = cg(lambda x: 4 * x, jnp.array([4.0, 8.0]), dj.Partition())
    >>> x.tolist(), bool(info.converged), int(info.steps)
    ([1.0, 2.0], True, 1)

    Source: Hestenes and Stiefel (1952); `jax.scipy.sparse.linalg.cg`, `jax.lax.custom_linear_solve`.
    """
    check_partitions(P_x=P_x)
    _check_functions(A=A, **({} if M is None else {"M": M}))
    limits = _checked_limits(tol, atol, maxiter)
    if not P_x.active:
        return _outside(P_x, "b", b)
    with jax.named_scope("cg"):
        b = jax.tree.map(jnp.asarray, b)
        x0 = jax.tree.map(jnp.zeros_like if x0 is None else jnp.asarray, b if x0 is None else x0)
        program, A_consts, Ab = as_program(A, b)
        preconditioner, M_consts, Mb = (None, [], b) if M is None else as_program(M, b)

        def check() -> None:
            _check_like("`A` must return blocks", Ab, "b", b)
            _check_like("`M` must return blocks", Mb, "b", b)
            _check_like("`x0` must be", x0, "b", b)

        dtype, elements = _agree_on_sizes(f"cg to {limits}{'' if M is None else ' with M'}", P_x, "b", b, check)
        limits = limits._replace(steps=10 * elements if maxiter is None else limits.steps)
        leaves, structure = jax.tree.flatten(b)
        equation = LinearEquation(P_x, limits, dtype, program, preconditioner)
        x, info = solved(equation, (A_consts, M_consts), jax.tree.leaves(x0), leaves)
        return jax.tree.unflatten(structure, x), info


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

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker of P_x, if an argument doesn't fit, or
    f returns something else than blocks like x0.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> z, info = fixed_point(lambda a, z: a * jnp.cos(z), 1.0, jnp.ones(2), dj.Partition(), tol=1e-6)
    >>> [round(float(each), 4) for each in z], bool(info.converged)
    ([0.7391, 0.7391], True)

    Source: Bai, Kolter and Koltun (2019), arXiv:1909.01377; Christianson (1994), on the derivative.
    """
    check_partitions(P_x=P_x)
    _check_functions(f=f)
    limits = _checked_limits(tol, atol, maxiter)
    if not P_x.active:
        return _outside(P_x, "x0", x0)
    with jax.named_scope("fixed_point"):
        params, x0 = jax.tree.map(jnp.asarray, (params, x0))
        program, consts, fz = as_program(f, params, x0)
        check = partial(_check_like, "`f` must return blocks", fz, "x0", x0)
        dtype, _ = _agree_on_sizes(f"fixed_point to {limits}", P_x, "x0", x0, check)
        leaves, structure = jax.tree.flatten(x0)
        z, info = solved(
            FixedPointEquation(P_x, limits, dtype, program), [*consts, *jax.tree.leaves(params)], leaves, []
        )
        return jax.tree.unflatten(structure, z), info


def _outside(P_x: Partition, name: str, tree: Any) -> tuple[Any, Info]:
    """Return what a worker gets that does not take part."""
    no_info = Info(jnp.zeros((), bool), jnp.zeros((), jnp.int32), jnp.zeros(()))
    return jax.tree.map(lambda leaf: outside(P_x.world, leaf, name), tree), no_info


def _agree_on_sizes(label: str, P: Partition, name: str, x: Any, check: Callable[[], None]) -> tuple[np.dtype, int]:
    """Return the dtype of inner products of the unknown `x`, an argument called `name`, and the number of its elements.

    All workers of P raise what `check` raises on any.
    """

    def contribute() -> list[ShapeDtype]:
        check()
        return [shape_dtype_of(name, leaf) for leaf in jax.tree.leaves(x)]

    contributions: dict[int, list[ShapeDtype]] = agree(P.world, P.ranks, f"{label} on {P.describe()}", contribute)
    if len(counts := {len(blocks) for blocks in contributions.values()}) > 1 or counts == {0}:
        raise InvalidArgumentError(
            f"`{name}` must be an array, or a tree with one leaf or more, as many on all workers, but workers give "
            f"{[len(blocks) for blocks in contributions.values()]}."
        )
    blocks = [block for worker_blocks in contributions.values() for block in worker_blocks]
    wrong = next((block for block in blocks if not jnp.issubdtype(block.dtype, jnp.inexact)), None)
    if wrong is not None:
        raise InvalidArgumentError(f"`{name}` must hold floating or complex numbers, but a worker gives {wrong}.")
    dtypes = [block.dtype for block in blocks if math.prod(block.shape)] or [blocks[0].dtype]
    real = np.dtype(jnp.finfo(np.dtype(jnp.result_type(*dtypes))).dtype)
    return accumulation_dtype(real), sum(math.prod(block.shape) for block in blocks)


def _check_like(argument: str, given: Any, name: str, x: Any) -> None:
    """Refuse what has not the structure, the shapes and the dtypes of `x`, an argument called `name`.

    `argument` says what it is: "`x0` must be", say.
    """

    def described(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: ShapeDtype(tuple(leaf.shape), np.dtype(leaf.dtype)), tree)

    def fits(got: Any, want: Any) -> bool:
        return bool(got.shape == want.shape and (got.dtype == want.dtype or got.size == 0))

    structures: list[Any] = [jax.tree.structure(tree) for tree in (given, x)]
    if structures[0] != structures[1] or not all(map(fits, jax.tree.leaves(given), jax.tree.leaves(x))):
        raise InvalidArgumentError(f"{argument} like `{name}`, {described(x)}, but is {described(given)}.")


def _check_functions(**functions: Any) -> None:
    """Refuse values that are not functions, a matrix above all."""
    for name, function in functions.items():
        if hasattr(function, "ndim"):
            raise InvalidTypeError(
                f"`{name}` (an array of shape {jnp.shape(function)}) must be a function of this worker's blocks."
            )
        check_function(name, function)


def _checked_limits(tol: Any, atol: Any, maxiter: Any) -> Limits:
    """Return the arguments that say when an iteration ends; refuse what are no numbers, 0 or more."""
    for name, value in {"tol": tol, "atol": atol}.items():
        if not is_real(value) or value < 0:
            raise InvalidArgumentError(f"`{name}` (={value!r}) must be a number, 0 or more, the same on all workers.")
    return Limits(float(tol), float(atol), math.inf if maxiter is None else checked_integer("maxiter", maxiter, 0))
