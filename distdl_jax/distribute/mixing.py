"""Functions of blocks: whether they are elementwise, and whether they mix entries of a split dimension.

The rules of primitives say it: a function's program, with the block in place of the whole array, mixes entries if a
rule asks for a movement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from distdl_jax.distribute.interpreter import Run
from distdl_jax.distribute.layouts import Mesh, trimmed
from distdl_jax.distribute.movements import Movements
from distdl_jax.distribute.programs import ELEMENTWISE
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.errors import PlanError
from distdl_jax.jax_compat import name_and_params, without_dead_equations
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.jaxprs import bodies, equations
from distdl_jax.transports.agreement import MovesDataError

Function = Callable[..., Any]


def counts_along(P: Partition, dims: int) -> tuple[int, ...] | None:
    """Return the number of workers along each dimension of a tensor on P; None if P doesn't fit.

    Leading dimensions that P doesn't have are whole, and so are trailing ones that the tensor doesn't have.
    """
    shape = (1,) * (dims - P.dim) + P.shape
    return shape[:dims] if all(p == 1 for p in shape[dims:]) else None


def is_elementwise(function: Function, dims: int) -> bool:
    """Say whether a function of JAX's own is elementwise, for blocks of any shape. All workers have the same ones."""
    own = function
    while isinstance(own, partial):
        own = own.func
    if not (getattr(own, "__module__", None) or "").startswith("jax."):
        return False
    try:
        return _keeps_entries(function, dims)
    except TypeError:  # unhashable arguments of a partial
        return False


@lru_cache(maxsize=256)
def _keeps_entries(function: Function, dims: int) -> bool:
    shape = (3,) * dims
    try:
        closed = _traced(function, jax.ShapeDtypeStruct(shape, np.float32))
    except Exception:
        return False  # when called, it works, or explains why it doesn't
    outs: list[Any] = list(closed.out_avals)
    one = len(outs) == 1 and outs[0].shape == shape
    return one and all(
        bool(bodies(eqn)) or _is_constant(eqn) or name_and_params(eqn)[0] in ELEMENTWISE
        for eqn in equations(closed.eqns)
    )


def _is_constant(eqn: Any) -> bool:
    """Say whether an equation spreads a number."""
    return eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape


def _traced(function: Function, x: Any) -> ClosedJaxpr:
    with trace_context.set(anchors=None, whole_program=True):
        return jax.make_jaxpr(function)(x)


class _Asked(Exception):
    """A rule asks for a movement: in the line, and for the primitive, in `args`."""


class _Nothing(Movements):
    """No movements: for programs that need none."""

    def _asked(self, *_: Any) -> NoReturn:
        raise _Asked(*self.asked_by)

    run = compute = computed = added_ranges = gradients_of_copies = _asked  # type: ignore[assignment]


def mixing(function: Function, x: Any, P: Partition, *, may_be_partial: bool) -> str | None:
    """Return why a function must not be called on each block alone; None if it may, or moves data itself.

    - `x`: this worker's block on P, or its shape and dtype.
    - `may_be_partial`: whether results may be sums over parts of a dimension, to be added later. A number may be.
    """
    counts = counts_along(P, len(x.shape))
    if counts is None or max(counts, default=1) == 1:
        return None
    mesh = Mesh([P.grid(counts)])
    try:
        closed = _of_longer_block(function, x, counts)
    except MovesDataError:
        return None
    whole, movements, found = closed.in_avals[0], _Nothing(mesh, notes=True), list[Tensor]()
    cut = mesh.raw_cut_of(TensorSpec(whole.shape, mesh.P))

    def run(block: Any) -> None:
        value = Tensor(movements, whole.shape, whole.dtype, cut, block)
        found.extend(Run(movements, None).evaluate(closed.jaxpr, closed.consts, [value]))

    try:
        with trace_context.set(anchors=None):
            jax.eval_shape(run, jax.ShapeDtypeStruct(mesh.block_shape(trimmed(cut, whole.shape), whole.shape), x.dtype))
    except _Asked as asked:
        line, primitive = asked.args
        return _sentence(function, f"`{primitive}` at {line}", counts)
    except PlanError:  # an effect, or what has no rule: nothing is known of it
        return None
    if not may_be_partial and any(y.pending and y.shape for y in found):
        return _sentence(function, "a sum", counts)
    return None


def _of_longer_block(function: Function, x: Any, counts: Sequence[int]) -> ClosedJaxpr:
    """Return the program for a block as long as the whole tensor, or else for the block itself.

    Of a dimension of length 1 no rule knows that it is split.
    """
    longer = tuple(n * p for n, p in zip(x.shape, counts, strict=True))
    try:
        return _traced(function, jax.ShapeDtypeStruct(longer, x.dtype))
    except MovesDataError:
        raise
    except Exception:
        return _traced(function, jax.ShapeDtypeStruct(tuple(x.shape), x.dtype))


def _sentence(function: Function, what: str, counts: Sequence[int]) -> str:
    split = " and ".join(f"dimension {d} over {p}" for d, p in enumerate(counts) if p > 1)
    return (
        f"{function_name(function)} mixes entries of the block with other workers' ({what}): it is split along {split} "
        "workers. It can't be traced as a function of whole arrays, since it takes or closes over several blocks: "
        "`dj.distribute`, with a spec for each argument, runs it as one. `nn.Local(function)` applies it to each block "
        "separately."
    )


def same_operations(whole: ClosedJaxpr, function: Function, x: Any) -> bool:
    """Say whether a function's program on the block `x` differs from that on whole arrays in nothing but shapes.

    So none of its values depends on a position, or on a length.
    """
    try:
        of_block = without_dead_equations(_traced(function, jax.ShapeDtypeStruct(x.shape, x.dtype)))
    except Exception:
        return False
    one, other = list(equations(whole.eqns)), list(equations(of_block.eqns))
    if len(one) != len(other) or len(whole.consts) != len(of_block.consts):
        return False
    return all(map(_is_equal, whole.consts, of_block.consts)) and all(map(_same_operation, one, other))


def _same_operation(a: Any, b: Any) -> bool:
    if a.primitive is not b.primitive or a.primitive.name in ("iota", "random_bits"):
        return False
    literals = ([atom.val for atom in eqn.invars if isinstance(atom, Literal)] for eqn in (a, b))
    return all(map(_is_equal, *literals))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return a is b
    return np.array_equal(a, b)
