"""The interpreter: a program on whole arrays, evaluated on blocks, each equation by the rule of its primitive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Literal

from distdl_jax.distribute.layouts import Axes, Cut, axes_in, trimmed, uncut
from distdl_jax.distribute.movements import Movements
from distdl_jax.distribute.programs import (
    ELEMENTWISE,
    SCALING,
    VIEWS,
    Analysis,
    is_multiplication,
    variables,
    wanted_cuts,
)
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.distribute.views import View, multiplied
from distdl_jax.errors import PlanError
from distdl_jax.jax_compat import at_line_of, bound_again, expansion, name_and_params
from distdl_jax.kernels.dtypes import accumulation_dtype, wide_as
from distdl_jax.tracing.program_reader import own_line_of_equation

Rule = Callable[..., Any]

RULES: dict[str, Rule] = {}
"""By primitive: `rule(site, *operands)` returns a Tensor, or a list of them."""

LINEAR: dict[str, Callable[[Site], Sequence[int] | None]] = {}
"""By primitive, for an equation: the operands in which it is linear together; None if it is linear in each of them
alone. A pending sum of them stays pending."""

BUCKET_BYTES = 2**25
"""Sums travel together in messages of at most so many bytes, unless a single one is larger."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of some primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Site:
    """An equation of the program, for its rule.

    - `params`: of the primitive. `outs`: the types of the whole results; `shape`: of the first.
    - `wanted`: for each result, the cut in which it is to be, if that is known; `wants_whole`: whether all are to be
      whole.
    - `is_update`: whether it computes element by element what is to be in a known cut.
    - `is_scaling`: whether it does nothing but scale a value that nothing else reads.
    """

    def __init__(self, run: Run, eqn: Any, wanted: Sequence[Cut | None] = ()) -> None:
        self.run, self.movements, self.mesh, self.eqn = run, run.movements, run.movements.mesh, eqn
        self.name, self.params = name_and_params(eqn)
        self.outs = [var.aval for var in eqn.outvars]
        self.shape: tuple[int, ...] = self.outs[0].shape if self.outs else ()
        self.wanted = tuple(wanted)
        self.wants_whole = bool(wanted) and all(cut is not None and not any(cut) for cut in wanted)
        self.is_update = bool(wanted) and None not in self.wanted and self.name in ELEMENTWISE
        self.is_scaling = False

    def bind(self, *arrays: Any, **changed: Any) -> Any:
        """Return the primitive's result for this worker's arrays, with changed parameters."""
        return self.eqn.primitive.bind(*arrays, **{**self.params, **changed})

    def value(self, block: Any, cut: Iterable[Sequence[int]], pending: Iterable[int] = (), n: int = 0) -> Tensor:
        """Return result number `n`, from this worker's block of it."""
        out = self.outs[n]
        result = Tensor(self.movements, out.shape, out.dtype, trimmed(cut, out.shape), block, pending)
        result.wanted = self.wanted[n] if self.wanted else None
        return result

    def lazy(self, make: Callable[[Cut], Any], cut: Cut | None = None) -> Tensor:
        """Return a lazy result; `cut` is the one that it would have."""
        out = self.outs[0]
        return Tensor(self.movements, out.shape, out.dtype, cut or uncut(out.shape), make=make)

    def like(self, x: Tensor, block: Any, shape: Sequence[int], cut: Iterable[Sequence[int]]) -> Tensor:
        """Return a value between operand and result, of x's dtype."""
        return Tensor(self.movements, shape, x.dtype, trimmed(cut, shape), block)

    def claim(self, wishes: Iterable[tuple[Any, Axes, int]]) -> dict[Any, Axes]:
        """Grant wishes (dimension, axes, number of elements), the largest first: an axis cuts one dimension."""
        granted: dict[Any, Axes] = {}
        taken: set[int] = set()
        for dimension, axes, _ in sorted(wishes, key=lambda wish: -wish[2]):
            if axes and dimension not in granted and not taken & set(axes):
                granted[dimension] = axes
                taken |= set(axes)
        return granted

    def is_too_large(self, x: Tensor) -> bool:
        """Say whether a value has more bytes than may be made whole."""
        return self.run.gather is not None and x.bytes > self.run.gather

    def refuse(self, why: str, *operands: Tensor, cure: str = "") -> PlanError:
        """Return the error for an equation that can't work on these layouts."""
        cure = cure or (
            "Lay the operands out otherwise by dj.constrain, or let each worker compute it on whole arrays: "
            f"`gather={self._bytes(operands)}`, or `gather=None`, of dj.distribute."
        )
        return PlanError(f"`{self.name}`{self._shown(operands)} at {self.run.line()} {why}. {cure}")

    def _shown(self, operands: Sequence[Tensor]) -> str:
        def shown(x: Tensor) -> str:
            cuts = [f"dimension {d} in {self.mesh.size(axes)}" for d, axes in enumerate(x.cut) if axes]
            return f"{x.dtype}{list(x.shape)}" + (f", cut along {' and '.join(cuts)}" if cuts else "")

        return f" of {'; '.join(map(shown, operands))}" if operands else ""

    @staticmethod
    def _bytes(operands: Sequence[Tensor]) -> int:
        return sum(x.bytes for x in operands if not x.is_everywhere)


