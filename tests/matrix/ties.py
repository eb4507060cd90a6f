"""Whether the messages in a traced program hang together with its data."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

import distdl_jax as dj


def untied(program: ClosedJaxpr) -> list[str]:
    """The messages that do not depend on the input of the operation that they are part of, or that its result does not
    depend on: JAX may move the first to another place, and drop the second, on this worker alone."""
    return [text for jaxpr in _programs(program.jaxpr) for text in _untied_in(jaxpr)]


def there_and_back(function: Callable[[Any], Any], x: Any, dy: Any) -> ClosedJaxpr:
    """The program of a function and of its adjoint."""
    return jax.make_jaxpr(lambda x, dy: jax.vjp(function, x)[1](dy))(x, dy)


def empty_pieces(program: ClosedJaxpr) -> list[str]:
    """The equations that cut nothing out of an array, or join or widen arrays without elements.

    JAX can't compile some of them in a branch or loop (see `joined_slices`); which of them depends on its version.
    """
    return [str(equation) for jaxpr in _programs(program.jaxpr) for equation in jaxpr.eqns if _takes_nothing(equation)]


def _takes_nothing(equation: Any) -> bool:
    given, made = ([atom.aval for atom in atoms] for atoms in (equation.invars, equation.outvars))
    match equation.primitive.name:
        case "concatenate":
            return any(aval.size == 0 for aval in given)
        case "slice" | "dynamic_slice" | "gather":
            return made[0].size == 0 < given[0].size
        case "pad":
            return given[0].size == 0 < made[0].size
    return False


def _programs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """The program and all that it calls."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from _programs(value.jaxpr if isinstance(value, ClosedJaxpr) else value)


def _is_program(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def _untied_in(jaxpr: Jaxpr) -> list[str]:
    def variables(atoms: Any) -> set[Var]:
        return {atom for atom in atoms if isinstance(atom, Var)}

    transport = dj.Partition().world.transport
    behind = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if variables(equation.invars) & behind:
            behind |= set(equation.outvars)
    before = variables(jaxpr.outvars)
    for equation in reversed(jaxpr.eqns):
        if variables(equation.outvars) & before:
            before |= variables(equation.invars)
    messages = [equation for equation in jaxpr.eqns if transport.operation(equation) is not None]
    loose = [equation for equation in messages if not set(equation.outvars) & before]
    early = [equation for equation in messages if not set(equation.outvars) & behind]
    return [f"not used: {equation}" for equation in loose] + [f"depends on nothing: {equation}" for equation in early]
