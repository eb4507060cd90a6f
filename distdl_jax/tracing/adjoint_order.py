"""The order of adjoints: all workers run the adjoints of the same movements, in the reverse order of the movements.

JAX runs the adjoint of a movement on a worker only if, on that worker, the movement's input is differentiated and its
output used. A block without elements, a constant or a loss that ignores an output would make the others wait for ever.

- An *anchor* is an empty second result of each movement. The differentiated value is made to depend on all anchors.
- A *chain* is for programs in which that does not suffice: there every movement depends on the previous one. In loops,
  branches, `jax.checkpoint` and nested jits, whose values can't be used outside, it is an additional argument and
  result.

A function that can't be traced gets both while it runs (`with_all_adjoints`); a traced program is evaluated again
(`AdjointOrder`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, get_opaque_trace_state, jaxpr_as_fun

from distdl_jax.jax_compat import at_line_of, bound_again, constant_arguments, name_and_params
from distdl_jax.tracing.context import Anchors, trace_context
from distdl_jax.tracing.jaxprs import (
    Branches,
    Call,
    OperationReader,
    Scan,
    custom_vjp,
    equations,
    evaluate,
    is_opaque_call,
    structure,
)
from distdl_jax.tracing.scopes import body_scope
from distdl_jax.tracing.tie import tie

NO_LINK = jax.ShapeDtypeStruct((0,), jnp.float32)
"""The chain in a body's arguments and results: an array without elements."""


def first_link() -> Array:
    """Return a chain that depends on nothing."""
    return jnp.zeros(NO_LINK.shape, NO_LINK.dtype)


