"""`reverse_only`: the identity, which JAX differentiates backward but not forward; `never_transposed`: which it does
not transpose.

A movement is differentiated by its adjoint. JAX alone would refuse `jax.jvp` and `jax.linear_transpose` with words
about its own parts; here it refuses with a sentence that says what to call instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from distdl_jax.compat import linearize_at_once
from distdl_jax.errors import InvalidTypeError


def reverse_only(x: Array) -> Array:
    """`x`; whoever evaluates its tangent, instead of transposing it, gets a `TypeError`."""
    return _reverse_only.bind(x)


def never_transposed(y: Array) -> Array:
    """`y`, what a movement gave; whoever transposes that itself, and not its derivative, gets a `TypeError`."""
    return _never_transposed.bind(y)


def _refuse_transposition(*_: Any, **__: Any) -> NoReturn:
    raise InvalidTypeError(
        "JAX can't transpose a movement of data between workers by itself. In place of jax.linear_transpose call "
        "dj.linear_transpose; in place of a jax.custom_jvp whose rule moves tangents write a jax.custom_vjp, whose "
        "backward rule moves cotangents; lax.custom_linear_solve must be told symmetric=True."
    )


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise InvalidTypeError(
        "jax.jvp (and jax.linearize, jax.jacfwd and jax.hessian, which use it) can't differentiate `fun` through a "
        "movement of data between workers. Use dj.jvp(fun, primals, tangents), dj.linearize or dj.hvp, which have the "
        "same arguments; a Jacobian row by row is jax.jacrev."
    )


def _differentiated(
    primitive: Primitive, tangent: Primitive, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    return primitive.bind(x), dx if type(dx) is ad.Zero else tangent.bind(dx)


def _batched(primitive: Primitive, args: Sequence[Any], dims: Sequence[int]) -> tuple[Any, int]:
    return primitive.bind(*args), dims[0]


def _identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = lambda args, dims: _batched(primitive, args, dims)
    return primitive


def _runs(primitive: Primitive) -> None:
    """It may be evaluated, and gives its argument."""
    primitive.def_impl(lambda x: x)
    mlir.register_lowering(primitive, lambda context, x: [x])


_reverse_only = _identity("reverse_only")
_runs(_reverse_only)

_tangent = _identity("tangent_of_a_movement")
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
ad.deflinear2(_tangent, lambda cotangent, x: [cotangent])
ad.primitive_jvps[_reverse_only] = partial(_differentiated, _reverse_only, _tangent)
linearize_at_once(_reverse_only, _tangent.bind)

_never_transposed = _identity("moved")
_runs(_never_transposed)
ad.primitive_transposes[_never_transposed] = _refuse_transposition

_moved_tangent = _identity("moved_tangent")
_runs(_moved_tangent)
ad.deflinear2(_moved_tangent, lambda cotangent, x: [cotangent])
ad.primitive_jvps[_never_transposed] = partial(_differentiated, _never_transposed, _moved_tangent)
linearize_at_once(_never_transposed, _moved_tangent.bind)
