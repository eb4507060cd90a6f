"""`reverse_only`: the identity, which JAX differentiates backward but not forward.

A movement is differentiated by its adjoint. JAX alone would refuse `jax.jvp` with words about its own parts; here it
refuses with a sentence that says what to call instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from distdl_jax.errors import InvalidTypeError


def reverse_only(x: Array) -> Array:
    """`x`; whoever evaluates its tangent, instead of transposing it, gets a `TypeError`."""
    return _reverse_only.bind(x)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise InvalidTypeError(
        "jax.jvp (and jax.linearize, jax.jacfwd and jax.hessian, which use it) can't differentiate `fun` through a "
        "movement of data between workers. Use dj.jvp(fun, primals, tangents), dj.linearize or dj.hvp, which have the "
        "same arguments; a Jacobian row by row is jax.jacrev."
    )


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    return _reverse_only.bind(x), dx if type(dx) is ad.Zero else _tangent.bind(dx)


def _batched(primitive: Primitive, args: Sequence[Any], dims: Sequence[int]) -> tuple[Any, int]:
    return primitive.bind(*args), dims[0]


def _identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = lambda args, dims: _batched(primitive, args, dims)
    return primitive


_reverse_only = _identity("reverse_only")
_reverse_only.def_impl(lambda x: x)
mlir.register_lowering(_reverse_only, mlir.lower_fun(lambda x: x, multiple_results=False))
ad.primitive_jvps[_reverse_only] = _differentiated

_tangent = _identity("tangent_of_a_movement")
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
ad.deflinear2(_tangent, lambda cotangent, x: [cotangent])