def is_inexact(x: Any) -> bool:
    """Return whether a value is floating or complex, and so differentiable."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


# --- functions that run -----------------------------------------------------------------------------------------------


def note_anchor(anchor: Array) -> None:
    """Record the anchor of a movement in the innermost collection, if it was made at the level of its function.

    Values made inside a loop or a nested jit can't be used outside of it.
    """
    if (anchors := _anchors_here()) is not None:
        anchors.found.append(anchor)
        if anchors.link is not None:
            anchors.link = tie(anchors.link, anchor)


def anchors_are_noted() -> bool:
    """Return whether tracing is at the level of a function whose anchors are collected."""
    return _anchors_here() is not None


def _anchors_here() -> Anchors | None:
    anchors = trace_context.anchors
    return anchors if anchors is not None and anchors.trace == get_opaque_trace_state() else None


def order_after_previous(x: Array) -> Array:
    """Return `x`, which is about to move: if anchors form a chain, it depends on the previous movement."""
    anchors = _anchors_here()
    return x if anchors is None or anchors.link is None else tie(x, anchors.link)


def with_all_adjoints(
    fun: Callable[..., Any], has_aux: bool, chained_from: Sequence[int] | None = None
) -> Callable[..., Any]:
    """Return `fun`, whose scalar (the first of its results with `has_aux`) depends on every movement in it, by zero.

    With `chained_from`, the positions of differentiated arguments, every movement at the level of `fun` itself also
    depends on the previous one.
    """

    @wraps(fun)
    def dependent(*args: Any, **kwargs: Any) -> Any:
        link = None
        if chained_from is not None:
            leaves, structure = jax.tree.flatten([args[place] for place in chained_from])
            link = start_chain(leaves)
            chosen = dict(zip(chained_from, jax.tree.unflatten(structure, leaves), strict=True))
            args = tuple(chosen.get(place, arg) for place, arg in enumerate(args))
        anchors = Anchors(get_opaque_trace_state(), [], link)
        with trace_context.set(anchors=anchors):
            result = fun(*args, **kwargs)
        return tie_scalar(result, anchors.found, has_aux)

    return dependent


def tie_scalar(result: Any, anchors: Sequence[Array], has_aux: bool) -> Any:
    """Return `result`, a scalar (the first of two with `has_aux`), which depends on `anchors`, by zero."""
    value, *rest = result if has_aux else (result,)
    value = jnp.asarray(value)
    if value.shape == () and is_inexact(value):
        value = tie(value, *anchors)
    return (value, *rest) if has_aux else value


def start_chain(args: list[Any]) -> Array | None:
    """Return the first link of a chain, which is differentiated like the smallest floating one of `args`.

    That argument is changed in place. None if there is none.
    """
    inexact = [i for i, arg in enumerate(args) if is_inexact(arg)]
    if not inexact:
        return None
    first = min(inexact, key=lambda i: jnp.size(args[i]))
    args[first], link = _start(jnp.asarray(args[first]))
    return link


@jax.custom_vjp
def _start(x: Array) -> tuple[Array, Array]:
    """Return `x`, and a chain that is differentiated, and batched, if `x` is."""
    return x, tie(first_link(), x)


_start.defvjp(lambda x: (_start(x), None), lambda _, cotangents: (tie(*cotangents),))


@jax.custom_vjp
def _saved(link: Array) -> Array:
    """Return `link`, needed in the backward pass, so that `jax.checkpoint` recomputes its dependencies everywhere."""
    return link


_saved.defvjp(lambda link: (_saved(link), link), lambda link, cotangent: (tie(cotangent, link),))


# --- traced programs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdjointOrder:
    """The order for the movements of a traced program.

    - `transport`: recognises communicating equations.
    - `tied`: whether every movement depends on the previous one. Then all workers differentiate every movement of
      floating data, including those that would need no adjoint. Otherwise only the result depends on all of them, which
      costs nothing at run time.
    """

    transport: OperationReader
    tied: bool

    def evaluate(self, program: ClosedJaxpr, args: Sequence[Any]) -> tuple[list[Any], list[Array]]:
        """Return the results of `program`, and arrays without elements on which its result must depend."""
        args = list(args)
        level = self.level(start_chain(args) if self.tied else None)
        return level.run(program, args), level.links

    def level(self, link: Array | None) -> _Anchored:
        """Return an evaluator of a program, or a body in it; `link`: the start of its chain, if tied."""
        return _Chained(self, link) if self.tied else _Anchored(self)

    def concerns(self, eqns: Sequence[Any]) -> bool:
        """Return whether any of these equations must be ordered, or contains one."""
        return any(map(self._is_ordered, equations(eqns)))

    def _is_ordered(self, eqn: Any) -> bool:
        if anchor_of(eqn) is not None:
            return True
        # A user's derivative may move data, too.
        return self.tied and (custom_vjp(eqn) is not None or self.transport.operation(eqn) is not None)


class _Anchored:
    """Evaluates a program or a body again, and collects in `links` the arrays on which its result must depend."""

    def __init__(self, order: AdjointOrder) -> None:
        self._order = order
        self.links: list[Array] = []

    def run(self, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Return the results of `program`."""
        return evaluate(program, args, self._equation)

    def _equation(self, eqn: Any, args: list[Any]) -> list[Any]:
        if not self._order.concerns([eqn]):
            return bound_again(eqn, args)
        with body_scope():  # including a body, which may be called twice
            if is_opaque_call(eqn):
                with at_line_of(eqn):
                    return self.run(structure(eqn).body, args)  # type: ignore[union-attr]
            match structure(eqn):
                case Call("custom"):  # whatever its contents, it is one movement
                    anchor, results = anchor_of(eqn), bound_again(eqn, self._ordered(eqn, args))
                    if anchor is not None:
                        self._add(results[anchor])
                    elif self._order.tied or ((called := custom_vjp(eqn)) and not called.asks):
                        self._add(tie(first_link(), *results))
                    return results
                case Scan() | Branches() | Call("jit" | "checkpoint") as parts:
                    with at_line_of(eqn):
                        after, *results = _BODY_RULES[type(parts)](self._order, eqn, parts, self._last(), args)
                    self._add(after)
                    return results
            # JAX can't differentiate a while loop in reverse, so no chain goes through it.
            return bound_again(eqn, args)

    def _last(self) -> Array:
        """Return the end of the chain so far, the start of a body's chain."""
        return first_link()

    def _ordered(self, eqn: Any, args: list[Any]) -> list[Any]:
        """Return the arguments of an equation that must follow the previous movements."""
        return args

    def _add(self, link: Array) -> None:
        self.links.append(link)


class _Chained(_Anchored):
    """The same with every movement depending on the previous one: `links` has only the end of the chain.

    Without a first link nothing is differentiated, and there is no chain.
    """

    def __init__(self, order: AdjointOrder, link: Array | None) -> None:
        super().__init__(order)
        self.links = [] if link is None else [link]

    def _last(self) -> Array:
        return self.links[0] if self.links else first_link()

    def _ordered(self, eqn: Any, args: list[Any]) -> list[Any]:
        if not self.links:
            return args
        called = custom_vjp(eqn)
        if called is not None and called.asks:
            return [_tie_where_differentiated(arg, self._last()) if is_inexact(arg) else arg for arg in args]
        return _tie_last(args, self._last(), constant_arguments(eqn))

    def _add(self, link: Array) -> None:
        if self.links:
            self.links = [_saved(tie(self._last(), link))]


