"""The only reader of JAX's programs (jaxprs): bodies of equations, evaluation and data flow, each with a rule.

Nothing else knows JAX's names of loops, branches, calls and custom derivatives, or where they keep their bodies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from distdl_jax.errors import InvalidTypeError
from distdl_jax.jax_compat import name_and_params, scan_counts
from distdl_jax.kernels.dtypes import wide_as
from distdl_jax.source_lines import is_library
from distdl_jax.watchdog.programs.ir import Operation

T = TypeVar("T")


class OperationReader(Protocol):
    """What recognises communication in traced programs: a `Transport`, which is on a floor above."""

    def operation(self, equation: Any) -> Operation | None:
        """Return the communication of an equation; None if it is not this transport's."""


class Scan(NamedTuple):
    """A loop of known length. Its arguments are constants, the carry, and the scanned arrays."""

    body: ClosedJaxpr
    length: int
    constants: int
    carried: int


class While(NamedTuple):
    """A loop of unknown length. Its arguments are the constants of both bodies, and the carry."""

    condition: ClosedJaxpr
    body: ClosedJaxpr
    condition_constants: int
    body_constants: int


class Branches(NamedTuple):
    """A conditional. Its arguments are the number of the branch, and the branches' arguments."""

    bodies: tuple[ClosedJaxpr, ...]


class Call(NamedTuple):
    """A program that runs once: "jit", "checkpoint", "custom" (with a custom derivative or batching rule) or "call".
    Its arguments are the body's, except in some custom forms."""

    kind: str
    body: ClosedJaxpr


_CALLS = {
    "jit": "jit",
    "pjit": "jit",
    "checkpoint": "checkpoint",
    "remat": "checkpoint",
    "remat2": "checkpoint",
    "custom_jvp_call": "custom",
    "custom_vjp_call": "custom",
    "custom_vmap_call": "custom",
    "closed_call": "call",
    "core_call": "call",
}
OPAQUE_CALL = "opaque_call"
"""The function whose program is differentiated as a whole; see `transforms.opaque_call`."""


def structure(eqn: Any) -> Scan | While | Branches | Call | None:
    """Return how an equation uses its bodies; None if it has none, or is of an unknown kind."""
    name, params = name_and_params(eqn)
    match name:
        case "scan":
            return Scan(params["jaxpr"], params["length"], *scan_counts(eqn))
        case "while":
            counts = params["cond_nconsts"], params["body_nconsts"]
            return While(params["cond_jaxpr"], params["body_jaxpr"], *counts)
        case "cond":
            return Branches(tuple(params["branches"]))
    if name not in _CALLS or (body := _body(params)) is None:
        return None
    return Call(_CALLS[name], body)


def _body(params: Any) -> ClosedJaxpr | None:
    found = next((params[key] for key in ("jaxpr", "call_jaxpr", "call", "traced") if key in params), None)
    body = getattr(found, "jaxpr", found) if "traced" in params else found
    return body if body is None or isinstance(body, ClosedJaxpr) else _closed(body)


class CustomVjp(NamedTuple):
    """A function with a custom derivative.

    - `asks`: whether its derivative tests which arguments and results are differentiated. It may reject others than it
      would get without a chain, as equinox's loops do.
    """

    body: ClosedJaxpr
    asks: bool


def custom_vjp(eqn: Any) -> CustomVjp | None:
    """Return the function called by an equation, if it has a custom derivative for the backward pass."""
    name, params = name_and_params(eqn)
    if name != "custom_vjp_call":
        return None
    body = _body(params)
    assert body is not None
    return CustomVjp(body, bool(params.get("symbolic_zeros")))


@lru_cache(maxsize=512)
def _closed(body: Any) -> ClosedJaxpr:
    return ClosedJaxpr(body, ())  # the same object for the same body, as a cache key


def bodies(eqn: Any) -> list[Any]:
    """Return the programs in an equation, of whatever kind it is."""
    _, params = name_and_params(eqn)
    held = _body(params) if params is not eqn.params else None
    return list(jaxprs_in_params(eqn.params)) if held is None else [held.jaxpr]


def equations(eqns: Iterable[Any], enter: Callable[[Any], bool] = lambda eqn: True) -> Iterator[Any]:
    """Yield each equation, and those in its bodies if `enter` allows it."""
    for eqn in eqns:
        yield eqn
        if enter(eqn):
            for body in bodies(eqn):
                yield from equations(body.eqns, enter)


