"""Rules of calls, checkpoints, loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from distdl_jax.distribute.interpreter import Run, Site, rule, settles_whole
from distdl_jax.distribute.layouts import Cut, Layout, axes_in, grown
from distdl_jax.distribute.movements import Movements
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.jax_compat import bound_again
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.jaxprs import Branches, Call, Scan, While, structure


@rule("jit", "pjit", "closed_call", "core_call", "custom_vmap_call")
def call(site: Site, *xs: Tensor) -> list[Tensor]:
    """The body, in place."""
    found = structure(site.eqn)
    assert isinstance(found, Call)
    return site.run.evaluate(found.body.jaxpr, found.body.consts, xs, site.wanted)


@dataclass(frozen=True)
class Result:
    """How a body returns a value.

    - `layout`: with the sum that is pending, if it is; `readable`: the cut in which a reader takes it.
    - `is_small`: whether the pending sum would be copied to all workers, not scattered.
    """

    layout: Layout
    readable: Cut
    is_small: bool

    @classmethod
    def of(cls, y: Tensor) -> Result:
        """Return the description of a value."""
        return cls(Layout(y.cut, y.pending, bool(y.is_exact)), y.readable(), settles_whole(y))

    def kept(self) -> Layout:
        """Return the layout in which the value leaves its body: a small sum stays pending."""
        return self.layout if self.is_small else self.layout._replace(cut=self.readable, pending=frozenset())


@dataclass(frozen=True)
class DryRun:
    """What a body would do.

    - `results`: how it returns its results. `reads_sum`: for each argument, whether it settles a pending sum of it.
    - `moves`: whether any worker sends anything in it.
    """

    results: tuple[Result, ...]
    reads_sum: tuple[bool, ...]
    moves: bool

    def moves_to(self, layouts: Sequence[Layout]) -> bool:
        """Say whether anything is sent if the results are returned in these layouts."""
        return self.moves or any(
            any(y.readable) and y.readable != layout.cut and not layout.pending
            for y, layout in zip(self.results, layouts, strict=True)
        )


class Body:
    """A program as a function of blocks, for JAX's own higher-order functions.

    - `layouts`: those of its results; None until they are known.
    """

    def __init__(self, run: Run, closed: Any, layouts: Sequence[Layout] | None = None) -> None:
        self.run, self.closed, self.layouts = run, closed, layouts

    def _evaluated(self, run: Run, layouts: Sequence[Layout], arrays: Sequence[Any]) -> tuple[Any, list[Tensor]]:
        jaxpr = self.closed.jaxpr
        args = [
            Tensor.laid_out(run.movements, var.aval, layout, x)
            for var, layout, x in zip(jaxpr.invars, layouts, arrays, strict=True)
        ]
        for x in args:
            x.is_carried = bool(x.pending)
        return args, run.evaluate(jaxpr, self.closed.consts, args)

    def __call__(self, layouts: Sequence[Layout], arrays: Sequence[Any]) -> list[Any]:
        inner = self.run.inside()
        _, results = self._evaluated(inner, layouts, arrays)
        if self.layouts is None:
            self.layouts = [Result.of(y).kept() for y in results]
        pairs = list(zip(results, self.layouts, strict=True))
        inner.settle_together([y for y, layout in pairs if not layout.pending])
        return [y.terms(layout.cut, layout.pending) if layout.pending else y.at(layout.cut) for y, layout in pairs]

    def dry(self, layouts: Sequence[Layout]) -> DryRun:
        """Return what the body would do for arguments of these layouts; nothing runs."""
        movements = self.run.movements
        key = self.closed, tuple(layouts), self.run.gather
        if key not in movements.dry_runs:
            mesh, found = movements.mesh, Movements(movements.mesh)
            found.dry_runs = movements.dry_runs  # of bodies in this one
            blocks = [
                jax.ShapeDtypeStruct(mesh.block_shape(layout.cut, var.aval.shape), var.aval.dtype)
                for layout, var in zip(layouts, self.closed.jaxpr.invars, strict=True)
            ]
            described: list[DryRun] = []

            def evaluated(arrays: Sequence[Any]) -> None:
                args, ys = self._evaluated(Run(found, self.run.gather, eqns=self.run.eqns), layouts, arrays)
                reads = tuple(x.pending != layout.pending for x, layout in zip(args, layouts, strict=True))
                results = tuple(map(Result.of, ys))
                for y, result in zip(ys, results, strict=True):
                    if not result.kept().pending:
                        y.at(result.readable)  # what moves only where it is read counts, too
                described.append(DryRun(results, reads, found.requests > 0))

            with trace_context.set(anchors=None):
                jax.eval_shape(evaluated, blocks)
            movements.dry_runs[key] = described[-1]
        return movements.dry_runs[key]


def _read(x: Tensor, cut: Cut | None = None) -> Layout:
    """Return the layout in which a body takes a value that it doesn't change."""
    return Layout(x.readable() if cut is None else cut, is_exact=bool(x.is_exact))


