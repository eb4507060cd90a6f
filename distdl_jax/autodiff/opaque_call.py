"""What a derivative gives, as one function to JAX: where it is differentiated again, all of it is, on every worker.

`jax.grad` of what `dj.jvp` or `dj.grad` returns would leave out the adjoint of a movement on a worker whose block is
empty there, since JAX makes constants of what is computed from it. So the program of a derivative is a function with a
derivative of its own, which JAX runs whole or not at all: that of the same program with its movements in a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from distdl_jax.partition import Partition
from distdl_jax.tracing.forward_mode_error import reverse_only
from distdl_jax.tracing.gradient_anchors import anchors_are_noted
from distdl_jax.tracing.gradient_chain import NO_LINK, Chain
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.traced import Traced
from distdl_jax.world import Transport


def called_by(partition: Partition | None, fun: Callable[..., Any], *args: Any) -> Any:
    """`fun(*args)`, by the workers of `partition`: default, all.

    - `fun`: a function, or a pytree that is one, like a pullback.
    """
    workers = Partition() if partition is None else partition
    a_tree = not jax.tree_util.all_leaves([fun])
    varies = not a_tree or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((fun, args)))
    if workers.size == 1 or not workers.active or anchors_are_noted() or not varies:
        return fun(*args)
    transport = workers.world.transport
    return called(transport, _call, fun, *args) if a_tree else called(transport, fun, *args)


def _call(fun: Callable[..., Any], *args: Any) -> Any:
    return fun(*args)


def called(transport: Transport, fun: Callable[..., Any], *args: Any) -> Any:
    """`fun(*args)`, in one piece where anything that it depends on may be differentiated."""
    traced = Traced(fun, args, {}, range(len(args)), as_call=True)
    return traced.result(evaluated(transport, traced.program, traced.leaves(args)))


def evaluated(transport: Transport, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """What `program` returns for `args`; what it holds from the trace around it is differentiated, too."""
    program, outer = _opened(program)
    values = [*outer, *args]
    varies = any(isinstance(value, Tracer) and _inexact(value) for value in values)
    if not varies or not Chain(transport, tied=True).concerns(program.jaxpr):
        return list(jaxpr_as_fun(program)(*values))
    return _bound(transport, program, [reverse_only(x) if _inexact(x) else x for x in map(jnp.asarray, values)])


def _opened(program: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The program whose first arguments are those of its constants that are of the trace around it, and these.

    The others are the same at every point: a derivative by them is nothing, and JAX refuses one by what a function
    with a derivative of its own holds.
    """
    jaxpr = program.jaxpr
    held = list(zip(jaxpr.constvars, program.consts, strict=True))
    outer = [(var, const) for var, const in held if isinstance(const, Tracer)]
    inner = [(var, const) for var, const in held if not isinstance(const, Tracer)]
    opened = jaxpr.replace(constvars=[var for var, _ in inner], invars=[*(var for var, _ in outer), *jaxpr.invars])
    return ClosedJaxpr(opened, [const for _, const in inner]), [const for _, const in outer]


def _bound(transport: Transport, program: ClosedJaxpr, values: list[Any]) -> list[Any]:
    varying = [_inexact(value) for value in values]

    def in_one_piece(*values: Any) -> list[Any]:
        return list(jaxpr_as_fun(program)(*values))

    def forward(*values: Any) -> tuple[list[Any], Any]:
        results, pullback = called(transport, lambda *values: _differentiated(transport, program, values), *values)
        return results, pullback

    def backward(pullback: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        given = [cotangent for cotangent in cotangents if cotangent.dtype != jax.dtypes.float0]
        found = iter(called(transport, _pulled_back, pullback, given))
        return tuple(next(found) if it_varies else None for it_varies in varying)

    as_one = jax.custom_vjp(in_one_piece)
    as_one.defvjp(forward, backward)
    # A `cond` must not get an index with a tangent, which JAX gives every result of what has a derivative of its own.
    return [x if _inexact(x) else jax.lax.stop_gradient(x) for x in as_one(*values)]


def _differentiated(transport: Transport, program: ClosedJaxpr, values: Sequence[Any]) -> tuple[list[Any], Any]:
    """What the program returns, and the pullback of its floating results and of its chain, to floating arguments."""
    varying = [value for value in values if _inexact(value)]

    def chained(varying: list[Array]) -> tuple[tuple[list[Any], list[Array]], list[Any]]:
        rest = iter(varying)
        given = [next(rest) if _inexact(value) else value for value in values]
        chain = Chain(transport, tied=True)
        links = chain.begin(given)
        results = chain.run(program, given, links)
        return ([x for x in results if _inexact(x)], links), results

    vjp: Any = jax.vjp(chained, varying, has_aux=True)
    return vjp[2], vjp[1]


def _pulled_back(pullback: Any, cotangents: list[Array]) -> list[Array]:
    # A cotangent of the chain, so that all of it runs whatever the results are.
    link = tie(jnp.zeros(NO_LINK.shape, NO_LINK.dtype), *cotangents)
    return list(pullback((cotangents, [link]))[0])


def _inexact(value: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(value), jnp.inexact))
