"""Rules of calls, checkpoints, loops and branches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from distdl_jax.distribute.interpreter import Run, Site, rule
from distdl_jax.distribute.layouts import Cut, grown
from distdl_jax.distribute.movements import Movements
from distdl_jax.distribute.rules.batched_loops import elementwise_loop
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


class Body:
    """A program as a function of blocks, for JAX's own higher-order functions.

    - `cuts`: those of its results; None until they are known.
    """

    def __init__(self, run: Run, closed: Any, cuts: Sequence[Cut] | None = None) -> None:
        self.run, self.closed, self.cuts = run, closed, cuts

    def __call__(self, cuts_in: Sequence[Cut], arrays: Sequence[Any]) -> list[Any]:
        jaxpr, run = self.closed.jaxpr, self.run
        inner = Run(run.movements, run.gather)  # what was fetched outside, or is pending there, stays outside
        args = [
            Tensor(run.movements, var.aval.shape, var.aval.dtype, cut, x)
            for var, cut, x in zip(jaxpr.invars, cuts_in, arrays, strict=True)
        ]
        results = inner.evaluate(jaxpr, self.closed.consts, args)
        if self.cuts is None:
            self.cuts = [y.readable() for y in results]
        return [y.at(cut) for y, cut in zip(results, self.cuts, strict=True)]

    def dry(self, cuts_in: Sequence[Cut]) -> list[Cut]:
        """Return the cuts of the results, without running anything."""
        mesh = self.run.movements.mesh
        blocks = [
            jax.ShapeDtypeStruct(mesh.block_shape(cut, var.aval.shape), var.aval.dtype)
            for cut, var in zip(cuts_in, self.closed.jaxpr.invars, strict=True)
        ]
        found = Body(Run(Movements(mesh), self.run.gather), self.closed)
        with trace_context.set(anchors=None):
            jax.eval_shape(partial(found, cuts_in), blocks)
        assert found.cuts is not None
        return list(found.cuts)


@rule("debug_callback", "debug_print")
def debug(site: Site, *xs: Tensor) -> list[Tensor]:
    """The first worker prints, if all workers have the values."""
    if any(any(x.cut) for x in xs):
        raise site.refuse("would print blocks: print a sum or another small result", *xs)
    arrays = [x.whole() for x in xs]
    if site.mesh.is_first(site.mesh.axes):
        bound_again(site.eqn, arrays)
    return []


@rule("checkpoint", "remat", "remat2")
def checkpoint(site: Site, *xs: Tensor) -> list[Tensor]:
    """One checkpoint, of the same policy; messages inside are sent again in the backward pass."""
    found = structure(site.eqn)
    assert isinstance(found, Call)
    body = Body(site.run, found.body)
    cuts = [x.readable() for x in xs]
    if site.params.get("differentiated"):  # its recomputation, in a program that is differentiated already
        inside = site.run.evaluate(found.body.jaxpr, found.body.consts, _behind_a_barrier(site, xs, cuts), site.wanted)
        return inside
    options = {name: site.params[name] for name in ("prevent_cse", "policy") if name in site.params}
    results = jax.checkpoint(partial(body, cuts), **options)([x.at(cut) for x, cut in zip(xs, cuts, strict=True)])
    assert body.cuts is not None
    return [site.value(y, cut, n=n) for n, (y, cut) in enumerate(zip(results, body.cuts, strict=True))]


def _behind_a_barrier(site: Site, xs: Sequence[Tensor], cuts: Sequence[Cut]) -> list[Tensor]:
    """Return the operands behind a barrier, so that XLA doesn't merge the recomputation with the forward pass."""
    arrays = [x.at(cut) for x, cut in zip(xs, cuts, strict=True)]
    if site.params.get("prevent_cse", True):
        arrays = lax.optimization_barrier(arrays)
    return [Tensor(x.movements, x.shape, x.dtype, cut, array) for x, cut, array in zip(xs, cuts, arrays, strict=True)]


