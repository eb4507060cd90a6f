"""Gradient chains: a traced function, evaluated again so that no worker's JAX can drop the adjoint of a movement.

JAX runs the adjoint of a movement on a worker only where the movement's input is differentiated and its output used,
both by that worker's account. A block without elements, a constant, a loss that ignores an output make the workers'
accounts differ. So the program is rewritten: what it is to return depends on every movement, and, where that does not
do, every movement depends on the one before it. In loops, branches, `jax.checkpoint` and nested jits, whose values
can't be used outside, the chain is one more argument and one more result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, jaxprs_in_params

from distdl_jax.compat import at_line_of, bound_again, scan_counts
from distdl_jax.tracing.program_reader import is_in_one_piece, movement_scope
from distdl_jax.tracing.tie import tie
from distdl_jax.world import Transport

# What is differentiated by a rule of its own is one movement, whatever it consists of.
_MOVEMENTS = ("custom_vjp_call", "custom_jvp_call", "custom_vmap_call")

NO_LINK = jax.ShapeDtypeStruct((0,), jnp.float32)
"""The chain in a body's arguments and results: an array without elements."""


@dataclass(frozen=True)
class Chain:
    """How the movements of a program are chained.

    - `transport`: knows the equations that communicate.
    - `tied`: whether every movement depends on the one before. Then all workers differentiate every movement of
      floating data, also those that would need no adjoint. Otherwise the result alone depends on all of them, which
      costs nothing at run time.
    """

    transport: Transport
    tied: bool

    def evaluate(self, program: ClosedJaxpr, args: Sequence[Any]) -> tuple[list[Any], list[Array]]:
        """What `program` returns for `args`, and arrays without elements on which its result is to depend."""
        args = list(args)
        links = self.begin(args) if self.tied else []
        return self.run(program, args, links), links

    def begin(self, args: list[Any]) -> list[Array]:
        """The first link of a chain, which is differentiated as one of `args` is, where one can be."""
        inexact = [i for i, arg in enumerate(args) if jnp.issubdtype(jnp.result_type(arg), jnp.inexact)]
        if not inexact:
            return []
        first = min(inexact, key=lambda i: jnp.size(args[i]))
        args[first], link = begun(jnp.asarray(args[first]))
        return [link]

    def run(self, program: ClosedJaxpr, args: Sequence[Any], links: list[Array]) -> list[Any]:
        """Return what `program` returns for `args`; `links` gets the links of its chain."""
        jaxpr = program.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [value(atom) for atom in eqn.invars], links)
            values.update(zip(eqn.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, args: list[Any], links: list[Array]) -> list[Any]:
        if not self._concerns(eqn):
            return bound_again(eqn, args)
        with movement_scope():  # also of a body, which may be called twice
            return self._ordered(eqn, args, links)

    def _ordered(self, eqn: Any, args: list[Any], links: list[Array]) -> list[Any]:
        name = eqn.primitive.name
        if is_in_one_piece(eqn):
            with at_line_of(eqn):
                return self.run(eqn.params["call_jaxpr"], args, links)
        if name in _BODY_RULES:
            with at_line_of(eqn):
                before = links[0] if self.tied and links else jnp.zeros(NO_LINK.shape, NO_LINK.dtype)
                after, *results = _BODY_RULES[name](self, eqn, before, args)
            _add(links, after, self.tied)
            return list(results)
        if name not in _MOVEMENTS:
            return bound_again(eqn, args)
        if self.tied and links:
            args = _after(links[0], args, eqn.params.get("num_consts", 0))
        anchor = anchor_of(eqn)
        results = bound_again(eqn, args)
        if anchor is not None:
            _add(links, results[anchor], self.tied)
        elif self.tied or name == "custom_vjp_call":
            _add(links, tie(jnp.zeros(NO_LINK.shape, NO_LINK.dtype), *results), self.tied)
        return results

    def concerns(self, jaxpr: Any) -> bool:
        """Whether a chain has to go through anything in a program."""
        return any(self._concerns(eqn) for eqn in jaxpr.eqns)

    def _concerns(self, eqn: Any) -> bool:
        """Whether a chain has to go through an equation: it holds a movement with an anchor; tied, any operation, also
        one that there may be in a derivative of the user's."""
        if self.tied and eqn.primitive.name == "custom_vjp_call":
            return True
        if self.transport.operation(eqn) is not None:
            return self.tied
        if anchor_of(eqn) is not None:
            return True
        return any(self.concerns(jaxpr) for jaxpr in jaxprs_in_params(eqn.params))


def anchor_of(eqn: Any) -> int | None:
    """Which result of an equation is the anchor of a movement; None where the equation is none."""
    if eqn.primitive.name != "custom_vjp_call":
        return None
    jaxpr = eqn.params["call_jaxpr"].jaxpr
    empty_ties = {inner.outvars[0] for inner in jaxpr.eqns if inner.primitive.name == "tie"}
    found = [i for i, var in enumerate(jaxpr.outvars) if i == 1 and var in empty_ties and not var.aval.size]
    return found[0] if found else None


def _add(links: list[Array], link: Array, tied: bool) -> None:
    """Add what depends on a movement to the chain."""
    if not tied:
        links.append(link)
    elif links:
        links[:] = [_remembered(tie(links[0], link))]


def _after(link: Array, args: list[Any], consts: int) -> list[Any]:
    """The arguments of a movement, the last of which, floating where there is one, depends on the chain.

    Not the first: those are constants of a function with a derivative of its own, by which JAX can't differentiate it,
    and which `consts` no longer counts in a program that was evaluated again.
    """
    if not args:
        return args
    places = range(consts, len(args))
    inexact = [i for i in places if jnp.issubdtype(jnp.result_type(args[i]), jnp.inexact)]
    last = inexact[-1] if inexact else len(args) - 1
    return [tie(jnp.asarray(arg), link) if i == last else arg for i, arg in enumerate(args)]


@jax.custom_vjp
def begun(x: Array) -> tuple[Array, Array]:
    """`x`, and a chain that is differentiated, and batched, where `x` is."""
    return x, tie(jnp.zeros(NO_LINK.shape, NO_LINK.dtype), x)


begun.defvjp(lambda x: (begun(x), None), lambda _, cotangents: (tie(*cotangents),))


@jax.custom_vjp
def _remembered(link: Array) -> Array:
    """`link`, which the backward pass needs: `jax.checkpoint` then does again, on every worker, what it depends on."""
    return link


_remembered.defvjp(lambda link: (_remembered(link), link), lambda link, cotangent: (tie(cotangent, link),))


# --- bodies -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _chained(chain: Chain, body: Any, place: int = 0) -> ClosedJaxpr:
    """A body with the chain as an argument at `place` and as its first result; the same object for the same body."""
    closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())

    def chained(*args: Any) -> list[Any]:
        before = args[place]
        links = [before] if chain.tied else []
        results = chain.run(closed, [*args[:place], *args[place + 1 :]], links)
        return [links[0] if chain.tied else tie(before, *links), *results]

    given: list[Any] = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(chained)(*given[:place], NO_LINK, *given[place:])


