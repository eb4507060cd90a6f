"""Arrays without elements that a program moves on one worker, although JAX made constants of them there.

JAX returns a constant from `y[array]`, `.at[].set`, `.at[].add`, `insert` and `segment_sum` where y has no elements. It
has no derivative, and `jax.vmap` gives it no dimension, so that this worker's program differs from the others'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distdl_jax.errors import CONSTANTS
from distdl_jax.tracing.adjoint_order import anchor_of
from distdl_jax.tracing.jaxprs import DataFlow, Scan, structure
from distdl_jax.tracing.program_reader import line_of_equation
from distdl_jax.tracing.world import Workers, World

MOST = 3
"""So many are named."""


def constants_text(world: World, team: Workers, name: str, jaxpr: Any) -> str:
    """Return what to add to an error that all workers of `team` raise of the function `name`: "" without constants.

    Collective in `team`; `jaxpr` is this worker's program, before it is differentiated if that is known.
    """
    flow = _Constants()
    flow.run(jaxpr, [None] * len(jaxpr.invars))
    text: str = world.agree(team, f"what is constant in {name}", tuple(flow.moved), _text)
    return text


def _text(moved: Mapping[int, tuple[str, ...]]) -> str:
    found = [f"on worker {worker} {constant}" for worker, constants in sorted(moved.items()) for constant in constants]
    if not found:
        return ""
    return f" Beware of constants: {'; '.join(found[:MOST])}. {CONSTANTS}"


class _Constants(DataFlow[str | None]):
    """How each value was made, if it is a constant: "" with elements, None of what is no constant.

    - `moved`: in words, each constant without elements that is moved.
    """

    of_literals = ""
    of_constants = None
    unknown = None

    def __init__(self) -> None:
        self.moved: dict[str, None] = {}

    def equation(self, eqn: Any, args: list[str | None]) -> list[str | None]:
        if anchor_of(eqn) is not None:
            if args[-1]:
                self.moved[f"{args[-1]} moves in {line_of_equation(eqn)}"] = None
            return [None] * len(eqn.outvars)
        scan = structure(eqn)
        # What is carried, or scanned over, may change.
        same = args if not isinstance(scan, Scan) else args[: scan.constants] + [None] * (len(args) - scan.constants)
        self.through_bodies(eqn, same)
        if eqn.effects or None in args:
            return [None] * len(eqn.outvars)
        before = next(filter(None, args), None)
        line = line_of_equation(eqn)
        return ["" if var.aval.size else before or f"{var.aval.str_short()}, made in {line}," for var in eqn.outvars]

    def join(self, one: str | None, other: str | None) -> str | None:
        return one if one == other else None
