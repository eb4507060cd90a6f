"""Programs before they are evaluated: what is written twice, which values are views, what is read, wanted cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from distdl_jax.distribute.layouts import Cut
from distdl_jax.jax_compat import name_and_params
from distdl_jax.tracing.jaxprs import Call, structure

ELEMENTWISE: set[str] = set()
"""The primitives that work element by element; filled by their rules."""

SCALING = {"mul", "div", "neg", "convert_element_type", "copy", "copy_p", "add_any"}
"""Linear primitives after which there is one sum, if there was one, or two of the same derivative."""

VIEWS = {"slice", "split", "rev", "pad", "concatenate"}
"""Primitives whose results are views of their operand, which cost nothing until they are read."""


@dataclass(frozen=True, eq=False)
class Analysis:
    """A program without repetitions, and what it does with its values.

    - `once`: values that are read once. `added`: those to which a derivative adds.
    - `last_uses`: by the number of an equation, the values that nothing uses after it.
    - `roots`: for each value that is a view, the value behind. `views_of`: by that one, the equations of its views.
    - `read`: the values that more than views read.
    """

    jaxpr: Any
    once: frozenset[Any]
    added: frozenset[Any]
    last_uses: Mapping[int, Sequence[Any]]
    roots: Mapping[Any, Any]
    views_of: Mapping[Any, Sequence[int]]
    read: frozenset[Any]

    @classmethod
    @lru_cache(maxsize=256)  # a body of a loop is evaluated several times
    def of(cls, jaxpr: Any) -> Analysis:
        """Analyse a program."""
        jaxpr = without_repetitions(jaxpr, ELEMENTWISE | VIEWS)
        roots = view_roots(jaxpr)
        operands = [atom for eqn in jaxpr.eqns for atom in variables(eqn.invars)]
        views_of: dict[Any, list[int]] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            if _is_in(roots, eqn):
                views_of.setdefault(roots[eqn.outvars[0]], []).append(number)
        counts = Counter([*operands, *variables(jaxpr.outvars)])
        return cls(
            jaxpr,
            frozenset(var for var, count in counts.items() if count == 1),
            frozenset(var for eqn in jaxpr.eqns if eqn.primitive.name == "add_any" for var in variables(eqn.invars)),
            _last_uses(jaxpr),
            roots,
            views_of,
            frozenset(var for eqn in jaxpr.eqns if not _is_in(roots, eqn) for var in variables(eqn.invars)),
        )

    def is_view(self, eqn: Any) -> bool:
        """Say whether an equation makes nothing but views, or multiples of them."""
        return _is_in(self.roots, eqn)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return atoms without literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    kept = set(variables(jaxpr.outvars))
    last = {
        var: number
        for number, eqn in enumerate(jaxpr.eqns)
        for var in variables((*eqn.invars, *eqn.outvars))
        if var not in kept
    }
    uses: dict[int, list[Any]] = {}
    for var, number in last.items():
        uses.setdefault(number, []).append(var)
    return uses


# --- what is written twice --------------------------------------------------------------------------------------------


def without_repetitions(jaxpr: Any, pure: Collection[str]) -> Any:
    """Return a program without equations, of `pure` primitives, that compute again what an earlier one has.

    JAX's derivatives have many: each term of a stencil makes its own -dy. As one value, its neighbours are fetched
    once.
    """
    first_of: dict[Any, Any] = {}
    computed: dict[Hashable, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        if any(atom in first_of for atom in eqn.invars if not isinstance(atom, Literal)):
            eqn = eqn.replace(invars=[_first(atom, first_of) for atom in eqn.invars])
        key = _identity(eqn) if eqn.primitive.name in pure and not eqn.effects else None
        if key is not None and key in computed:
            first_of.update(zip(eqn.outvars, computed[key], strict=True))
            continue
        if key is not None:
            computed[key] = eqn.outvars
        eqns.append(eqn)
    if not first_of:
        return jaxpr
    return jaxpr.replace(eqns=eqns, outvars=[_first(atom, first_of) for atom in jaxpr.outvars])


def _first(atom: Any, first_of: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, Literal) else first_of.get(atom, atom)


def _identity(eqn: Any) -> Hashable | None:
    """Return a key that is equal for equations that compute the same; None if there is none."""
    atoms = tuple(
        (str(atom.aval), np.asarray(atom.val).tobytes()) if isinstance(atom, Literal) else atom for atom in eqn.invars
    )
    key = eqn.primitive, atoms, tuple(sorted(eqn.params.items())), tuple(str(var.aval) for var in eqn.outvars)
    try:
        hash(key)
    except TypeError:  # a parameter that is a list
        return None
    return key


# --- views -----------------------------------------------------------------------------------------------------------


def view_roots(jaxpr: Any, is_plain: bool = False) -> dict[Any, Any]:
    """Return, for each value that is a view of another one, or of its views, that other one.

    `is_plain`: whether the scalars among the arguments are literals.
    """
    roots: dict[Any, Any] = {}
    plain = {var for var in jaxpr.invars if is_plain and not var.aval.shape}
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    viewed = {atom for eqn in jaxpr.eqns if _makes_views(eqn) for atom in eqn.invars if not isinstance(atom, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if is_multiplication(eqn) and eqn.outvars[0] in viewed:
            viewed.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    for eqn in jaxpr.eqns:
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal) and atom not in plain]
        arrays = {roots.get(atom, atom) for atom in read}
        if not arrays and not any(var.aval.shape for var in eqn.outvars):
            plain.update(eqn.outvars)
        elif len(arrays) == 1 and (
            _makes_views(eqn)
            or _joins_pieces(eqn, made_by)
            or (is_multiplication(eqn) and (eqn.outvars[0] in viewed or read[0] in roots))
        ):
            roots.update(dict.fromkeys(eqn.outvars, arrays.pop()))
    return roots


def _makes_views(eqn: Any) -> bool:
    """Say whether an equation of one array makes nothing but views of it."""
    name, params = name_and_params(eqn)
    match structure(eqn):
        case Call("jit", body):
            roots = view_roots(body.jaxpr, is_plain=True)
            return not body.consts and all(var in roots for var in body.jaxpr.outvars)
    return name in VIEWS and not any(between for _, _, between in params.get("padding_config", ()))


def _joins_pieces(eqn: Any, made_by: dict[Any, Any]) -> bool:
    """Say whether an equation adds two padded pieces that don't overlap, as the adjoint of a roll does."""
    pads = [made_by.get(atom) for atom in eqn.invars if not isinstance(atom, Literal)]
    if eqn.primitive.name != "add_any" or len(pads) != 2 or any(p is None or p.primitive.name != "pad" for p in pads):
        return False
    n = eqn.outvars[0].aval.shape
    covered = [
        [(low, m - high) for m, (low, high, _) in zip(n, p.params["padding_config"], strict=True)]
        for p in pads
        if p is not None
    ]
    differ = [(a, b) for a, b in zip(*covered, strict=True) if a != b]
    return len(differ) == 1 and max(low for low, _ in differ[0]) >= min(stop for _, stop in differ[0])