def evaluate(program: ClosedJaxpr, args: Sequence[Any], rule: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """Return the results of a program whose equations are evaluated by `rule(eqn, args)`."""
    jaxpr = program.jaxpr
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        with wide_as(atom.aval for atom in (*eqn.invars, *eqn.outvars)):
            results = rule(eqn, [value(atom) for atom in eqn.invars])
        if len(results) != len(eqn.outvars):
            raise InvalidTypeError(_CHECKED)
        values.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


_CHECKED = (
    "JAX can't differentiate a traced program that checkify has checked, with a function in it that has a custom "
    "derivative. Check the derivative: instead of dj.value_and_grad of checkify.checkify(loss), use checkify.checkify "
    "of dj.value_and_grad(loss)."
)


class DataFlow(ABC, Generic[T]):
    """Facts about the values of a program, from those about its arguments; a subclass has the rule for an equation.

    - `of_literals`, `of_constants`, `unknown`: the facts about literals, constants, and unknown values.
    """

    of_literals: T
    of_constants: T
    unknown: T

    @abstractmethod
    def equation(self, eqn: Any, args: list[T]) -> list[T]:
        """Return the facts about an equation's results."""

    @abstractmethod
    def join(self, one: T, other: T) -> T:
        """Return the fact about a value that has one fact in some passes or branches, and the other in others."""

    def taken(self, of_branches: Sequence[Sequence[T]]) -> list[T]:
        """Return the facts about a conditional's results, from those about each branch's."""
        return [reduce(self.join, facts) for facts in zip(*of_branches, strict=True)]

    def constant(self, value: Any) -> T:
        """Return the fact about a constant with this value."""
        return self.of_constants

    def literal(self, value: Any) -> T:
        """Return the fact about a literal: a number, or with some flags of JAX any constant."""
        return self.of_literals

    def run(self, jaxpr: Any, args: Sequence[T], consts: Sequence[Any] = ()) -> list[T]:
        """Return the facts about a program's results; `consts` are the values of its constants, if they matter."""
        facts: dict[Any, T] = dict.fromkeys(jaxpr.constvars, self.of_constants)
        facts.update(zip(jaxpr.constvars, map(self.constant, consts), strict=False))
        facts.update(zip(jaxpr.invars, args, strict=True))

        def fact(atom: Any) -> T:
            return self.literal(atom.val) if isinstance(atom, Literal) else facts[atom]

        for eqn in jaxpr.eqns:
            facts.update(zip(eqn.outvars, self.equation(eqn, [fact(atom) for atom in eqn.invars]), strict=True))
        return [fact(atom) for atom in jaxpr.outvars]

    def through_bodies(self, eqn: Any, args: list[T]) -> list[T] | None:
        """Return the facts about an equation's results by its bodies; None if these don't determine them."""
        match structure(eqn):
            case Scan(body, _, constants, carried):
                return self.through_loop(eqn, body, args, slice(constants, constants + carried))
            case Branches(branches):
                of_branches = [self.body(eqn, branch.jaxpr, args[1:], branch.consts) for branch in branches]
                return self.taken(of_branches)
            case Call(_, body) if len(body.jaxpr.invars) == len(args):
                return self.body(eqn, body.jaxpr, args, body.consts)
        for inner in bodies(eqn):
            self.body(eqn, inner, [self.unknown] * len(inner.invars))
        return None

    def through_loop(self, eqn: Any, body: ClosedJaxpr, args: Sequence[T], carried: slice) -> list[T]:
        """Return the facts about a loop's results, from those about its body's arguments, some of which are carried."""
        now = list(args)
        while True:
            results = self.body(eqn, body.jaxpr, now, body.consts)
            after = list(map(self.join, now[carried], results))
            if after == now[carried]:
                return results
            now[carried] = after

    def body(self, eqn: Any, jaxpr: Any, args: Sequence[T], consts: Sequence[Any] = ()) -> list[T]:
        """Return the facts about the results of a body of `eqn`; for a loop it may be called more than once."""
        return self.run(jaxpr, args, consts)


def defined_at(jaxpr: Any) -> str:
    """Return the function of a program as `name at file:line`; "" if JAX does not tell."""
    return getattr(jaxpr.debug_info, "func_src_info", None) or ""


def is_opaque_call(eqn: Any) -> bool:
    """Return whether an equation is a program that is differentiated as a whole, though made of movements."""
    if (called := custom_vjp(eqn)) is None:
        return False
    name, _, file = defined_at(called.body.jaxpr).rpartition(" at ")
    return name == OPAQUE_CALL and is_library(file)