@lru_cache(maxsize=512)
def _callable(chain: Chain, body: Any, name: str, inline: bool) -> Callable[..., Any]:
    function = jaxpr_as_fun(_chained(chain, body))

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call, inline=inline)


def _scan(chain: Chain, eqn: Any, before: Array, args: list[Any]) -> list[Any]:
    params, (consts, carried) = dict(eqn.params), scan_counts(eqn)
    body = _chained(chain, params["jaxpr"], consts)
    if "num_carry" in params:
        params.update(jaxpr=body, num_carry=carried + 1)
        if "linear" in params:
            params["linear"] = (*params["linear"][:consts], False, *params["linear"][consts:])
        return list(eqn.primitive.bind(*args[:consts], before, *args[consts:], **params))
    # From jax 0.12 on its parameters hold trees, which only `lax.scan` can make.
    constants, start, xs = args[:consts], [before, *args[consts : consts + carried]], args[consts + carried :]

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = jaxpr_as_fun(body)(*constants, *carry, *xs)
        return results[: carried + 1], results[carried + 1 :]

    carry, ys = lax.scan(step, start, xs, **{name: params[name] for name in ("length", "reverse", "unroll")})
    return [*carry, *ys]


def _cond(chain: Chain, eqn: Any, before: Array, args: list[Any]) -> list[Any]:
    branches = tuple(_chained(chain, branch) for branch in eqn.params["branches"])
    return list(eqn.primitive.bind(args[0], before, *args[1:], **{**eqn.params, "branches": branches}))


def _jit(chain: Chain, eqn: Any, before: Array, args: list[Any]) -> list[Any]:
    params = eqn.params
    return list(_callable(chain, params["jaxpr"], params["name"], params["inline"])(before, *args))


def _checkpoint(chain: Chain, eqn: Any, before: Array, args: list[Any]) -> list[Any]:
    params = eqn.params
    function = jaxpr_as_fun(_chained(chain, params["jaxpr"]))
    return list(jax.checkpoint(function, prevent_cse=params["prevent_cse"], policy=params["policy"])(before, *args))


_BODY_RULES = {
    "scan": _scan,
    "cond": _cond,
    "jit": _jit,
    "pjit": _jit,
    "checkpoint": _checkpoint,
    "remat": _checkpoint,
    "remat2": _checkpoint,
}
"""Of these the body is rewritten. JAX can't differentiate a while loop in reverse, so no chain goes through it."""