def _carried(xs: Sequence[Tensor], dry: Callable[[list[Layout]], tuple[list[Result], list[bool]]]) -> list[Layout]:
    """Return the layouts of a loop's carries, which its body keeps: a fixed point over its dry runs.

    A body may cut what was whole before, which is cut from the first pass on then. A carry to which it only adds terms
    stays a pending sum, which is settled once, after the loop; one whose sum it reads in each pass isn't. Cuts and
    pending axes only grow, and a carry is refused its pending sum only once, so this ends.
    """
    layouts = [Layout(x.cut, x.pending, bool(x.is_exact)) for x in xs]
    settled = [False] * len(xs)
    while True:
        results, reads_sum = dry(layouts)
        after = []
        for n, (x, now, y) in enumerate(zip(xs, layouts, results, strict=True)):
            exact, pending = now.is_exact and y.layout.is_exact, now.pending | y.layout.pending
            if now.pending and (reads_sum[n] or not now.pending <= y.layout.pending):
                settled[n] = True
            cut = grown(x.shape, now.cut, y.layout.cut)
            if not settled[n] and pending and not axes_in(cut) & pending:
                after.append(Layout(cut, pending, exact))
                continue
            settled[n] = settled[n] or bool(pending)
            own = x.readable() if now.pending else now.cut
            after.append(Layout(grown(x.shape, own, y.readable), is_exact=exact))
        if after == layouts:
            # What is lazy before the loop, and uncut in it, is made here: block by block. Not before the rest is known:
            # a wave's two fields begin as zeros, and only the second is cut after one dry run.
            lazy = [
                x.is_lazy and not layout.pending and not any(layout.cut) for x, layout in zip(xs, layouts, strict=True)
            ]
            after = [
                layout._replace(cut=x.readable()) if is_lazy else layout
                for x, layout, is_lazy in zip(xs, layouts, lazy, strict=True)
            ]
        if after == layouts:
            return layouts
        layouts = after


def _arrays(xs: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Any]:
    return [
        x.terms(layout.cut, layout.pending) if layout.pending else x.at(layout.cut)
        for x, layout in zip(xs, layouts, strict=True)
    ]


def _values(site: Site, arrays: Sequence[Any], layouts: Sequence[Layout]) -> list[Tensor]:
    return [
        Tensor.laid_out(site.movements, out, layout, y)
        for out, layout, y in zip(site.outs, layouts, arrays, strict=True)
    ]


@rule("debug_callback", "debug_print")
def debug(site: Site, *xs: Tensor) -> list[Tensor]:
    """The first worker prints, if all workers have the values."""
    if any(any(x.cut) for x in xs):
        raise site.refuse("would print blocks", *xs, cure="Print a sum, or another small result.")
    arrays = [x.whole() for x in xs]
    if site.mesh.is_first(site.mesh.axes):
        bound_again(site.eqn, arrays)
    return []


