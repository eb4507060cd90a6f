"""Derivatives that a user wrote: a function with a `jax.custom_vjp` may move data backward that it does not forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from distdl_jax.compat import bound_again
from distdl_jax.errors import PlanError
from distdl_jax.source_lines import is_library
from distdl_jax.tracing.gradient_chain import anchor_of
from distdl_jax.tracing.program_reader import defined_at, is_in_one_piece, line_of_equation, read_program
from distdl_jax.world import Transport


def own_rules(program: ClosedJaxpr) -> list[Any]:
    """The equations of a traced function that have a derivative of their own, those of this library left out."""
    return list(_found(program.jaxpr))


def moving(transport: Transport, rules: list[Any]) -> list[bool | Exception]:
    """Whether each of these derivatives moves data; where it can't be told, what tracing it raised.

    They are traced: workers whose programs hold them do it together.
    """
    return [_moves(transport, eqn) for eqn in rules]


def moved_backward_only(transport: Transport, rules: list[Any], moves: list[bool | Exception]) -> str | None:
    """The line of the first that moves data, but whose function does not: it is no transpose of what that does."""
    only = (
        line_of_equation(eqn)
        for eqn, it_moves in zip(rules, moves, strict=True)
        if it_moves is True and not _communicates(transport, eqn.params["call_jaxpr"].jaxpr)
    )
    return next(only, None)


def _found(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "custom_vjp_call" or is_in_one_piece(eqn):
            for inner in jaxprs_in_params(eqn.params):
                yield from _found(inner)
        elif anchor_of(eqn) is None and not _of_library(eqn):
            yield eqn


def _of_library(eqn: Any) -> bool:
    return is_library(defined_at(eqn.params["call_jaxpr"].jaxpr).rpartition(" at ")[2])


def _moves(transport: Transport, eqn: Any) -> bool | Exception:
    def derivative(*args: Array) -> Any:
        # By what its function holds, JAX can't differentiate it.
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
        return error  # said where it is differentiated, if it is
    return _communicates(transport, program.jaxpr)


def _communicates(transport: Transport, jaxpr: Any) -> bool:
    return bool(read_program(transport, jaxpr))


def _cotangent(result: Array) -> Any:
    inexact = jax.numpy.issubdtype(result.dtype, jax.numpy.inexact)
    return result if inexact else np.zeros(result.shape, jax.dtypes.float0)