def anchor_of(eqn: Any) -> int | None:
    """Return which result of an equation is the anchor of a movement; None if the equation is not one."""
    if (called := custom_vjp(eqn)) is None:
        return None
    jaxpr: Any = called.body.jaxpr
    if len(jaxpr.outvars) < 2 or jaxpr.outvars[1].aval.size:
        return None
    is_tied = any(inner.primitive.name == "tie" and inner.outvars[0] is jaxpr.outvars[1] for inner in jaxpr.eqns)
    return 1 if is_tied else None


def _tie_last(args: list[Any], link: Array, consts: int) -> list[Any]:
    """Return the arguments of a movement, with the last one, a floating one if any, depending on the chain.

    Not the first: those are constants of a function with a custom derivative, with respect to which JAX can't
    differentiate it, and which `consts` no longer counts in a program that was evaluated again.
    """
    if not args:
        return args
    inexact = [i for i in range(consts, len(args)) if is_inexact(args[i])]
    last = inexact[-1] if inexact else len(args) - 1
    return [tie(jnp.asarray(arg), link) if i == last else arg for i, arg in enumerate(args)]


@jax.custom_jvp
def _tie_where_differentiated(x: Array, link: Array) -> Array:
    """Return `x`, depending on the chain; differentiated only if it was before, for a function that tests for it."""
    return tie(x, link)


@partial(_tie_where_differentiated.defjvp, symbolic_zeros=True)
def _tangent_where_differentiated(primals: Any, tangents: Any) -> tuple[Array, Any]:
    dx, of_link = tangents
    zero = isinstance(dx, SymbolicZero) or isinstance(of_link, SymbolicZero)
    return tie(*primals), dx if zero else tie(dx, of_link)


# --- bodies -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _with_chain(order: AdjointOrder, body: ClosedJaxpr, place: int = 0) -> ClosedJaxpr:
    """Return a body with the chain as an argument at `place` and as its first result; cached by body."""

    def chained(*args: Any) -> list[Any]:
        level = order.level(args[place])
        results = level.run(body, [*args[:place], *args[place + 1 :]])
        return [level.links[0] if order.tied else tie(args[place], *level.links), *results]

    avals: list[Any] = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
        for aval in body.in_avals
    ]
    return jax.make_jaxpr(chained)(*avals[:place], NO_LINK, *avals[place:])


@lru_cache(maxsize=512)
def _jitted(order: AdjointOrder, body: ClosedJaxpr, name: str, inline: bool) -> Callable[..., Any]:
    function = jaxpr_as_fun(_with_chain(order, body))

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call, inline=inline)


def _scan(order: AdjointOrder, eqn: Any, scan: Scan, before: Array, args: list[Any]) -> Sequence[Any]:
    consts, carried = scan.constants, scan.carried
    body = _with_chain(order, scan.body, consts)
    constants, start, xs = args[:consts], [before, *args[consts : consts + carried]], args[consts + carried :]

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = jaxpr_as_fun(body)(*constants, *carry, *xs)
        return results[: carried + 1], results[carried + 1 :]

    carry, ys = lax.scan(step, start, xs, **{name: eqn.params[name] for name in ("length", "reverse", "unroll")})
    return [*carry, *ys]


def _branches(order: AdjointOrder, eqn: Any, branches: Branches, before: Array, args: list[Any]) -> Sequence[Any]:
    params = {**eqn.params, "branches": tuple(_with_chain(order, body) for body in branches.bodies)}
    return eqn.primitive.bind(args[0], before, *args[1:], **params)


def _call(order: AdjointOrder, eqn: Any, call: Call, before: Array, args: list[Any]) -> Sequence[Any]:
    _, params = name_and_params(eqn)
    if call.kind == "jit":
        return _jitted(order, call.body, params["name"], params["inline"])(before, *args)
    function = jaxpr_as_fun(_with_chain(order, call.body))
    return jax.checkpoint(function, prevent_cse=params["prevent_cse"], policy=params["policy"])(before, *args)


_BODY_RULES: dict[type, Callable[..., Sequence[Any]]] = {Scan: _scan, Branches: _branches, Call: _call}