@rule("pure_callback")
def pure_callback(site: Site, *xs: Tensor) -> list[Tensor]:
    """A function of whole values runs on every worker."""
    if any(any(x.cut) for x in xs):
        cure = "Call it with a whole value, such as a sum; or on blocks, outside of the distributed function."
        raise site.refuse("would call Python with blocks, where it is written for whole arrays", *xs, cure=cure)
    return [site.value(y, ((),) * y.ndim, n=n) for n, y in enumerate(bound_again(site.eqn, [x.whole() for x in xs]))]


@rule("io_callback")
def io_callback(site: Site, *xs: Tensor) -> list[Tensor]:
    """What it does to the world outside would be done by every worker."""
    cure = "Return the value, and use it outside of the distributed function."
    raise site.refuse("has an effect outside of the program, which every worker would have", *xs, cure=cure)


@rule("checkpoint", "remat", "remat2")
def checkpoint(site: Site, *xs: Tensor) -> list[Tensor]:
    """One checkpoint, of the same policy; messages inside are sent again in the backward pass."""
    found = structure(site.eqn)
    assert isinstance(found, Call)
    body = Body(site.run, found.body)
    layouts = [_read(x) for x in xs]
    arrays = _arrays(xs, layouts)
    if site.params.get("differentiated"):  # its recomputation, in a program that is differentiated already
        if site.params.get("prevent_cse", True):  # so that XLA doesn't merge it with the forward pass
            arrays = lax.optimization_barrier(arrays)
        args = [
            Tensor.laid_out(site.movements, x, layout, array)
            for x, layout, array in zip(xs, layouts, arrays, strict=True)
        ]
        return site.run.evaluate(found.body.jaxpr, found.body.consts, args, site.wanted)
    options = {name: site.params[name] for name in ("prevent_cse", "policy") if name in site.params}
    results = jax.checkpoint(partial(body, layouts), **options)(arrays)
    assert body.layouts is not None
    return _values(site, results, body.layouts)


@rule("scan")
def scan(site: Site, *xs: Tensor) -> list[Tensor]:
    """Scanned arrays are whole along the loop's dimension; sums that a pass returns are settled after the loop."""
    loop = structure(site.eqn)
    assert isinstance(loop, Scan)
    fixed = loop.constants + loop.carried
    constants, scanned = [_read(x) for x in xs[: loop.constants]], [_read(x, x.whole_along([0])) for x in xs[fixed:]]
    passed = [layout._replace(cut=layout.cut[1:]) for layout in scanned]

    def dry(carry: list[Layout]) -> tuple[list[Result], list[bool]]:
        found = Body(site.run, loop.body).dry([*constants, *carry, *passed])
        return list(found.results[: loop.carried]), list(found.reads_sum[loop.constants : fixed])

    carry = _carried(xs[loop.constants : fixed], dry)
    inside = [*constants, *carry, *passed]
    returned = [y.kept() for y in Body(site.run, loop.body).dry(inside).results[loop.carried :]]
    body = Body(site.run, loop.body, [*carry, *returned])
    arrays = _arrays(xs, [*constants, *carry, *scanned])

    def step(carry: Any, x: Any) -> Any:
        found = body(inside, [*arrays[: loop.constants], *carry, *x])
        return found[: loop.carried], found[loop.carried :]

    options = {name: site.params[name] for name in ("reverse", "unroll", "_split_transpose") if name in site.params}
    with site.movements.repeated(loop.length):
        last, ys = lax.scan(step, arrays[loop.constants : fixed], arrays[fixed:], loop.length, **options)
    stacked = [layout._replace(cut=((), *layout.cut)) for layout in returned]
    return _values(site, [*last, *ys], [*carry, *stacked])


