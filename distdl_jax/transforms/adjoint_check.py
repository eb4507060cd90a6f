"""The check that all workers run the same adjoints: derivatives are compared in tracing, and chained if different."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.jax_compat import bound_again, constant_arguments
from distdl_jax.kernels.dtypes import wide_as
from distdl_jax.partitions.partition import Partition
from distdl_jax.source_lines import function_name, is_library
from distdl_jax.tracing.adjoint_order import (
    AdjointOrder,
    anchor_of,
    anchors_are_noted,
    is_inexact,
    note_anchor,
    tie_scalar,
    with_all_adjoints,
)
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.jaxprs import CustomVjp, custom_vjp, defined_at, equations, is_opaque_call
from distdl_jax.tracing.program_reader import constants_text, line_of_equation, moved_constants, read_program
from distdl_jax.tracing.traced import Traced
from distdl_jax.transforms.opaque_call import evaluate_opaquely
from distdl_jax.transports.world import Transport, Workers, World
from distdl_jax.validation import check_numbers
from distdl_jax.watchdog.programs.diagnosis import problem_text
from distdl_jax.watchdog.programs.ir import Program, operations

# Raised by JAX if Python asks for the value of a traced array.
_VALUE_ASKED_FOR = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class Outcome(Enum):
    """The outcome of an attempt to trace the derivative: on one worker, and in the decision on all."""

    TRACED = "the programs complete together"
    UNTRACED = "some worker's function needs values, so that it can't be traced"
    CUSTOM_RULES = "some worker's function has a custom derivative, which may move data"
    FAILED = "tracing raised on some worker"
    MISMATCH = "the programs don't complete together"


class _Report(NamedTuple):
    """A worker's part in the comparison, and the decision on all.

    - `text`: the error, or the mismatch. `program`: the communication of the derivative.
    """

    outcome: Outcome
    text: str | None = None
    program: Program = ()


def same_adjoints(
    workers: Partition,
    derivative: Callable[[Callable[..., Any]], Callable[..., Any]],
    fun: Callable[..., Any],
    has_aux: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Sequence[int],
    transposes: str | None = None,
) -> tuple[Callable[..., Any], Traced | None]:
    """Return `derivative(fun)` of `args`, with the same adjoints on all workers, and `fun` as it was traced, if it was.

    Collective in `workers`. `fun` is traced once, unless it can't be on some worker because it needs values.
    `transposes`: the name of a derivative that itself transposes adjoints.

    **Raises:** the exceptions of tracing; `PlanError`, on all workers, if another one raises that, or the programs
    can't be made to complete together; `InvalidArgumentError`, on all, if `transposes` is given and a user's derivative
    moves data that its function does not.
    """
    together = workers.size > 1 and workers.active
    if together:
        comparison = _Comparison(workers.world, workers.ranks, f"the derivative of {function_name(fun)}")
        traced = comparison.trace(fun, args, kwargs, places)
        if traced is not None:
            chosen = comparison.differentiate(traced, derivative, has_aux, args, transposes)
            if chosen is not None:
                return chosen, traced
    dependent = with_all_adjoints(fun, has_aux, chained_from=places if together else None)
    return partial(derivative(dependent), **kwargs), None


@dataclass(frozen=True)
class _Comparison:
    """The comparison of the derivative called `name` between the workers of `team`."""

    world: World
    team: Workers
    name: str

    def agree(self, report: _Report) -> _Report:
        """Return the decision on the reports of all workers."""
        decision: _Report = self.world.agree(self.team, self.name, report, partial(_decide, self.name))
        return decision

    def trace(
        self, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], places: Sequence[int]
    ) -> Traced | None:
        """Return the traced function; None, on all workers, if it needs values."""
        try:
            with self._reporting_all_but(PlanError, *_VALUE_ASKED_FOR):  # all workers raise PlanErrors
                check_numbers("args", args, places)
                return Traced(fun, args, kwargs, places)
        except _VALUE_ASKED_FOR:
            self.agree(_Report(Outcome.UNTRACED))
            return None

    def differentiate(
        self,
        traced: Traced,
        derivative: Callable[[Callable[..., Any]], Callable[..., Any]],
        has_aux: bool,
        args: Sequence[Any],
        transposes: str | None,
    ) -> Callable[..., Any] | None:
        """Return the derivative, by a program that completes with the other workers'; None if some can't trace it.

        Three programs are tried in turn: one whose result depends on all movements; the same, once the workers know
        that users' derivatives move no data; and one with movements in a chain.
        """
        tied, rules = False, _custom_rules(traced.program)

        def attempt(tied: bool) -> tuple[Traced, _Report]:
            order = AdjointOrder(self.world.transport, tied)

            def ordered(*args: Any) -> Any:
                values, links = order.evaluate(traced.program, traced.leaves(args))
                return tie_scalar(traced.result(values), links, has_aux)

            with self._reporting_all_but():
                candidate = Traced(derivative(ordered), args, {}, traced.places, as_call=True)
            program = read_program(self.world.transport, candidate.program.jaxpr)
            return candidate, self.agree(_Report(Outcome.TRACED, program=program))

        candidate, decision = (traced, self.agree(_Report(Outcome.CUSTOM_RULES))) if rules else attempt(tied)
        if decision.outcome is Outcome.CUSTOM_RULES:
            tied = _any_rule_moves(self.world, self.team, self.name, rules, transposes)
            candidate, decision = attempt(tied)
        if decision.outcome is Outcome.MISMATCH and not tied:
            candidate, decision = attempt(tied=True)
        match decision:
            case _Report(Outcome.UNTRACED):
                return None
            case _Report(Outcome.FAILED, text):
                raise PlanError(text)
            case _Report(Outcome.MISMATCH, str(text)):
                moved = moved_constants(traced.program.jaxpr)
                moved_on = self.world.agree(self.team, f"what is constant in {self.name}", moved)
                raise PlanError(text + constants_text(moved_on))
        return partial(_evaluate, candidate, AdjointOrder(self.world.transport, tied=False))

    @contextmanager
    def _reporting_all_but(self, *passing: type[Exception]) -> Iterator[None]:
        """Report exceptions inside to the other workers, who may be elsewhere by now, and raise them."""
        try:
            with trace_context.set(sizes_agreed=True):  # the programs are compared
                yield
        except passing:
            raise
        except Exception as error:
            try:
                self.agree(_Report(Outcome.FAILED, f"{type(error).__name__}: {error}"))
            except PlanError as elsewhere:
                raise error from elsewhere
            raise


def _any_rule_moves(world: World, team: Workers, name: str, rules: list[Any], transposes: str | None) -> bool:
    """Return whether a user's derivative moves data on some worker; collective in `team`."""
    # They are traced: workers whose programs contain them do it together.
    moves = [_moves(world.transport, eqn) for eqn in rules]
    backward_only = (
        eqn
        for eqn, backward in zip(rules, moves, strict=True)
        if backward is True and not read_program(world.transport, custom_vjp(eqn).body.jaxpr)  # type: ignore[union-attr]
    )
    line = next(map(line_of_equation, backward_only), None) if transposes else None
    raised = next((error for error in moves if isinstance(error, Exception)), None)
    try:
        any_moves, line = world.agree(team, name, (any(moves), line), _any)
    except PlanError as elsewhere:
        if raised is None:
            raise
        raise raised from elsewhere  # the others, if it did not, are in their next movement
    if line is not None:
        raise InvalidArgumentError(
            f"dj.{transposes} can't pass through your own derivative at {line}: in the backward pass it moves data, "
            f"but its function does not, so it is not the transpose of that, and dj.{transposes}, which transposes it, "
            "would give wrong numbers. For values replicated on several workers use dj.replicated; otherwise move the "
            "data in the function."
        )
    return bool(any_moves)


