"""What a program moves on one worker although it depends on nothing there: constants that JAX made of empty arrays.

JAX returns a constant from `y[array]`, `.at[].set`, `.at[].add`, `insert` and `segment_sum` where y has no elements. It
has no derivative, and `jax.vmap` gives it no dimension, so that this worker's program differs from the others'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from distdl_jax.compat import scan_counts
from distdl_jax.errors import CONSTANTS
from distdl_jax.tracing.gradient_chain import anchor_of
from distdl_jax.tracing.program_reader import line_of_equation
from distdl_jax.world import Workers, World

MOST = 3
"""So many are named."""


def told_of_constants(world: World, team: Workers, name: str, jaxpr: Any) -> str:
    """What to add to an error that all workers of `team` raise of the function `name`: "" where none moves any.

    Collective in `team`; `jaxpr` is this worker's program, before it is differentiated if that is known.
    """
    text: str = world.agree(team, f"what is constant in {name}", tuple(_moved(jaxpr)), _text)
    return text


def _text(told: Mapping[int, tuple[str, ...]]) -> str:
    found = [f"on worker {worker} {constant}" for worker, theirs in sorted(told.items()) for constant in theirs]
    if not found:
        return ""
    return f" Beware of constants: {'; '.join(found[:MOST])}. {CONSTANTS}"


def _moved(jaxpr: Any) -> dict[str, None]:
    """In words, each constant without elements that a program moves, once."""
    return dict.fromkeys(_read(jaxpr, [None] * len(jaxpr.invars)))


def _read(jaxpr: Any, given: Sequence[str | None]) -> Iterator[str]:
    """`given`: of each argument how it was made, if it is a constant; "" of one with elements."""
    made: dict[Any, str | None] = dict.fromkeys(jaxpr.constvars)
    made.update(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        args = ["" if isinstance(atom, Literal) else made[atom] for atom in eqn.invars]
        moves = anchor_of(eqn) is not None
        if moves and args[-1]:
            yield f"{args[-1]} moves in {line_of_equation(eqn)}"
        if not moves:
            for inner in jaxprs_in_params(eqn.params):
                yield from _read(inner, _of_body(eqn, inner, args))
        constant = not eqn.effects and not moves and None not in args
        made.update((var, _made(eqn, var, args) if constant else None) for var in eqn.outvars)


def _made(eqn: Any, var: Any, args: Sequence[str | None]) -> str:
    """How a constant was made; "" of one with elements."""
    if var.aval.size:
        return ""
    before = [arg for arg in args if arg]
    return before[0] if before else f"{var.aval.str_short()}, made in {line_of_equation(eqn)},"


def _of_body(eqn: Any, body: Any, args: Sequence[str | None]) -> Sequence[str | None]:
    """The same of the arguments of a body; what is carried may change."""
    if eqn.primitive.name == "scan":
        consts, _ = scan_counts(eqn)
        return [*args[:consts], *[None] * (len(args) - consts)]
    if eqn.primitive.name == "cond":
        return args[1:]
    return args if len(body.invars) == len(args) and eqn.primitive.name != "while" else [None] * len(body.invars)
