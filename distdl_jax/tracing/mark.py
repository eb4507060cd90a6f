"""`mark`: the identity, with a number that tells in a derivative's program whether a cotangent has come back to it.

That a movement has its adjoint run can't be read off the messages: those of two movements of equal plans are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax import Array
from jax.extend.core import Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

from distdl_jax.compat import linearize_at_once


def mark(x: Array, number: int) -> Array:
    """`x`; costs nothing in a compiled program."""
    marked: Array = _mark.bind(x, number=number, back=False)
    return marked


def is_mark(eqn: Any) -> bool:
    """Whether an equation is a mark."""
    return eqn.primitive is _mark


def marks_come_back(jaxpr: Any) -> Iterator[int]:
    """The numbers of those marks that have a cotangent in a derivative's program."""
    for eqn in jaxpr.eqns:
        if is_mark(eqn):
            if eqn.params["back"]:
                yield eqn.params["number"]
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from marks_come_back(inner)


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    return x, dx if type(dx) is ad.Zero else _mark.bind(dx, **params)


def _transposed(dy: Any, x: Any, *, number: int, back: bool) -> list[Any]:
    return [ad.Zero(x.aval) if type(dy) is ad.Zero else _mark.bind(dy, number=number, back=True)]


def _batched(args: Sequence[Any], dims: Sequence[int], **params: Any) -> tuple[Any, int]:
    return _mark.bind(*args, **params), dims[0]


_mark = Primitive("mark")
_mark.def_impl(lambda x, **_: x)
_mark.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_mark, lambda context, x, **_: [x])
ad.primitive_jvps[_mark] = _differentiated
linearize_at_once(_mark, _mark.bind)
ad.primitive_transposes[_mark] = _transposed
batching.primitive_batchers[_mark] = _batched
