"""Solvers of equations for split tensors: all workers take the same steps.

Inner products and norms are sums over all workers, so all of them leave a loop after the same step. The derivative is
the solution's, not the steps': it takes the solution of one more equation.
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
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.solvers.equations import FixedPointEquation, Info, Limits, LinearEquation, as_program, solved
from distdl_jax.transports.agreement import agree, shape_dtype_of
from distdl_jax.validation import check_function, checked_integer, is_real

__all__ = ["Info", "cg", "fixed_point"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


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
    """Solve A x = b by conjugate gradients, with x and b split over workers: `jax.scipy.sparse.linalg.cg`.

    Each step applies A once, and sums two numbers (with `M` three) over all workers, in two messages. So all take the
    same steps, equal to those of plain JAX on one worker.

    The derivative is implicit, as in JAX. In the backward pass, A y = (the cotangent of x) is solved, by the same
    iteration: y is the cotangent of b, and -y times the derivative of A x the cotangent of the arrays in A's closure.
    It is as exact as the two solutions are. Derivatives of any order, in reverse mode and by `dj.jvp` and `dj.hvp`, are
    computed in the same way.

    **Arguments:**

    - `A`: a linear function, Hermitian and positive definite as a map of the whole tensor: from this worker's blocks to
      this worker's blocks, of the same structure, shapes and dtypes. It may communicate: a halo exchange, a layer.
    - `b`: this worker's blocks, an array or a tree of arrays; real or complex, blocks may be uneven and empty. None of
      it may be a copy of another worker's entries. Elsewhere zero-volume arrays.
    - `P_x`: the participating workers: those of b, and all others to which A moves data.
    - `x0`: the start of the iteration, like b. Default: zeros. It is not differentiated.
    - `tol`, `atol`: the iteration ends when the norm of b - A x is at most max(tol times the norm of b, atol). Numbers,
      the same on all workers.
    - `maxiter`: the maximum number of steps. Default: ten times the number of elements of b.
    - `M`: a preconditioner, a function like `A` that approximates A's inverse. It is not differentiated.

    **Returns:** `(x, info)`: this worker's blocks of x, like b, even if not converged; `info.converged`, `info.steps`
    and `info.residual`, the norm of b - A x, are the same on all workers of P_x. Outside P_x, b and zeros.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker of P_x, if an argument is invalid, or A or
    M does not return blocks like b.

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
    """Solve z = f(params, z) by z <- f(params, z), with z split over workers: a deep equilibrium model.

    Each step applies f once, and sums two numbers over all workers, in one message; so all of them take the same steps.
    All communication of f is repeated in each step, including broadcasts of weights.

    The derivative is implicit. With J the derivative of f by z at the solution, u = (the cotangent of z) + J* u is
    solved in the backward pass, by the same iteration, to the same tolerance; u times the derivative of f by `params`
    is the gradient. The steps are not stored. It is as exact as both solutions are. Derivatives of any order, in
    reverse mode and by `dj.jvp` and `dj.hvp`, are computed in the same way.

    **Arguments:**

    - `f`: a function of `params` and of z, this worker's blocks of both; it returns blocks like z, of the same
      structure, shapes and dtypes. The iteration converges if f is a contraction, as a map of the whole tensor. It may
      communicate, and close over arrays, which are differentiated like `params`.
    - `params`: this worker's parameters, any pytree.
    - `x0`: this worker's blocks of the initial z, an array or a tree of arrays; floating or complex, blocks may be
      uneven and empty. None of it may be a copy of another worker's entries. It is not differentiated. Elsewhere
      zero-volume arrays.
    - `P_x`: the participating workers: those of z, and all others to which f moves data, or from which it moves
      parameters.
    - `tol`, `atol`: the iteration ends when the norm of the last change of z is at most max(tol times the norm of z,
      atol). Numbers, the same on all workers.
    - `maxiter`: the maximum number of steps, for each of the forward and the backward pass.

    **Returns:** `(z, info)`: this worker's blocks of z, like x0, even if not converged; `info.converged`, `info.steps`
    and `info.residual`, the norm of the last change, are the same on all workers of P_x. Outside P_x, x0 and zeros.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker of P_x, if an argument is invalid, or f
    does not return blocks like x0.

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
    """Return the result on a worker that takes no part."""
    no_info = Info(jnp.zeros((), bool), jnp.zeros((), jnp.int32), jnp.zeros(()))
    return jax.tree.map(lambda leaf: outside(P_x.world, leaf, name), tree), no_info


def _agree_on_sizes(label: str, P: Partition, name: str, x: Any, check: Callable[[], None]) -> tuple[np.dtype, int]:
    """Return the dtype of inner products of the unknown `x`, an argument called `name`, and the number of its elements.

    All workers of P raise the error that `check` raises on any.
    """

    def contribute() -> list[ShapeDtype]:
        check()
        return [shape_dtype_of(name, leaf) for leaf in jax.tree.leaves(x)]

    contributions: dict[int, list[ShapeDtype]] = agree(P.world, P.ranks, f"{label} on {P.describe()}", contribute)
    if len(counts := {len(blocks) for blocks in contributions.values()}) > 1 or counts == {0}:
        raise InvalidArgumentError(
            f"`{name}` must be an array, or a tree with one leaf or more, the same number on all workers, but workers "
            f"pass {[len(blocks) for blocks in contributions.values()]}."
        )
    blocks = [block for worker_blocks in contributions.values() for block in worker_blocks]
    wrong = next((block for block in blocks if not jnp.issubdtype(block.dtype, jnp.inexact)), None)
    if wrong is not None:
        raise InvalidArgumentError(f"`{name}` must hold floating or complex numbers, but a worker passes {wrong}.")
    dtypes = [block.dtype for block in blocks if math.prod(block.shape)] or [blocks[0].dtype]
    real = np.dtype(jnp.finfo(np.dtype(jnp.result_type(*dtypes))).dtype)
    return accumulation_dtype(real), sum(math.prod(block.shape) for block in blocks)


def _check_like(argument: str, given: Any, name: str, x: Any) -> None:
    """Reject a tree without the structure, the shapes and the dtypes of `x`, an argument called `name`.

    `argument` is the beginning of the error, such as "`x0` must be".
    """

    def described(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: ShapeDtype(tuple(leaf.shape), np.dtype(leaf.dtype)), tree)

    def fits(got: Any, want: Any) -> bool:
        return bool(got.shape == want.shape and (got.dtype == want.dtype or got.size == 0))

    structures: list[Any] = [jax.tree.structure(tree) for tree in (given, x)]
    if structures[0] != structures[1] or not all(map(fits, jax.tree.leaves(given), jax.tree.leaves(x))):
        raise InvalidArgumentError(f"{argument} like `{name}`, {described(x)}, but is {described(given)}.")


def _check_functions(**functions: Any) -> None:
    """Reject values that are not functions, in particular matrices."""
    for name, function in functions.items():
        if hasattr(function, "ndim"):
            raise InvalidTypeError(
                f"`{name}` (an array of shape {jnp.shape(function)}) must be a function of this worker's blocks."
            )
        check_function(name, function)


def _checked_limits(tol: Any, atol: Any, maxiter: Any) -> Limits:
    """Return the arguments that determine the end of an iteration; reject any that are not numbers, 0 or more."""
    for name, value in {"tol": tol, "atol": atol}.items():
        if not is_real(value) or value < 0:
            raise InvalidArgumentError(f"`{name}` (={value!r}) must be a number, 0 or more, the same on all workers.")
    return Limits(float(tol), float(atol), math.inf if maxiter is None else checked_integer("maxiter", maxiter, 0))
