"""That all workers run the same adjoints: derivatives are compared while tracing, and chained where they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from distdl_jax.backends.base import Workers, World
from distdl_jax.backends.jaxpr_reader import read_program
from distdl_jax.errors import PlanError
from distdl_jax.jit import function_name
from distdl_jax.primitives.gradient_anchors import anchors_are_noted, depending_on, note_anchor
from distdl_jax.primitives.gradient_chain import Chain
from distdl_jax.programs.diagnosis import mismatch_text
from distdl_jax.programs.ir import Program, operations
from distdl_jax.programs.matching import find_mismatch
from distdl_jax.traced import Traced

# What JAX raises where Python asks for the value of something traced.
_VALUE_ASKED_FOR = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
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
) -> Callable[..., Any] | None:
    """`derivative(fun)` as a function of `args` by its program, which completes with those of the other workers.

    Collective in `team`. `fun` is traced once. None, on all workers, where it can't be on some worker: it asks for
    values.

    **Raises:** what tracing raises; `PlanError`, on all workers, where that raises on another one, or the programs
    don't complete together whatever is done.
    """
    name = f"the derivative of {function_name(fun)}"
    try:
        traced = Traced(fun, args, kwargs, places)
    except _VALUE_ASKED_FOR:
        world.agree(team, name, None, partial(_problem, name))
        return None

    for tied in (False, True):
        chain = Chain(world.transport, tied)

        def chained(*args: Any, chain: Chain = chain, **_: Any) -> Any:
            values, links = chain.evaluate(traced.program, traced.leaves(args))
            return depending_on(links, traced.result(values), has_aux)

        try:
            candidate = Traced(derivative(chained), args, {}, places)
        except Exception as error:
            world.agree(team, name, f"{type(error).__name__}: {error}", partial(_problem, name))
            raise
        mine = read_program(world.transport, candidate.program.jaxpr)
        problem = world.agree(team, name, mine, partial(_problem, name))
        if problem is None:
            return partial(_evaluate, candidate, Chain(world.transport, tied=False))
        if problem == _UNTRACED:
            return None
        if problem.startswith("On worker"):
            break
    raise PlanError(problem)


def _evaluate(traced: Traced, chain: Chain, *args: Any) -> Any:
    """What a traced function gives; its movements are noted where a derivative of it is taken."""
    if not anchors_are_noted():
        return traced(*args)
    values, links = chain.evaluate(traced.program, traced.leaves(args))
    for link in links:
        note_anchor(link)
    return traced.result(values)


def _problem(name: str, told: Mapping[int, Program | str | None]) -> str | None:
    """What keeps the workers' programs from completing; nothing where other workers take part in them, too."""
    programs: dict[int, Program] = {}
    for worker, program in sorted(told.items()):
        if isinstance(program, str):
            return f"On worker {worker}, {name} can't be traced. {program}"
        if program is not None:
            programs[worker] = program
    if len(programs) < len(told):
        return _UNTRACED
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