@rule("while")
def while_(site: Site, *xs: Tensor) -> list[Tensor]:
    """As a scan; if a pass moves anything, the first worker decides whether there is another."""
    loop = structure(site.eqn)
    assert isinstance(loop, While)
    if loop.condition.out_avals[0].shape:
        loop, xs = _with_one_predicate(loop), (*xs[: loop.condition_constants], *xs)
    first, second = loop.condition_constants, loop.condition_constants + loop.body_constants
    of_condition, of_body = [_read(x) for x in xs[:first]], [_read(x) for x in xs[first:second]]

    def dry_both(carry: list[Layout]) -> tuple[DryRun, DryRun]:
        return (
            Body(site.run, loop.condition).dry([*of_condition, *carry]),
            Body(site.run, loop.body).dry([*of_body, *carry]),
        )

    def dry(carry: list[Layout]) -> tuple[list[Result], list[bool]]:
        test, found = dry_both(carry)
        reads = zip(test.reads_sum[first:], found.reads_sum[second - first :], strict=True)
        return list(found.results), [any(each) for each in reads]

    carry = _carried(xs[second:], dry)
    test, found = dry_both(carry)
    decides = (found.moves_to(carry) or test.moves) and not test.results[0].layout.is_exact
    arrays = _arrays(xs, [*of_condition, *of_body, *carry])
    condition, body = Body(site.run, loop.condition, [Layout(())]), Body(site.run, loop.body, carry)

    def goes_on(values: Any) -> Any:
        (answer,) = condition([*of_condition, *carry], [*arrays[:first], *values])
        return site.movements.of_first(answer) if decides else answer

    results = lax.while_loop(
        goes_on, lambda values: body([*of_body, *carry], [*arrays[first:second], *values]), arrays[second:]
    )
    return _values(site, results, carry)


def _with_one_predicate(loop: While) -> While:
    """Return a loop under `jax.vmap`, whose predicate is an array, with a single one, as JAX would run it.

    It goes on while any of the loops does, and those that have ended keep their values.
    """
    n, m = loop.condition_constants, loop.condition_constants + loop.body_constants
    condition, body = jaxpr_as_fun(loop.condition), jaxpr_as_fun(loop.body)

    def any_goes_on(*args: Any) -> list[Any]:
        return [jnp.any(condition(*args)[0])]

    def selected(*args: Any) -> list[Any]:
        goes_on, before = condition(*args[:n], *args[m:])[0], args[m:]
        after = body(*args[n:m], *before)
        return [
            jnp.where(lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim)), new, old)
            for new, old in zip(after, before, strict=True)
        ]

    first = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in loop.condition.in_avals]
    second = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in loop.body.in_avals]
    return While(jax.make_jaxpr(any_goes_on)(*first), jax.make_jaxpr(selected)(*first[:n], *second), n, m)


@rule("cond")
def cond(site: Site, choice: Tensor, *xs: Tensor) -> list[Tensor]:
    """The results are cut as any branch cuts them; if one moves anything, the first worker chooses."""
    found = structure(site.eqn)
    assert isinstance(found, Branches)
    layouts = [_read(x) for x in xs]
    of_branches = [Body(site.run, branch).dry(layouts) for branch in found.bodies]
    out = [
        _joined(aval.shape, results)
        for aval, *results in zip(site.outs, *(each.results for each in of_branches), strict=True)
    ]
    number = choice.whole()
    if not choice.is_exact:
        out = [layout._replace(is_exact=False) for layout in out]
        if any(each.moves_to(out) for each in of_branches):
            number = site.movements.of_first(number)
    bodies = [partial(Body(site.run, branch, out), layouts) for branch in found.bodies]
    return _values(site, lax.switch(number, bodies, _arrays(xs, layouts)), out)


def _joined(shape: Sequence[int], results: Sequence[Result]) -> Layout:
    """Return the layout of a result of several branches: a small sum of any of them stays pending."""
    exact = all(y.layout.is_exact for y in results)
    for kept in ([y.kept() for y in results], [Layout(y.readable) for y in results]):
        cut, pending = kept[0].cut, frozenset[int]().union(*(layout.pending for layout in kept))
        for layout in kept[1:]:
            cut = grown(shape, cut, layout.cut)
        if not axes_in(cut) & pending:
            break
    return Layout(cut, pending, exact)
