"""The result of a derivative as one function for JAX: a further derivative treats it as a whole, on every worker.

`jax.grad` of the result of `dj.jvp` or `dj.grad` would omit the adjoint of a movement on a worker whose block is empty
there, since JAX replaces everything computed from it by constants. So the program of a derivative is a function with a
custom derivative, which JAX runs as a whole or not at all: the derivative of the same program with its movements in a
chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from distdl_jax.kernels.dtypes import in_own_width
from distdl_jax.partitions.partition import Partition
from distdl_jax.tracing.adjoint_order import AdjointOrder, anchors_are_noted, first_link, is_inexact
from distdl_jax.tracing.jaxprs import OperationReader
from distdl_jax.tracing.marks import reverse_only
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.traced import Traced


def call_by(partition: Partition | None, fun: Callable[..., Any], *args: Any) -> Any:
    """Return `fun(*args)`, computed by the workers of `partition`: by default, all.

    - `fun`: a function, or a callable pytree, like a pullback.
    """
    workers = Partition() if partition is None else partition
    is_tree = not jax.tree_util.all_leaves([fun])
    varies = not is_tree or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((fun, args)))
    if workers.size == 1 or not workers.active or anchors_are_noted() or not varies:
        return fun(*args)
    transport = workers.world.transport
    return _call(transport, _apply, fun, *args) if is_tree else _call(transport, fun, *args)


def _apply(fun: Callable[..., Any], *args: Any) -> Any:
    return fun(*args)


def _call(transport: OperationReader, fun: Callable[..., Any], *args: Any) -> Any:
    """Return `fun(*args)`, opaque if any of its dependencies may be differentiated."""
    traced = Traced(fun, args, {}, range(len(args)), as_call=True)
    return traced.result(evaluate_opaquely(transport, traced.program, traced.leaves(args)))


def evaluate_opaquely(transport: OperationReader, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Return the results of `program`; its constants from the trace around it are differentiated, too."""
    program, outer = with_constants_as_arguments(program)
    values = [*outer, *args]
    varies = any(isinstance(value, Tracer) and is_inexact(value) for value in values)
    if not varies or not AdjointOrder(transport, tied=True).concerns(program.jaxpr.eqns):
        return list(jaxpr_as_fun(program)(*values))
    return _bind(transport, program, [reverse_only(x) if is_inexact(x) else x for x in map(jnp.asarray, values)])


def with_constants_as_arguments(program: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Return the program with its constants from the trace around it as its first arguments, and these constants.

    The other constants are the same at every point: they have no derivative, and JAX rejects one with respect to the
    constants of a function with a custom derivative.
    """
    jaxpr = program.jaxpr
    constants = list(zip(jaxpr.constvars, program.consts, strict=True))
    outer = [(var, const) for var, const in constants if isinstance(const, Tracer)]
    inner = [(var, const) for var, const in constants if not isinstance(const, Tracer)]
    opened = jaxpr.replace(constvars=[var for var, _ in inner], invars=[*(var for var, _ in outer), *jaxpr.invars])
    return ClosedJaxpr(opened, [const for _, const in inner]), [const for _, const in outer]


def _bind(transport: OperationReader, program: ClosedJaxpr, values: list[Any]) -> list[Any]:
    inexact = [is_inexact(value) for value in values]

    def opaque_call(*values: Any) -> list[Any]:  # `jaxprs.OPAQUE_CALL`
        return list(jaxpr_as_fun(program)(*values))

    def forward(*values: Any) -> tuple[list[Any], Any]:
        results, pullback = _call(transport, lambda *values: _differentiate(transport, program, values), *values)
        return results, pullback

    def backward(pullback: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        of_results = [cotangent for cotangent in cotangents if cotangent.dtype != jax.dtypes.float0]
        found = iter(_call(transport, _pull_back, pullback, of_results))
        return tuple(next(found) if differentiated else None for differentiated in inexact)

    as_one = jax.custom_vjp(opaque_call)
    as_one.defvjp(in_own_width(forward), in_own_width(backward))
    # A `cond` must not get an index with a tangent, as JAX gives all results of functions with custom derivatives.
    return [x if is_inexact(x) else jax.lax.stop_gradient(x) for x in as_one(*values)]


def _differentiate(transport: OperationReader, program: ClosedJaxpr, values: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the program's results, and the pullback of the floating ones and of its chain, to floating arguments."""

    def chained(varying: list[Array]) -> tuple[tuple[list[Any], list[Array]], list[Any]]:
        rest = iter(varying)
        args = [next(rest) if is_inexact(value) else value for value in values]
        results, links = AdjointOrder(transport, tied=True).evaluate(program, args)
        return ([x for x in results if is_inexact(x)], links), results

    vjp: Any = jax.vjp(chained, [value for value in values if is_inexact(value)], has_aux=True)
    return vjp[2], vjp[1]


def _pull_back(pullback: Any, cotangents: list[Array]) -> list[Array]:
    # A cotangent of the chain, so that all of it runs whatever the results are.
    return list(pullback((cotangents, [tie(first_link(), *cotangents)]))[0])
