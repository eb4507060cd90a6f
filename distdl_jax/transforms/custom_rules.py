"""Derivatives that a user wrote: a function with a `jax.custom_vjp` may move data backward that it does not forward."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr

from distdl_jax.errors import PlanError
from distdl_jax.jax_compat import bound_again
from distdl_jax.tracing.adjoint_order import anchor_of, asks, is_inexact
from distdl_jax.tracing.jaxprs import defined_at, equations, is_opaque_call
from distdl_jax.tracing.program_reader import line_of_equation, read_program
from distdl_jax.tracing.world import Transport
from distdl_jax.watchdog.source_lines import is_library


def custom_rules(program: ClosedJaxpr) -> list[Any]:
    """Return the equations of a traced function that have a derivative of the user's, but for those that ask what is
    differentiated.

    These, as equinox's loops, may refuse a derivative by all arguments; the programs that are compared hold theirs.
    """

    def has_rule(eqn: Any) -> bool:
        return eqn.primitive.name == "custom_vjp_call" and not is_opaque_call(eqn)

    found = filter(has_rule, equations(program.jaxpr.eqns, enter=lambda eqn: not has_rule(eqn)))
    return [eqn for eqn in found if anchor_of(eqn) is None and not asks(eqn) and not _is_of_library(eqn)]


def moves_data(transport: Transport, rules: list[Any]) -> list[bool | Exception]:
    """Return whether each of these derivatives moves data; where it can't be told, the exception that tracing raised.

    They are traced: workers whose programs hold them do it together.
    """
    return [_moves(transport, eqn) for eqn in rules]


def line_moving_backward_only(transport: Transport, rules: list[Any], moves: list[bool | Exception]) -> str | None:
    """Return the line of the first that moves data though its function does not: so it is no transpose of that."""
    only = (
        line_of_equation(eqn)
        for eqn, backward in zip(rules, moves, strict=True)
        if backward is True and not read_program(transport, eqn.params["call_jaxpr"].jaxpr)
    )
    return next(only, None)


def _is_of_library(eqn: Any) -> bool:
    return is_library(defined_at(eqn.params["call_jaxpr"].jaxpr).rpartition(" at ")[2])


def _moves(transport: Transport, eqn: Any) -> bool | Exception:
    def derivative(*args: Array) -> Any:
        # By its function's constants JAX can't differentiate it.
        count = eqn.params.get("num_consts", 0)
        consts, varying = args[:count], args[count:]
        results, pullback = jax.vjp(lambda *varying: bound_again(eqn, [*consts, *varying]), *varying)
        return pullback([_cotangent(result) for result in results])

    args = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    try:
        program = jax.make_jaxpr(derivative)(*args)
    except PlanError:
        raise
    except Exception as error:
        return error  # raised where it is differentiated, if it is
    return bool(read_program(transport, program.jaxpr))


def _cotangent(result: Array) -> Any:
    return result if is_inexact(result) else np.zeros(result.shape, jax.dtypes.float0)