@dataclass
class Run:
    """One program's evaluation.

    - `gather`: the largest number of bytes of operands that are made whole for a primitive that can't work on blocks;
      None for no limit.
    - `frames`: the values of the programs that are being evaluated, the outermost first: of functions in functions.
    - `eqns`: the equations that are being evaluated, the outermost first.
    """

    movements: Movements
    gather: int | None
    frames: list[dict[Any, Tensor]] = field(default_factory=list)
    eqns: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.movements.gather = self.gather

    def inside(self) -> Run:
        """Return the evaluation of a body: what was fetched, or is pending outside of it, stays outside."""
        return Run(self.movements, self.gather, eqns=self.eqns)

    def line(self) -> str:
        """Return the user's line that is evaluated."""
        return next(filter(None, map(own_line_of_equation, reversed(self.eqns))), "an unknown line")

    def evaluate(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Tensor], whole: Sequence[Cut | None] = ()
    ) -> list[Tensor]:
        """Return the results of a program, from its arguments; `whole`: in which cuts they are to be, if known."""
        program = Analysis.of(jaxpr)
        jaxpr, movements = program.jaxpr, self.movements
        wanted = wanted_cuts(jaxpr, whole or [None] * len(jaxpr.outvars))
        env: dict[Any, Tensor] = {var: _constant(movements, x) for var, x in zip(jaxpr.constvars, consts, strict=True)}
        env.update(zip(jaxpr.invars, args, strict=True))
        for x in env.values():
            if x.is_exact is None:
                x.is_exact = not jnp.issubdtype(x.dtype, jnp.inexact)
        is_read = program.read if self.frames else program.read.union(variables(jaxpr.outvars))
        done: set[int] = set()

        def read(atom: Any) -> Tensor:
            return _constant(movements, atom.val) if isinstance(atom, Literal) else env[atom]

        def step(number: int) -> None:
            eqn = jaxpr.eqns[number]
            done.add(number)
            with at_line_of(eqn), wide_as(atom.aval for atom in (*eqn.invars, *eqn.outvars)):
                site = Site(self, eqn, [wanted.get(var) for var in eqn.outvars])
                site.is_scaling = site.name in SCALING and program.once.issuperset(variables(eqn.invars))
                operands = [read(atom) for atom in eqn.invars]
                results = self._results(site, operands, program.is_view(eqn))
            for var, result in zip(eqn.outvars, results, strict=True):
                result.is_wanted_whole = var in wanted
                result.is_read = result.is_read or var in is_read
                result.collects = var in program.added
                result.is_carried = any(x.is_carried for x in operands)
                if result.is_exact is None:
                    result.is_exact = all(x.is_exact for x in operands)
                env[var] = result
            for var in eqn.outvars:
                look_ahead(var)

        def look_ahead(var: Any) -> None:
            """Make all views of a new value, which costs nothing: the first that is read fetches for all."""
            if not (env[var].pending or env[var].is_lazy):
                for number in program.views_of.get(var, ()):
                    step(number)

        self.frames.append(env)
        for var in (*jaxpr.constvars, *jaxpr.invars):
            look_ahead(var)
        for number in range(len(jaxpr.eqns)):
            if number not in done:
                step(number)
            for var in program.last_uses.get(number, ()):
                env.pop(var, None)
        results = [read(atom) for atom in jaxpr.outvars]
        self.frames.pop()
        return results

    def _results(self, site: Site, args: list[Tensor], is_view: bool) -> list[Tensor]:
        self.eqns.append(site.eqn)
        multiple = self.multiple(site, args) if is_view and is_multiplication(site.eqn) else None
        results = self.apply(site, args) if multiple is None else multiple
        self.eqns.pop()
        _let_know(site, args, results)
        return results

    def apply(self, site: Site, args: list[Tensor]) -> list[Tensor]:
        """Return the results of one equation."""
        if self.movements.notes:
            self.movements.asked_by = self.line(), site.name
        found = RULES.get(site.name)
        # The expansion of what has a derivative of its own would be differentiated in its place.
        is_discrete = not any(jnp.issubdtype(out.dtype, jnp.inexact) for out in site.outs)
        if found is None and is_discrete and (body := expansion(site.eqn)) is not None:
            return self.evaluate(body.jaxpr, body.consts, args, site.wanted)
        if found is None:
            return self._on_whole_arrays(site, args, "has no rule for blocks")
        cut = sum(x.bytes for x in args if any(x.cut) and not x.is_lazy)
        if site.wants_whole and self.gather is not None and cut > self.gather:
            site.wants_whole = site.is_update = False  # computed on blocks, and refused where it is returned
        kept, args = self._kept_pending(site, args)
        if not kept and site.name not in CALLS:
            self.settle_together(args)
            # A view of length 1 isn't cut, but nobody has it yet: a view of it fetches what it needs.
            is_unread = site.name in VIEWS | {"add_any"} and any(isinstance(x, View) for x in args)
            everywhere = bool(args) and all(x.is_everywhere and not x.is_lazy for x in args)
            if everywhere and not is_unread and site.name not in ALWAYS_ASKED:
                return self._bound(site, args)
        results = found(site, *args)
        results = list(results) if isinstance(results, list | tuple) else [results]
        if not kept:
            return results
        return [site.value(y.terms(y.cut, y.pending), y.cut, y.pending | kept, n) for n, y in enumerate(results)]

    def multiple(self, site: Site, args: Sequence[Tensor]) -> list[Tensor] | None:
        """Return a multiple of a value that views read, or of a view, as a view; None if it isn't cut."""
        n, x = next((n, x) for n, x in enumerate(args) if x.shape)
        if x.pending or x.is_lazy or not any(x.cut):
            return None
        numbers = [None if k == n else other.whole() for k, other in enumerate(args)]
        return [multiplied(x, lambda block: site.bind(*(block if each is None else each for each in numbers)))]

    def _on_whole_arrays(self, site: Site, args: Sequence[Tensor], why: str) -> list[Tensor]:
        """Run the primitive itself on whole operands, on every worker, if that is allowed."""
        if site.eqn.effects and not all(x.is_everywhere for x in args):
            raise site.refuse("has an effect, which can't be divided among the workers", *args)
        large = sum(x.bytes for x in args if not x.is_everywhere)
        if large and self.gather is not None and large > self.gather:
            raise site.refuse(why, *args)
        return self._bound(site, args)

    def whole(self, site: Site, *args: Tensor, why: str) -> list[Tensor]:
        """Return the results on whole operands, for a rule that can't do with blocks."""
        return self._on_whole_arrays(site, args, why)

    def _bound(self, site: Site, args: Sequence[Tensor]) -> list[Tensor]:
        results = bound_again(site.eqn, [x.whole() for x in args])
        return [site.value(y, uncut(y.shape), n=n) for n, y in enumerate(results)]

    # --- pending sums -------------------------------------------------------------------------------------------------

    def _kept_pending(self, site: Site, args: list[Tensor]) -> tuple[frozenset[int], list[Tensor]]:
        """Return the axes along which sums stay pending through a linear equation, and the operands as terms.

        Where results are to be whole, as in an optimizer's update, sums are settled first, together: a gradient that
        goes into two moments would otherwise be summed twice.
        """
        summed = [n for n, x in enumerate(args) if x.pending]
        if not summed or site.name not in LINEAR or (site.is_update and not site.is_scaling):
            return frozenset(), args
        linear = LINEAR[site.name](site)
        if linear is None:
            linear = summed if len(summed) == 1 else ()
        pending = frozenset().union(*(args[n].pending for n in summed))
        cut = set().union(*(axes_in(x.cut) for x in args))
        if cut & pending or not set(summed) <= set(linear):
            return frozenset(), args
        terms = [
            Tensor(x.movements, x.shape, x.dtype, x.cut, x.terms(x.cut, pending)) if n in linear else x
            for n, x in enumerate(args)
        ]
        return pending, terms

    def settle_together(self, args: Sequence[Tensor]) -> None:
        """Settle the sums that are needed on all workers, and those that may travel with them.

        A sum of which a reader will want blocks is left to its rule: it is scattered.
        """
        due = [x for x in dict.fromkeys(args) if settles_whole(x)]
        if not due:
            return
        others = [x for frame in self.frames for x in frame.values() if not (x.collects or x.is_carried)]
        for axes, dtype in dict.fromkeys((x.pending, np.dtype(x.dtype)) for x in due):
            alike = [
                x
                for x in dict.fromkeys((*due, *others))
                if x.pending == axes and np.dtype(x.dtype) == dtype and settles_whole(x)
            ]
            for bucket in _buckets(alike):
                sums = self.movements.all_sums([x.terms(x.cut, axes) for x in bucket], axes)
                for x, total in zip(bucket, sums, strict=True):
                    x.settled(total)