def _any(moves: Mapping[int, tuple[bool, str | None]]) -> tuple[bool, str | None]:
    lines = (line for _, (_, line) in sorted(moves.items()) if line is not None)
    return any(moved for moved, _ in moves.values()), next(lines, None)


def _evaluate(traced: Traced, order: AdjointOrder, *args: Any) -> Any:
    """Return the result of a traced function; its movements are recorded if a derivative of it is taken."""
    if not anchors_are_noted():
        return traced.result(evaluate_opaquely(order.transport, traced.program, traced.leaves(args)))
    values, links = order.evaluate(traced.program, traced.leaves(args))
    for link in links:
        note_anchor(link)
    return traced.result(values)


def _decide(name: str, reports: Mapping[int, _Report]) -> _Report:
    """Return whether the workers' programs complete together, and if not, why.

    If workers without a program take part in them, that is unknown, and they count as complete.
    """
    of = {outcome: [worker for worker in sorted(reports) if reports[worker].outcome is outcome] for outcome in Outcome}
    for worker in of[Outcome.FAILED]:
        return _Report(Outcome.FAILED, f"On worker {worker}, {name} can't be traced. {reports[worker].text}")
    for outcome in (Outcome.UNTRACED, Outcome.CUSTOM_RULES):
        if of[outcome]:
            return _Report(outcome)
    programs = {worker: report.program for worker, report in reports.items()}
    partners = {
        worker
        for program in programs.values()
        for operation, _ in operations(program)
        for worker in ((operation.dest, operation.source) if operation.is_message else operation.team)
    }
    if partners <= {None, *programs} and (problem := problem_text(name, programs)) is not None:
        return _Report(Outcome.MISMATCH, problem)
    return _Report(Outcome.TRACED)


# --- derivatives written by users ------------------------------------------------------------------------------------


def _custom_rules(program: ClosedJaxpr) -> list[Any]:
    """Return equations of a traced function with a user's derivative, except those that test for differentiation.

    These, such as equinox's loops, may reject a derivative by all arguments; the compared programs contain theirs.
    """

    def rule(eqn: Any) -> CustomVjp | None:
        return None if is_opaque_call(eqn) else custom_vjp(eqn)

    def is_the_users(eqn: Any) -> bool:
        called = rule(eqn)
        if called is None or called.asks or anchor_of(eqn) is not None:
            return False
        return not is_library(defined_at(called.body.jaxpr).rpartition(" at ")[2])

    return list(filter(is_the_users, equations(program.jaxpr.eqns, enter=lambda eqn: rule(eqn) is None)))


def _moves(transport: Transport, eqn: Any) -> bool | Exception:
    """Return whether a derivative moves data; if unknown, the exception raised when it was traced."""

    def derivative(*args: Array) -> Any:
        # JAX can't differentiate it with respect to its function's constants.
        count = constant_arguments(eqn)
        consts, varying = args[:count], args[count:]
        results, pullback = jax.vjp(lambda *varying: bound_again(eqn, [*consts, *varying]), *varying)
        return pullback([_cotangent(result) for result in results])

    avals = [atom.aval for atom in eqn.invars]
    try:
        with wide_as(avals):
            program = jax.make_jaxpr(derivative)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
    except PlanError:
        raise
    except Exception as error:
        return error  # raised when it is differentiated, if it is
    return bool(read_program(transport, program.jaxpr))


def _cotangent(result: Array) -> Any:
    return result if is_inexact(result) else np.zeros(result.shape, jax.dtypes.float0)
