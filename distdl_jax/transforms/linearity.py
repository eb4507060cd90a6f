"""Whether a function is linear: whether its adjoint depends on the point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from distdl_jax.tracing.jaxprs import Branches, DataFlow, structure


def depends_on_first(fun: Callable[..., Any], first: Any, *rest: Any) -> bool:
    """Return whether the result of `fun` depends on the numbers in `first`, as far as its program tells.

    Arrays without elements don't count, nor do values that are only tied to something. Unknown operations are assumed
    to depend on all their inputs.
    """
    program = jax.make_jaxpr(fun)(first, *rest)
    number = len(jax.tree.leaves(first))
    avals: list[Any] = program.in_avals
    return any(_Dependence().run(program.jaxpr, [n < number and aval.size > 0 for n, aval in enumerate(avals)]))


class _Dependence(DataFlow[bool]):
    """Whether a value with elements depends on some of the arguments."""

    of_literals = of_constants = False
    unknown = True

    def equation(self, eqn: Any, args: list[bool]) -> list[bool]:
        return [depends and var.aval.size > 0 for depends, var in zip(self._all(eqn, args), eqn.outvars, strict=True)]

    def _all(self, eqn: Any, args: list[bool]) -> list[bool]:
        everything = [any(args)] * len(eqn.outvars)
        if not any(args):
            return everything
        if eqn.primitive.name == "tie":
            return [args[0]]
        if eqn.primitive.name == "optimization_barrier":
            return args
        if isinstance(structure(eqn), Branches) and args[0]:
            return everything
        return self.through_bodies(eqn, args) or everything

    def join(self, one: bool, other: bool) -> bool:
        return one or other