@rule("scan")
def scan(site: Site, *xs: Tensor) -> list[Tensor]:
    """Scanned arrays are whole along the loop's dimension; carries get more cuts until the body keeps them."""
    loop = structure(site.eqn)
    assert isinstance(loop, Scan)
    constants, fixed = loop.constants, loop.constants + loop.carried
    cuts = [x.readable() for x in xs[:fixed]] + [x.whole_along([0]) for x in xs[fixed:]]
    inside = cuts[:fixed] + [cut[1:] for cut in cuts[fixed:]]
    # A body may cut what was whole before, which is cut from the first pass on then. Cuts only grow, so this ends.
    while True:
        results = Body(site.run, loop.body).dry(inside)
        before = inside[constants:fixed]
        after = [grown(x.shape, a, b) for x, a, b in zip(xs[constants:fixed], before, results, strict=False)]
        if after == before:
            break
        inside[constants:fixed] = cuts[constants:fixed] = after
    body = Body(site.run, loop.body, after + results[loop.carried :])
    arrays = [x.at(cut) for x, cut in zip(xs, cuts, strict=True)]

    def step(carry: Any, x: Any) -> Any:
        found = body(inside, [*arrays[:constants], *carry, *x])
        return found[: loop.carried], found[loop.carried :]

    options = {name: site.params[name] for name in ("reverse", "unroll", "_split_transpose") if name in site.params}
    carry, ys = lax.scan(step, arrays[constants:fixed], arrays[fixed:], loop.length, **options)
    out = after + [((), *cut) for cut in results[loop.carried :]]
    return [site.value(y, cut, n=n) for n, (y, cut) in enumerate(zip([*carry, *ys], out, strict=True))]


@rule("while")
def while_(site: Site, *xs: Tensor) -> list[Tensor]:
    """As a scan; all workers compute the same predicate."""
    loop = structure(site.eqn)
    assert isinstance(loop, While)
    if loop.condition.out_avals[0].shape:
        return elementwise_loop(site, loop, xs)
    first, second = loop.condition_constants, loop.condition_constants + loop.body_constants
    cuts = [x.readable() for x in xs]
    while True:
        results = Body(site.run, loop.body).dry(cuts[first:])
        after = [grown(x.shape, a, b) for x, a, b in zip(xs[second:], cuts[second:], results, strict=True)]
        if after == cuts[second:]:
            break
        cuts[second:] = after
    arrays = [x.at(cut) for x, cut in zip(xs, cuts, strict=True)]
    condition, body = Body(site.run, loop.condition, [()]), Body(site.run, loop.body, after)
    results = lax.while_loop(
        lambda carry: condition([*cuts[:first], *after], [*arrays[:first], *carry])[0],
        lambda carry: body(cuts[first:], [*arrays[first:second], *carry]),
        arrays[second:],
    )
    return [site.value(y, cut, n=n) for n, (y, cut) in enumerate(zip(results, after, strict=True))]


@rule("cond")
def cond(site: Site, choice: Tensor, *xs: Tensor) -> list[Tensor]:
    """The results are cut as any branch cuts them."""
    found = structure(site.eqn)
    assert isinstance(found, Branches)
    cuts = [x.readable() for x in xs]
    of_branches = [Body(site.run, branch).dry(cuts) for branch in found.bodies]
    out = of_branches[0]
    for other in of_branches[1:]:
        out = [grown(aval.shape, a, b) for aval, a, b in zip(site.outs, out, other, strict=True)]
    bodies = [partial(Body(site.run, branch, out), cuts) for branch in found.bodies]
    ys = lax.switch(choice.whole(), bodies, [x.at(cut) for x, cut in zip(xs, cuts, strict=True)])
    return [site.value(y, cut, n=n) for n, (y, cut) in enumerate(zip(ys, out, strict=True))]
