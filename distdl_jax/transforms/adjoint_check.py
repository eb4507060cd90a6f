"""The check that all workers run the same adjoints: derivatives are compared while tracing, and chained where they
differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from distdl_jax.errors import CopiesWarning, InvalidArgumentError, PlanError
from distdl_jax.partitions.partition import Partition
from distdl_jax.tracing.adjoint_order import Chain, anchors_are_noted, note_anchor, tie_scalar, with_all_adjoints
from distdl_jax.tracing.constant_inputs import constants_text
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.tracing.traced import Traced
from distdl_jax.tracing.world import Workers, World
from distdl_jax.transforms.copies import Sum, copied_loss, copied_loss_text
from distdl_jax.transforms.custom_rules import custom_rules, line_moving_backward_only, moves_data
from distdl_jax.transforms.opaque_call import evaluate_opaquely
from distdl_jax.validation import check_numbers
from distdl_jax.watchdog.programs.diagnosis import problem_text
from distdl_jax.watchdog.programs.ir import Program, operations
from distdl_jax.watchdog.source_lines import function_name, warn_user

# What JAX raises where Python asks for the value of something traced.
_VALUE_ASKED_FOR = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_CUSTOM_RULES = "some worker's function has a derivative of its own, which may move data"
_DERIVATIVE = "the derivative of "
_UNTRACED = "some worker's function asks for values, so that it can't be traced"


def same_adjoints(
    workers: Partition,
    derivative: Callable[[Callable[..., Any]], Callable[..., Any]],
    fun: Callable[..., Any],
    has_aux: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Sequence[int],
    transposes: str | None = None,
    is_loss: bool = False,
) -> tuple[Callable[..., Any], bool]:
    """Return `derivative(fun)` of `args`, in which all workers run the same adjoints, and whether it is traced.

    Collective in `workers`. `fun` is traced once, except where it can't be on some worker, since it asks for values.
    `transposes`: the name of a derivative that transposes adjoints in their turn. `is_loss`: whether the user's scalars
    are added up, so that one that is the same on all workers is worth a warning.

    **Raises:** the exceptions of tracing; `PlanError`, on all workers, where that raises on another one, or the
    programs don't complete together whatever is done; `InvalidArgumentError`, on all, where `transposes` and a
    derivative of the user's moves data that its function does not.
    """
    together = workers.size > 1 and workers.active
    if together:
        world, team = workers.world, workers.ranks
        traced = _traced_derivative(world, team, derivative, fun, has_aux, args, kwargs, places, transposes, is_loss)
        if traced is not None:
            return traced, True
    dependent = with_all_adjoints(fun, has_aux, chained_from=places if together else None)
    return partial(derivative(dependent), **kwargs), False


def _traced_derivative(
    world: World,
    team: Workers,
    derivative: Callable[[Callable[..., Any]], Callable[..., Any]],
    fun: Callable[..., Any],
    has_aux: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Sequence[int],
    transposes: str | None,
    is_loss: bool,
) -> Callable[..., Any] | None:
    """Return `derivative(fun)` by a program that completes with the other workers'; None where it can't be traced."""
    name = f"{_DERIVATIVE}{function_name(fun)}"
    agree = partial(world.agree, team, name, decide=partial(_decide, name))
    try:
        check_numbers("args", args, places)
        with trace_context.set(sizes_agreed=True):  # the programs are compared
            traced = Traced(fun, args, kwargs, places)
    except _VALUE_ASKED_FOR:
        agree(None)
        return None
    except PlanError:
        raise  # on all workers that it concerns
    except Exception as error:
        _report(error, agree)
        raise

    tied, rules = False, custom_rules(traced.program)
    copied = copied_loss(traced.program.jaxpr) if is_loss and traced.first_is_traced else None
    problem, warning = agree(_CUSTOM_RULES) if rules else (None, None)
    while True:
        if problem == _UNTRACED:
            return None
        if problem == _CUSTOM_RULES:
            tied = _any_rule_moves(world, team, name, rules, transposes)
        elif problem is not None:
            if problem.startswith("On worker"):
                raise PlanError(problem)
            if tied:
                raise PlanError(problem + constants_text(world, team, name, traced.program.jaxpr))
            tied = True
        chain = Chain(world.transport, tied)

        def chained(*args: Any, chain: Chain = chain, **_: Any) -> Any:
            values, links = chain.evaluate(traced.program, traced.leaves(args))
            return tie_scalar(traced.result(values), links, has_aux)

        try:
            with trace_context.set(sizes_agreed=True):  # the programs are compared
                candidate = Traced(derivative(chained), args, {}, places, as_call=True)
        except Exception as error:
            _report(error, agree)
            raise
        problem, warning = agree(_Derivative(read_program(world.transport, candidate.program.jaxpr), copied))
        if problem is None:
            if warning is not None and world.rank == team[0]:
                warn_user(warning, CopiesWarning)
            return partial(_evaluate, candidate, Chain(world.transport, tied=False))


def _any_rule_moves(world: World, team: Workers, name: str, rules: list[Any], transposes: str | None) -> bool:
    """Return whether a derivative of the user's moves data on some worker; collective in `team`."""
    moves = moves_data(world.transport, rules)
    line = line_moving_backward_only(world.transport, rules, moves) if transposes else None
    raised = next((error for error in moves if isinstance(error, Exception)), None)
    try:
        any_moves, line = world.agree(team, name, (any(moves), line), _any)
    except PlanError as elsewhere:
        if raised is None:
            raise
        raise raised from elsewhere  # the others, where it did not, are in what moves next there
    if line is not None:
        raise InvalidArgumentError(
            f"dj.{transposes} can't pass through the derivative of your own at {line}: backward it moves data, but its "
            f"function does not, so it is not the transpose of that, and dj.{transposes}, which transposes it, would "
            "give wrong numbers. For values of which several workers hold copies use dj.replicated; otherwise move the "
            "data in the function."
        )
    return bool(any_moves)