def is_multiplication(eqn: Any) -> bool:
    """Say whether an equation multiplies one array by a finite number: then views of it may be multiplied instead."""
    name, arrays = eqn.primitive.name, [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    if name not in ("mul", "neg", "div") or len(arrays) != 1 or (name == "div" and arrays[0] is not eqn.invars[0]):
        return False
    numbers = [atom.val for atom in eqn.invars if isinstance(atom, Literal)]
    out = eqn.outvars[0].aval
    floating = jnp.issubdtype(out.dtype, jnp.inexact) and arrays[0].aval.dtype == out.dtype
    return floating and bool(out.shape) and arrays[0].aval.shape == out.shape and all(map(np.isfinite, numbers))


def _is_in(roots: Mapping[Any, Any], eqn: Any) -> bool:
    return bool(eqn.outvars) and all(var in roots for var in eqn.outvars)


# --- cuts of results --------------------------------------------------------------------------------------------------


def wanted_cuts(jaxpr: Any, whole: Sequence[Cut | None]) -> dict[Any, Cut]:
    """Return the values from which only elementwise functions lead to results in a known cut, whole or as a spec says.

    They get this cut once: otherwise each of Adam's moments of a gradient that falls in another one would be moved.
    """
    wanted: dict[Any, Cut] = {}
    spoiled = set()

    def want(atom: Any, cut: Cut | None) -> None:
        if isinstance(atom, Literal) or atom in spoiled:
            return
        if cut is None or wanted.get(atom, cut) != cut:
            spoiled.add(atom)
            wanted.pop(atom, None)
        else:
            wanted[atom] = cut

    for atom, cut in zip(jaxpr.outvars, whole, strict=True):
        want(atom, cut)
    for eqn in reversed(jaxpr.eqns):
        for atom, cut in zip(eqn.invars, _leads_whole(eqn, wanted), strict=True):
            want(atom, cut)
    return wanted


def _leads_whole(eqn: Any, wanted: dict[Any, Cut]) -> list[Cut | None]:
    """Return for each operand the cut of the results to which it leads, element by element, if that is known."""
    cuts = [wanted.get(var) for var in eqn.outvars]
    match structure(eqn):
        case Call("jit", body):
            inside = wanted_cuts(body.jaxpr, cuts)
            return [inside.get(var) for var in body.jaxpr.invars]
    if eqn.primitive.name not in ELEMENTWISE or not cuts or any(cut != cuts[0] for cut in cuts):
        return [None] * len(eqn.invars)
    shape = eqn.outvars[0].aval.shape
    return [cuts[0] if x.aval.shape == shape else None if x.aval.shape or cuts[0] is None else () for x in eqn.invars]