def _let_know(site: Site, args: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Let a result be known while JAX traces, if the operands are: row numbers, weights of a resampling.

    It is computed only when a rule asks for it.
    """
    if len(results) != 1 or results[0].is_known or site.eqn.effects or not isinstance(results[0].dtype, np.dtype):
        return
    if site.name in CALLS or not all(x.is_known for x in args):
        return

    @cache
    def value() -> np.ndarray:
        with jax.ensure_compile_time_eval(), wide_as(atom.aval for atom in (*site.eqn.invars, *site.eqn.outvars)):
            return np.asarray(bound_again(site.eqn, [x.known() for x in args])[0])

    results[0].is_known = value


CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_vmap_call"}
"""Primitives whose body is evaluated in place, with the sums that are pending."""

ALWAYS_ASKED = {"checkpoint", "remat", "remat2", "scan", "while", "cond"} | {
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_linear_solve"),
    *("broadcast_in_dim", "iota", "random_bits", "conv_general_dilated", "constrain", "with_rule"),
    *("debug_callback", "debug_print", "io_callback"),
    *("reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add"),
}
"""Primitives whose rule is asked even if all operands are whole: those with bodies, lazy results, or kernels."""


def _constant(movements: Movements, x: Any) -> Tensor:
    value = Tensor.copies(movements, x)
    value.is_exact = not isinstance(x, Tracer) or None  # the workers' programs have been compared, with constants
    return value


def settles_whole(x: Tensor) -> bool:
    """Say whether a pending sum is to be copied to all workers, not scattered."""
    return bool(x.pending) and x.natural() == x.cut


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    filled = 0
    for x in tensors:
        size = x.size * accumulation_dtype(np.dtype(x.dtype)).itemsize
        if not buckets or filled + size > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(x)
        filled += size
    return buckets


def as_weak(x: Any, out: Any) -> Any:
    """Return `x` with the weak type of the program's result."""
    weak = getattr(out, "weak_type", False)
    if not hasattr(x, "dtype") or weak == getattr(x, "weak_type", weak):
        return x
    return lax.convert_element_type_p.bind(jnp.asarray(x), new_dtype=x.dtype, weak_type=weak, sharding=None)
