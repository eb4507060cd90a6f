"""Rules of functions with a derivative of their own: forward and backward are traced on whole arrays, and evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from distdl_jax.distribute.interpreter import Site, rule
from distdl_jax.distribute.layouts import Cut, axes_in
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.jax_compat import bound_again
from distdl_jax.tracing.jaxprs import Call, structure


@rule("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_linear_solve")
def custom_derivative(site: Site, *xs: Tensor) -> list[Tensor]:
    """A function with its own derivative, on blocks.

    The cotangent of a value is cut like it, and a pending sum along the axes on which there are copies of it: so both
    programs, forward and backward, are evaluated like any other.
    """
    cuts = [x.readable() for x in xs]
    derivative = _OnBlocks(site, xs, cuts)

    @jax.custom_vjp
    def function(*arrays: Any) -> Any:
        return derivative.primal(arrays)

    function.defvjp(derivative.forward, derivative.backward, symbolic_zeros=True)
    results = function(*(x.at(cut) for x, cut in zip(xs, cuts, strict=True)))
    assert derivative.cuts_out is not None
    return [site.value(y, cut, n=n) for n, (y, cut) in enumerate(zip(results, derivative.cuts_out, strict=True))]


class _OnBlocks:
    """The three programs of one call: primal, forward and backward."""

    def __init__(self, site: Site, xs: Sequence[Tensor], cuts: Sequence[Cut]) -> None:
        self.site, self.xs, self.cuts = site, xs, cuts
        self.floats = [jnp.issubdtype(out.dtype, jnp.inexact) for out in site.outs]
        self.cuts_out: list[Cut] | None = None
        # By which operands are differentiated: JAX may run the forward rule several times, for different ones.
        self.pulled: dict[tuple[bool, ...], tuple[Any, Any, list[Cut]]] = {}

    def _values(self, arrays: Sequence[Any]) -> list[Tensor]:
        movements = self.site.movements
        return [
            Tensor(movements, x.shape, x.dtype, cut, array)
            for x, cut, array in zip(self.xs, self.cuts, arrays, strict=True)
        ]

    def _evaluated(self, program: Any, args: Sequence[Tensor]) -> list[Tensor]:
        run = self.site.run.inside()
        results = run.evaluate(program.jaxpr, program.consts, args)
        run.settle_together(results)
        return results

    def _out(self, ys: Sequence[Tensor]) -> list[Any]:
        if self.cuts_out is None:
            self.cuts_out = [y.readable() for y in ys]
        return [y.at(cut) for y, cut in zip(ys, self.cuts_out, strict=True)]

    def _copied_along(self, cut: Cut) -> frozenset[int]:
        return self.site.mesh.axes - axes_in(cut)

    def primal(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the results' blocks, without a derivative."""
        values, params = self._values(arrays), self.site.params
        if self.site.name == "custom_linear_solve":
            counts, program = params["const_lengths"], params["jaxprs"].solve
            start, constants = counts.matvec + counts.vecmat, sum((counts.matvec, counts.vecmat, counts.solve))
            values = [*values[start:constants], *values[constants + counts.transpose_solve :]]
        else:
            found = structure(self.site.eqn)
            assert isinstance(found, Call)
            program = found.body
        return self._out(self._evaluated(program, values))

    def forward(self, *primals: Any) -> tuple[list[Any], Any]:
        """Return the results' blocks, and what the backward pass needs, with the operands that are differentiated."""
        changing = tuple(bool(primal.perturbed) for primal in primals)

        def whole(*args: Any) -> Any:
            def of_changing(*some: Any) -> Any:
                some_of = iter(some)
                full = [next(some_of) if changes else arg for changes, arg in zip(changing, args, strict=True)]
                ys = bound_again(self.site.eqn, full)
                floating = [y for y, is_float in zip(ys, self.floats, strict=True) if is_float]
                return floating, [y for y, is_float in zip(ys, self.floats, strict=True) if not is_float]

            given = [arg for arg, changes in zip(args, changing, strict=True) if changes]
            floating, pull, others = jax.vjp(of_changing, *given, has_aux=True)
            residuals, tree = jax.tree.flatten(pull)
            trees.append(tree)
            floats, rest = iter(floating), iter(others)
            return [next(floats) if is_float else next(rest) for is_float in self.floats], residuals

        trees: list[Any] = []
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.xs]
        closed, (_, residual_shapes) = jax.make_jaxpr(whole, return_shape=True)(*shapes)
        results = self._evaluated(closed, self._values([primal.value for primal in primals]))
        ys, residuals = results[: len(self.floats)], results[len(self.floats) :]
        cuts = [residual.readable() for residual in residuals]
        self.pulled[changing] = trees[-1], residual_shapes, cuts
        kept = [residual.at(cut) for residual, cut in zip(residuals, cuts, strict=True)]
        return self._out(ys), (kept, _Changing(changing))

    def backward(self, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        """Return the cotangents' blocks of the operands."""
        kept, changing = residuals[0], residuals[1].operands
        tree, shapes, cuts = self.pulled[changing]
        site = self.site
        assert self.cuts_out is not None
        outs = [
            (out, cut, ct)
            for out, cut, ct, is_float in zip(site.outs, self.cuts_out, cotangents, self.floats, strict=True)
            if is_float
        ]
        whole = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out, _, _ in outs]
        closed = jax.make_jaxpr(lambda leaves, cts: jax.tree.unflatten(tree, leaves)(cts))(shapes, whole)
        args = [
            Tensor(site.movements, shape.shape, shape.dtype, cut, array)
            for shape, cut, array in zip(shapes, cuts, kept, strict=True)
        ]
        for out, cut, ct in outs:
            ct = jnp.zeros(ct.shape, ct.dtype) if isinstance(ct, SymbolicZero) else ct
            args.append(Tensor(site.movements, out.shape, out.dtype, cut, ct, self._copied_along(cut)))
        found = iter(self.site.run.inside().evaluate(closed.jaxpr, closed.consts, args))
        return tuple(
            next(found).terms(cut, self._copied_along(cut)) if changes else None
            for cut, changes in zip(self.cuts, changing, strict=True)
        )


@jax.tree_util.register_static
class _Changing:
    """Which operands are differentiated, among the residuals: JAX calls the rules in an order of its own."""

    def __init__(self, operands: tuple[bool, ...]) -> None:
        self.operands = operands

    def __hash__(self) -> int:
        return hash(self.operands)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Changing) and other.operands == self.operands
