"""Marks in traced programs: identities that locate movements and layers, and reject unsupported transformations.

A movement is differentiated by its adjoint. JAX alone would reject `jax.jvp` and `jax.linear_transpose` with messages
about its internals; the marks at both ends of a movement tell what to call instead. The operations around one send, and
their purposes (`functional/movement.py` adds them):

| identity | without it |
|---|---|
| `tie` to the movement before, in a chain | adjoints could run in another order than on other workers |
| `reverse_only`, the mark of the start | readers don't know what is sent; `jax.jvp` is refused in JAX's words |
| `custom_vjp` | the transpose of the messages is not the adjoint |
| `jit` | an eager call compiles again |
| `custom_vmap` | n tensors travel in n messages |
| `tie` of a received array to the array before it | XLA drops a message whose result is not used |
| `sent_first` | a worker computes while others wait for what it is to send |
| `tie` of the anchor, an empty second result | the adjoint runs only where the output is used |
| `tie` of the residual to x | a cotangent is batched on some workers only |
| `never_transposed`, the mark of the end | transposing is refused in JAX's words |

The residual is separate from the anchor, for which `jax.checkpoint` would move the data again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import jax
from jax import Array
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from distdl_jax.errors import InvalidTypeError
from distdl_jax.jax_compat import linearize_at_once
from distdl_jax.tracing.adjoint_order import is_inexact
from distdl_jax.tracing.tie import tie

T = TypeVar("T")


def reverse_only(x: Array) -> Array:
    """Return `x`; evaluating its tangent, instead of transposing it, raises a `TypeError`."""
    return _reverse_only.bind(x)


def is_start_of_movement(eqn: Any) -> bool:
    """Return whether an equation of a traced program is the start of a movement, before its messages."""
    return eqn.primitive is _reverse_only


def never_transposed(y: Array) -> Array:
    """Return `y`, the result of a movement; transposing that itself, not its derivative, raises a `TypeError`."""
    return _never_transposed.bind(y)


def _refuse_transposition(*_: Any, **__: Any) -> NoReturn:
    raise InvalidTypeError(
        "JAX can't transpose a movement of data between workers by itself. Instead of jax.linear_transpose call "
        "dj.linear_transpose; instead of a jax.custom_jvp whose rule moves tangents write a jax.custom_vjp, whose "
        "backward rule moves cotangents; lax.custom_linear_solve needs symmetric=True."
    )


def _refuse_tangents(*_: Any, **__: Any) -> NoReturn:
    raise InvalidTypeError(_NO_TANGENTS.format("movement of data between workers"))


_NO_TANGENTS = (
    "jax.jvp (and jax.linearize, jax.jacfwd and jax.hessian, which use it) can't differentiate `fun` through a {}. Use "
    "dj.jvp(fun, primals, tangents), dj.linearize or dj.hvp, which have the same arguments; a Jacobian row by row is "
    "jax.jacrev. With diffrax and optimistix pass adjoint=RecursiveCheckpointAdjoint(), and don't use an implicit "
    "solver."
)


def refuse_forward_mode(error: Exception) -> None:
    """Explain JAX's error about forward mode through a custom_vjp, which some layers use."""
    if isinstance(error, TypeError) and "(jvp) to a custom_vjp function" in str(error):
        raise InvalidTypeError(_NO_TANGENTS.format("layer of distdl_jax")) from None


def identity(name: str, tangent: Primitive | None = None) -> Primitive:
    """Return an identity primitive; its derivative is `tangent`, or, by default, itself.

    Its parameters have no effect.
    """
    primitive = Primitive(name)

    def differentiated(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        (x,), (dx,) = primals, tangents
        assert tangent is not None
        return primitive.bind(x, **params), dx if type(dx) is ad.Zero else tangent.bind(dx, **params)

    primitive.def_abstract_eval(lambda x, **_: x)
    primitive.def_impl(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda context, x, **_: [x])
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (primitive.bind(*args, **params), dims[0])
    if tangent is None:
        ad.deflinear2(primitive, lambda cotangent, x, **_: [cotangent])
    else:
        ad.primitive_jvps[primitive] = differentiated
        linearize_at_once(primitive, tangent.bind)
    return primitive


_tangent = identity("tangent_of_a_movement")
_tangent.def_impl(_refuse_tangents)
mlir.register_lowering(_tangent, _refuse_tangents)
batching.primitive_batchers[_tangent] = _refuse_tangents  # as in jax.jacfwd
_reverse_only = identity("reverse_only", _tangent)

_never_transposed = identity("moved", identity("moved_tangent"))
ad.primitive_transposes[_never_transposed] = _refuse_transposition


def passed_to(layer: str, params: T) -> T:
    """Return the parameters of a call of a layer, marked with a description that is the same on all workers.

    Layers need not move their parameters, so messages don't reveal whose parameters a layer is called with.
    """
    leaves, structure = jax.tree.flatten(params)
    if not leaves or not isinstance(leaves[0], Tracer):
        return params
    passed: T = jax.tree.unflatten(structure, [_passed.bind(leaves[0], layer=layer), *leaves[1:]])
    return passed


def layer_called(eqn: Any) -> str | None:
    """Return the layer called by an equation, None if it is not such a call."""
    layer: str | None = eqn.params["layer"] if eqn.primitive is _passed else None
    return layer


_passed = identity("passed_to_layer", identity("tangent_of_a_parameter"))


def part_of_sum(y: Array) -> Array:
    """Return `y`, marked in a traced program as this worker's part of a sum over the workers."""
    return _part_of_sum.bind(y) if isinstance(y, Tracer) else y


def is_part_of_sum(eqn: Any) -> bool:
    """Return whether an equation is the mark of a worker's part of a sum over the workers."""
    return eqn.primitive is _part_of_sum


_part_of_sum = identity("part_of_sum")


def tied_to_params(y: Any, params: Any) -> Any:
    """Return a layer's output; if it is empty, it is made to depend on the empty parameters.

    Other workers compute theirs from the parameters. So if JAX differentiates what depends on y there, it does here.
    """
    if not isinstance(y, Array) or y.size:
        return y
    return tie(y, *(x for x in jax.tree.leaves(params) if isinstance(x, Tracer) and not x.size and is_inexact(x)))