def _any(found: Mapping[int, tuple[bool, str | None]]) -> tuple[bool, str | None]:
    lines = (line for _, (_, line) in sorted(found.items()) if line is not None)
    return any(moves for moves, _ in found.values()), next(lines, None)


def _report(error: Exception, agree: Callable[[str], object]) -> None:
    """Report an error to the other workers, who may be elsewhere by now: this one raises it all the same."""
    try:
        agree(f"{type(error).__name__}: {error}")
    except PlanError as elsewhere:
        raise error from elsewhere


def _evaluate(traced: Traced, chain: Chain, *args: Any) -> Any:
    """Return the result of a traced function; its movements are noted where a derivative of it is taken."""
    if not anchors_are_noted():
        return traced.result(evaluate_opaquely(chain.transport, traced.program, traced.leaves(args)))
    values, links = chain.evaluate(traced.program, traced.leaves(args))
    for link in links:
        note_anchor(link)
    return traced.result(values)


class _Derivative(NamedTuple):
    """A worker's program, and its loss where it may count more than once."""

    program: Program
    copied: Sum | None


def _decide(name: str, contributions: Mapping[int, _Derivative | str | None]) -> tuple[str | None, str | None]:
    """Return the problem of the workers' programs, if any, and the warning of their losses."""
    derivatives = {worker: one for worker, one in contributions.items() if isinstance(one, _Derivative)}
    programs = {worker: one.program if isinstance(one, _Derivative) else one for worker, one in contributions.items()}
    losses = {worker: one.copied for worker, one in derivatives.items()}
    return _problem(name, programs), copied_loss_text(name.removeprefix(_DERIVATIVE), losses)


def _problem(name: str, contributions: Mapping[int, Program | str | None]) -> str | None:
    """Return why the workers' programs don't complete together, or can't be compared; None where they complete, or
    where workers without a program take part in them."""
    programs: dict[int, Program] = {}
    for worker, found in sorted(contributions.items()):
        if isinstance(found, str) and found != _CUSTOM_RULES:
            return f"On worker {worker}, {name} can't be traced. {found}"
        if found is not None and not isinstance(found, str):
            programs[worker] = found
    if None in contributions.values():
        return _UNTRACED
    if _CUSTOM_RULES in contributions.values():
        return _CUSTOM_RULES
    partners = {
        worker
        for program in programs.values()
        for operation, _ in operations(program)
        for worker in ((operation.dest, operation.source) if operation.is_message else operation.team)
    }
    return problem_text(name, programs) if partners <= {None, *programs} else None
