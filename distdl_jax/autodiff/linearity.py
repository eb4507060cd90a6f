"""Whether a function is linear: whether what its adjoint does depends on where it is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from distdl_jax.compat import scan_counts

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")


def depends_on_first(fun: Callable[..., Any], first: Any, *rest: Any) -> bool:
    """Whether what `fun` returns for its arguments depends on the numbers in `first`, as far as its program tells.

    Arrays without elements don't count, nor what is but tied to something. Whatever is not known well is taken to
    depend on all that it gets.
    """
    program = jax.make_jaxpr(fun)(first, *rest)
    number = len(jax.tree.leaves(first))
    given = [place < number for place in range(len(program.jaxpr.invars))]
    return any(_dependent(program.jaxpr, given))


def _dependent(program: Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Which results of a program depend on those of its arguments that are marked."""
    marked: dict[Any, bool] = dict.fromkeys(program.constvars, False)
    marked.update(zip(program.invars, given, strict=True))

    def of(atom: Any) -> bool:
        return not isinstance(atom, Literal) and marked[atom] and atom.aval.size > 0

    for equation in program.eqns:
        results = _of_equation(equation, [of(atom) for atom in equation.invars])
        marked.update(zip(equation.outvars, results, strict=True))
    return [of(atom) for atom in program.outvars]


def _of_equation(equation: Any, given: list[bool]) -> list[bool]:
    name, params = equation.primitive.name, equation.params
    everything = [any(given)] * len(equation.outvars)
    if not any(given):
        return everything
    if name == "tie":
        return [given[0]]
    if name == "optimization_barrier":
        return given
    if name == "scan":
        return _of_scan(equation, given)
    if name == "cond":
        of_branches = [_dependent(branch.jaxpr, given[1:]) for branch in params["branches"]]
        return everything if given[0] else [any(results) for results in zip(*of_branches, strict=True)]
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("call")))
    body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    if (name in _CALLS or name == "custom_vmap_call") and isinstance(body, Jaxpr) and len(body.invars) == len(given):
        return _dependent(body, given)
    return everything


def _of_scan(equation: Any, given: list[bool]) -> list[bool]:
    """What is carried depends on all that it does in any pass."""
    consts, carried = scan_counts(equation)
    now = list(given)
    while True:
        results = _dependent(equation.params["jaxpr"].jaxpr, now)
        after = [a or b for a, b in zip(now[consts : consts + carried], results[:carried], strict=True)]
        if after == now[consts : consts + carried]:
            return results
        now[consts : consts + carried] = after
