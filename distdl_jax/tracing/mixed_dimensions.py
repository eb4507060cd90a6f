"""The effect of a function along a block's dimensions, from its traced program (an abstract interpretation).

The block of a split tensor may be processed element by element, and along unsplit dimensions. Along a split one, a sum,
a sort or a slice sees only its block. For each value of the program this tracks the correspondence between its
dimensions and the block's. Only certain mixing is found: if a rule is missing, nothing more is known of the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from distdl_jax.tracing.adjoint_order import anchor_of
from distdl_jax.tracing.jaxprs import Branches, Call, DataFlow, Scan, While, equations, structure

LOCAL = "nn.Local"
"""The scope of operations that the user intends for the block only."""

_CONFLICT = -1
Facts = list["Value | None"]
Dim = tuple[tuple[int | None, int], ...]
"""A dimension: the dimensions of the block that are merged in it, the slowest first, each with its length; None if it
is not one of the block's."""


class Mixing(NamedTuple):
    """An operation along a dimension of the block: its names, those of enclosing functions first, and the dimension."""

    names: tuple[str, ...]
    dim: int


class Value(NamedTuple):
    """A value's dimensions; operations of which it is a partial result; whether it depends on positions."""

    dims: tuple[Dim, ...]
    partial: frozenset[Mixing] = frozenset()
    counts: bool = False


class Outcome(NamedTuple):
    """The effect of an operation: the result's dimensions, mixed ones, and those of which it is a partial result."""

    dims: Sequence[Dim] | None
    mixed: Sequence[Dim] = ()
    partial: Sequence[Dim] = ()


def block_value(shape: Sequence[int]) -> Value:
    """Return the knowledge about the block itself."""
    return Value(tuple(((d, n),) for d, n in enumerate(shape)))


def moves_data(jaxpr: Any) -> bool:
    """Say whether a program moves data, or has another effect: then its author knows that there are other workers."""
    return any(eqn.effects or anchor_of(eqn) is not None for eqn in equations(jaxpr.eqns))


def blocks_of(dim: Dim) -> set[int]:
    """Return the dimensions of the block in one dimension of a value."""
    return {label for label, _ in dim if label is not None}


class MixedDimensions(DataFlow[Value | None]):
    """Finds, in `mixed`, the dimensions of its argument, a block, that a program mixes."""

    of_literals = of_constants = unknown = None

    def __init__(self) -> None:
        self.mixed: dict[Mixing, None] = {}
        self._names: list[str] = []
        self._loops = 0

    def equation(self, eqn: Any, args: Facts) -> Facts:
        if LOCAL in str(eqn.source_info.name_stack) or not any(args):
            counts = eqn.primitive.name == "iota"
            return [Value(_blank(var.aval.shape), counts=True) if counts else None for var in eqn.outvars]
        match structure(eqn):
            case Scan() as scan:
                return self._scan(eqn, args, scan)
            case Call():
                self._names.append(str(eqn.params.get("name", "")))
                results = self.through_bodies(eqn, args)
                self._names.pop()
                return results or [None] * len(eqn.outvars)
            case Branches():
                return self._chosen(eqn, args[0], args[1:], self.through_bodies(eqn, args))
            case While() as loop:
                return self._while(eqn, args, loop)
        values = [arg or Value(_blank(var.aval.shape)) for arg, var in zip(args, eqn.invars, strict=True)]
        counts = any(value.counts for value in values)
        if self._loops and (counts or eqn.primitive.name in _WRITES):
            values = list(map(_written, values))
        outcome = _RULES.get(eqn.primitive.name, _elementwise)(eqn, values)
        if self._loops and eqn.primitive.name in _READS | _WRITES:  # by the number of the pass: all, one by one
            outcome = _of_a_pass(outcome) if eqn.primitive.name in _READS else outcome._replace(mixed=())
        self.mixed |= dict.fromkeys(self._mixings(eqn, outcome.mixed))
        partial = frozenset[Mixing]().union(*(value.partial for value in values))
        for value in values:  # x / sum(x)
            self._meets(value, [other for other in values if other is not value])
        partial |= set(self._mixings(eqn, outcome.partial))
        return [Value(_dims_of(outcome, var.aval.shape), partial, counts) for var in eqn.outvars]

    def join(self, one: Value | None, other: Value | None) -> Value | None:
        if one is None or other is None or one == other:
            return one or other
        same = len(one.dims) == len(other.dims)
        dims = tuple(map(_joined, one.dims, other.dims)) if same else one.dims
        return Value(dims, one.partial | other.partial, one.counts or other.counts)

    def _meets(self, value: Value, others: Iterable[Value | None]) -> None:
        """Count a partial result, along a dimension that others have, as mixing it."""
        labels = {label for other in others if other for dim in other.dims for label in blocks_of(dim)}
        self.mixed |= dict.fromkeys(each for each in sorted(value.partial) if each.dim in labels)

    def _chosen(self, eqn: Any, choice: Value | None, args: Facts, results: Facts | None) -> Facts:
        """Return the results of branches, or of a loop: if the choice is a partial result, they are, too."""
        results = results or [None] * len(eqn.outvars)
        if choice is None or not (choice := _written(choice)).partial:
            return results
        self._meets(choice, args)
        known = [y or Value(_blank(var.aval.shape)) for y, var in zip(results, eqn.outvars, strict=True)]
        return [y._replace(partial=y.partial | choice.partial) for y in known]

    def _while(self, eqn: Any, args: Facts, loop: While) -> Facts:
        first, of_body = args[: loop.condition_constants], args[loop.condition_constants :]
        carried = slice(loop.body_constants, None)
        self._loops += 1
        carry = list(map(self.join, of_body[carried], self.through_loop(eqn, loop.body, of_body, carried)))
        (choice,) = self.run(loop.condition.jaxpr, [*first, *carry])
        self._loops -= 1
        if choice and any(each.names[-1] == "reduce_or" for each in choice.partial):
            return carry  # as vmap of a loop continues while any element does: separately for each element
        return self._chosen(eqn, choice, carry, carry)

    def _scan(self, eqn: Any, args: Facts, scan: Scan) -> Facts:
        """Follow a loop over the first dimension of `xs`, which mixes it if there is a carry."""
        fixed = scan.constants + scan.carried
        xs = [x for x in args[fixed:] if x is not None]
        along: Dim = next((x.dims[0] for x in xs if blocks_of(x.dims[0])), ())
        self.mixed |= dict.fromkeys(self._mixings(eqn, [along] if scan.carried else ()))
        now = [*args[:fixed], *(x and x._replace(dims=x.dims[1:]) for x in args[fixed:])]
        carry = slice(scan.constants, fixed)
        self._loops += 1
        while True:
            results = self.run(scan.body.jaxpr, now)
            if (after := list(map(self.join, now[carry], results))) == now[carry]:
                break
            now[carry] = after
        self._loops -= 1
        lead = along or ((None, scan.length),)
        return [*after, *(y and _written(y._replace(dims=(lead, *y.dims))) for y in results[scan.carried :])]

    def _mixings(self, eqn: Any, dims: Iterable[Dim]) -> list[Mixing]:
        names = (*self._names, eqn.primitive.name)
        return [Mixing(names, label) for dim in dims for label in sorted(blocks_of(dim)) if label != _CONFLICT]


