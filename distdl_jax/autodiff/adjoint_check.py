"""That all workers run the same adjoints: derivatives are compared while tracing, and chained where they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from distdl_jax.autodiff.constant_inputs import told_of_constants
from distdl_jax.autodiff.custom_rules import moved_backward_only, moving, own_rules
from distdl_jax.autodiff.opaque_call import evaluated
from distdl_jax.checked_jit import function_name
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.programs.diagnosis import mismatch_text
from distdl_jax.programs.ir import Program, operations
from distdl_jax.programs.matching import find_mismatch
from distdl_jax.tracing.gradient_anchors import anchors_are_noted, depending_on, note_anchor
from distdl_jax.tracing.gradient_chain import Chain
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.tracing.traced import Traced
from distdl_jax.tracing.vmap_check import compared_as_a_whole
from distdl_jax.validation import check_numbers
from distdl_jax.world import Workers, World

# What JAX raises where Python asks for the value of something traced.
_VALUE_ASKED_FOR = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_OWN_RULES = "some worker's function has a derivative of its own, which may move data"
_UNTRACED = "some worker's function asks for values, so that it can't be traced"


def traced_derivative(
    world: World,
    team: Workers,
    derivative: Callable[[Callable[..., Any]], Callable[..., Any]],
    fun: Callable[..., Any],
    has_aux: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Sequence[int],
    transposes: str | None = None,
) -> Callable[..., Any] | None:
    """`derivative(fun)` as a function of `args` by its program, which completes with those of the other workers.

    Collective in `team`. `fun` is traced once. None, on all workers, where it can't be on some worker: it asks for
    values. `transposes`: the name of a derivative that transposes adjoints in their turn.

    **Raises:** what tracing raises; `PlanError`, on all workers, where that raises on another one, or the programs
    don't complete together whatever is done; `InvalidArgumentError`, on all, where `transposes` and a derivative of the
    user's moves data that its function does not.
    """
    name = f"the derivative of {function_name(fun)}"
    agree = partial(world.agree, team, name, decide=partial(_problem, name))
    try:
        check_numbers("args", args, places)
        with compared_as_a_whole():
            traced = Traced(fun, args, kwargs, places)
    except _VALUE_ASKED_FOR:
        agree(None)
        return None
    except PlanError:
        raise  # on all workers that it concerns
    except Exception as error:
        _tell(error, agree)
        raise

    tied, rules = False, own_rules(traced.program)
    problem = agree(_OWN_RULES) if rules else None
    while True:
        if problem == _UNTRACED:
            return None
        if problem is not None and problem.startswith("On worker"):
            raise PlanError(problem)
        if problem == _OWN_RULES:
            moves = moving(world.transport, rules)
            only_backward = moved_backward_only(world.transport, rules, moves) if transposes else None
            raised = next((error for error in moves if isinstance(error, Exception)), None)
            try:
                tied, line = world.agree(team, name, (set(moves) - {False} != set(), only_backward), _any)
            except PlanError as elsewhere:
                if raised is None:
                    raise
                raise raised from elsewhere  # the others, where it did not, are in what moves next there
            if line is not None:
                raise InvalidArgumentError(
                    f"dj.{transposes} can't pass through the derivative of your own at {line}: backward it moves data, "
                    "but its function does not, so it is not the transpose of that, and dj."
                    f"{transposes}, which transposes it, would give wrong numbers. For values of which several workers "
                    "hold copies use dj.replicated; otherwise move the data in the function."
                )
        elif problem is not None and tied:
            raise PlanError(problem + told_of_constants(world, team, name, traced.program.jaxpr))
        elif problem is not None:
            tied = True
        chain = Chain(world.transport, tied)

        def chained(*args: Any, chain: Chain = chain, **_: Any) -> Any:
            values, links = chain.evaluate(traced.program, traced.leaves(args))
            return depending_on(links, traced.result(values), has_aux)

        try:
            with compared_as_a_whole():
                candidate = Traced(derivative(chained), args, {}, places, as_call=True)
        except Exception as error:
            _tell(error, agree)
            raise
        problem = agree(read_program(world.transport, candidate.program.jaxpr))
        if problem is None:
            return partial(_evaluate, candidate, Chain(world.transport, tied=False))


def _tell(error: Exception, agree: Callable[[str], object]) -> None:
    """Tell the others what this worker raises, who may be elsewhere by now: it raises its own all the same."""
    try:
        agree(f"{type(error).__name__}: {error}")
    except PlanError as elsewhere:
        raise error from elsewhere


def _any(told: Mapping[int, tuple[bool, str | None]]) -> tuple[bool, str | None]:
    lines = (line for _, (_, line) in sorted(told.items()) if line is not None)
    return any(moves for moves, _ in told.values()), next(lines, None)


def _evaluate(traced: Traced, chain: Chain, *args: Any) -> Any:
    """What a traced function gives; its movements are noted where a derivative of it is taken."""
    if not anchors_are_noted():
        return traced.result(evaluated(chain.transport, traced.program, traced.leaves(args)))
    values, links = chain.evaluate(traced.program, traced.leaves(args))
    for link in links:
        note_anchor(link)
    return traced.result(values)


def _problem(name: str, contributions: Mapping[int, Program | str | None]) -> str | None:
    """Return why the workers' programs don't complete together, or can't be compared; None where they complete, or
    where workers without a program take part in them."""
    programs: dict[int, Program] = {}
    for worker, found in sorted(contributions.items()):
        if isinstance(found, str) and found != _OWN_RULES:
            return f"On worker {worker}, {name} can't be traced. {found}"
        if found is not None and not isinstance(found, str):
            programs[worker] = found
    if None in contributions.values():
        return _UNTRACED
    if _OWN_RULES in contributions.values():
        return _OWN_RULES
    partners = {
        worker
        for program in programs.values()
        for operation, _ in operations(program)
        for worker in ((operation.dest, operation.source) if operation.is_message else operation.team)
    }
    if not partners <= {None, *programs}:
        return None
    mismatch = find_mismatch(programs)
    return None if mismatch is None else mismatch_text(name, mismatch)