def _of_a_pass(outcome: Outcome) -> Outcome:
    """Return the result of a read at the position of a loop's pass: partial, until it is written to a position."""
    dims = [((None, 0),) if dim in outcome.mixed else dim for dim in outcome.dims or ()]
    return Outcome(dims, (), outcome.mixed)


def _written(value: Value) -> Value:
    """Return the knowledge about a value at its original position, which is not a partial result."""
    return value._replace(partial=frozenset(each for each in value.partial if each.names[-1] not in _READS))


def _blank(shape: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(((None, n),) for n in shape)


def _dims_of(outcome: Outcome, shape: Sequence[int]) -> tuple[Dim, ...]:
    dims = outcome.dims or ()
    return tuple(map(_of_length, dims, shape)) if len(dims) == len(shape) else _blank(shape)


def _of_length(dim: Dim, length: int) -> Dim:
    """Return a dimension after its length has changed."""
    if prod(n for _, n in dim) == length:
        return dim
    return ((dim[0][0] if len(dim) == 1 else None, length),)


def _joined(one: Dim, other: Dim) -> Dim:
    """Return the dimension that is `one` or `other`; a dimension of the block takes precedence."""
    if not blocks_of(other) or blocks_of(one) == blocks_of(other):
        return one
    return other if not blocks_of(one) else ((_CONFLICT, prod(n for _, n in one)),)


# --- rules: from an equation and facts about its operands to its effect --------------------------------------


def _elementwise(eqn: Any, values: list[Value]) -> Outcome:
    """Follow an operation whose operands have its result's shape, with 1 in place of some lengths, or are scalars."""
    shape = eqn.outvars[0].aval.shape
    dims, mixed = _blank(shape), list[Dim]()
    for value, var in zip(values, eqn.invars, strict=True):
        if not (lengths := var.aval.shape):
            continue
        if len(lengths) != len(shape) or any(n not in (1, m) for n, m in zip(lengths, shape, strict=True)):
            return Outcome(None)
        operand = tuple(dim if n == m else ((None, m),) for dim, n, m in zip(value.dims, lengths, shape, strict=True))
        joined = tuple(map(_joined, dims, operand))
        for one, other, result in zip(dims, operand, joined, strict=True):
            mixed += [one, other] if result[0][0] == _CONFLICT else []
        dims = joined
    return Outcome(dims, [*mixed, *_twice(dims)])


def _twice(dims: Sequence[Dim]) -> list[Dim]:
    """Return the dimensions of the block that occur twice, as for all pairs of its elements."""
    return [dim for i, dim in enumerate(dims) if blocks_of(dim) & {k for d in dims[:i] for k in blocks_of(d)}]


def _along(name: str) -> Callable[[Any, list[Value]], Outcome]:
    """Return the rule of operations along the dimensions in a parameter, which keep them."""

    def rule(eqn: Any, values: list[Value]) -> Outcome:
        axes = np.atleast_1d(eqn.params[name])
        return Outcome(values[0].dims, [value.dims[d] for value in values for d in axes if value.dims])

    return rule


def _reduced(name: str) -> Callable[[Any, list[Value]], Outcome]:
    def rule(eqn: Any, values: list[Value]) -> Outcome:
        axes, dims = np.atleast_1d(eqn.params[name]), values[0].dims
        return Outcome([dim for d, dim in enumerate(dims) if d not in axes], partial=[dims[d] for d in axes])

    return rule


def _last(count: Callable[[Any], int]) -> Callable[[Any, list[Value]], Outcome]:
    def rule(eqn: Any, values: list[Value]) -> Outcome:
        first = len(values[0].dims) - count(eqn)
        return Outcome(values[0].dims, [dim for value in values for dim in value.dims[max(first, 0) :]])

    return rule


def _resized(eqn: Any, values: list[Value]) -> Outcome:
    """Follow a slice, a repetition, a concatenation: it mixes the dimensions whose lengths change."""
    shape, dims = eqn.outvars[0].aval.shape, values[0].dims
    for value in values[1:]:
        dims = tuple(map(_joined, dims, value.dims)) if len(value.dims) == len(shape) else dims
    return Outcome(dims, [dim for d, dim in enumerate(dims) if eqn.invars[0].aval.shape[d] != shape[d]])


def _updated(eqn: Any, values: list[Value]) -> Outcome:
    shape, part = (var.aval.shape for var in eqn.invars[:2])
    return Outcome(values[0].dims, [dim for d, dim in enumerate(values[0].dims) if part[d] != shape[d]])


def _padded(eqn: Any, values: list[Value]) -> Outcome:
    pairs = zip(values[0].dims, eqn.params["padding_config"], strict=True)
    return Outcome(values[0].dims, [dim for dim, padding in pairs if any(padding)])


def _broadcast(eqn: Any, values: list[Value]) -> Outcome:
    dims = list(_blank(eqn.params["shape"]))
    lengths = eqn.invars[0].aval.shape
    for dim, n, place in zip(values[0].dims, lengths, eqn.params["broadcast_dimensions"], strict=True):
        dims[place] = dim if n == eqn.params["shape"][place] else dims[place]
    return Outcome(dims)


def _transposed(eqn: Any, values: list[Value]) -> Outcome:
    return Outcome([values[0].dims[d] for d in eqn.params["permutation"]])


def _squeezed(eqn: Any, values: list[Value]) -> Outcome:
    return Outcome([dim for d, dim in enumerate(values[0].dims) if d not in eqn.params["dimensions"]])


def _reshaped(eqn: Any, values: list[Value]) -> Outcome:
    """Split and merge dimensions. When one is split, the first part is the one along which its blocks are split."""
    shape = eqn.outvars[0].aval.shape
    if 0 in shape or eqn.params["dimensions"] is not None:
        return Outcome(None)
    parts = [part for dim in values[0].dims for part in dim if part[1] != 1]  # the neighbour of a 1 is unknown
    dims: list[Dim] = []
    for length in shape:
        dim: list[tuple[int | None, int]] = []
        left = length
        while parts and left > 1:
            label, n = parts.pop(0)
            if left % n and n % left:
                return Outcome(None)
            dim.append((label, min(n, left)))
            if n > left:
                parts.insert(0, (None, n // left))
            left //= min(n, left)
        dims.append(tuple(dim) or ((None, length),))
    return Outcome(dims)


def _multiplied(eqn: Any, values: list[Value]) -> Outcome:
    contracted, batched = eqn.params["dimension_numbers"]
    x, y = (value.dims for value in values[:2])
    batch = [_joined(x[i], y[j]) for i, j in zip(*batched, strict=True)]
    free = [
        dim
        for dims, *gone in zip((x, y), contracted, batched, strict=True)
        for d, dim in enumerate(dims)
        if d not in gone[0] and d not in gone[1]
    ]
    dims = [*batch, *free]
    return Outcome(dims, _twice(dims), [v[d] for v, axes in zip((x, y), contracted, strict=True) for d in axes])


def _whole_windows(n: int, size: int, stride: int, padding: Sequence[int], dilation: int) -> bool:
    """Say whether windows don't overlap, and fill the block, so that each is in one block."""
    return size == stride and n % size == 0 and dilation == 1 and not any(padding)


def _windows(eqn: Any, values: list[Value]) -> Outcome:
    """Pool: windows that blocks may cut mix."""
    p, shape = eqn.params, eqn.invars[0].aval.shape
    dilations = (p[f"{of}_dilation"] if f"{of}_dilation" in p else (1,) * len(shape) for of in ("window", "base"))
    windows = zip(shape, p["window_dimensions"], p["window_strides"], p["padding"], map(max, *dilations), strict=True)
    pairs = zip(values[0].dims, windows, strict=True)
    return Outcome(values[0].dims, [dim for dim, window in pairs if not _whole_windows(*window)])


def _convolved(eqn: Any, values: list[Value]) -> Outcome:
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    (batch, channels, *places), dims = numbers.lhs_spec, values[0].dims
    shape, kernel = (var.aval.shape for var in eqn.invars[:2])
    y, mixed = list(_blank(eqn.outvars[0].aval.shape)), list[Dim]()
    y[numbers.out_spec[0]] = dims[batch]
    dilations = map(max, p["lhs_dilation"], p["rhs_dilation"])
    windows = zip(p["window_strides"], p["padding"], dilations, strict=True)
    for d, of_kernel, of_y, window in zip(places, numbers.rhs_spec[2:], numbers.out_spec[2:], windows, strict=True):
        mixed += [] if _whole_windows(shape[d], kernel[of_kernel], *window) else [dims[d]]
        y[of_y] = dims[d]
    return Outcome(y, mixed, [dims[channels]] if p["feature_group_count"] != shape[channels] else [])


def _gathered(eqn: Any, values: list[Value]) -> Outcome:
    """Look up rows: by indices from data along the dimensions that it mixes, not by positions in the block."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    x, indices = (value.dims for value in values[:2])
    cut = [x[d] for d in numbers.start_index_map if sizes[d] < eqn.invars[0].aval.shape[d]]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = iter([dim for d, dim in enumerate(x) if d not in gone])
    rows = iter(indices[:-1])
    rank = len(eqn.outvars[0].aval.shape)
    dims = [next(windows if d in numbers.offset_dims else rows) for d in range(rank)]
    return Outcome(dims, () if values[1].counts else cut)


def _scattered(eqn: Any, values: list[Value]) -> Outcome:
    """Write rows, or add them up: a partial result along the rows' dimensions."""
    numbers = eqn.params["dimension_numbers"]
    x, _, updates = (value.dims for value in values)
    if values[1].counts or numbers.operand_batching_dims:
        return Outcome(x)
    rows = [dim for d, dim in enumerate(updates) if d not in numbers.update_window_dims]
    return Outcome(x, [x[d] for d in numbers.scatter_dims_to_operand_dims], rows)


_READS, _WRITES = {"dynamic_slice", "gather"}, {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"}
_SCATTERS = ("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max", "scatter_sub")
_MATRICES = (
    *("cholesky", "lu", "qr", "geqrf", "householder_product", "eigh", "eig", "svd", "schur", "triangular_solve"),
    *("tridiagonal_solve", "hessenberg", "tridiagonal"),
)
_WINDOWS = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
_RULES: dict[str, Callable[[Any, list[Value]], Outcome]] = {
    **{f"reduce_{of}": _reduced("axes") for of in ("sum", "max", "min", "prod", "and", "or", "xor")},
    **{name: _reduced("axes") for name in ("argmax", "argmin")},
    "reduce": _reduced("dimensions"),
    "unstack": _reduced("axis"),  # its parts are partial results, and so is their sum
    **{f"cum{of}": _along("axis") for of in ("sum", "prod", "max", "min", "logsumexp")},
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "split": _along("axis"),
    "fft": _last(lambda eqn: len(eqn.params["fft_lengths"])),
    **dict.fromkeys(_MATRICES, _last(lambda eqn: 2)),
    **dict.fromkeys(("slice", "dynamic_slice", "tile", "concatenate", "top_k"), _resized),
    "dynamic_update_slice": _updated,
    "pad": _padded,
    "broadcast_in_dim": _broadcast,
    "transpose": _transposed,
    "squeeze": _squeezed,
    "reshape": _reshaped,
    "dot_general": _multiplied,
    "conv_general_dilated": _convolved,
    **dict.fromkeys(_WINDOWS, _windows),
    "gather": _gathered,
    **dict.fromkeys(_SCATTERS, _scattered),
}
"""Other operations keep dimensions if they keep shapes."""
