"""A chain of exchanges as one movement: its plan, one worker's part, and packing, sending and unpacking."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.functional.block_checks import is_differentiable
from distdl_jax.functional.collectives import Channel, message, tag_of, tied_zeros
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.plans.messages import ExchangePlan, Piece, Start
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import Workers, World
from distdl_jax.watchdog.programs.ir import Operation


def exchange(channel: Channel, plan: ExchangePlan, x: Array, lead: tuple[int, ...]) -> Array:
    """Return this worker's output block of `plan`, given its input block `x`; both have the leading dimensions `lead`.

    Overlapping pieces of the output are added; entries without a piece are zero.
    """
    dtype = np.dtype(x.dtype)
    arrived: list[tuple[Sequence[Piece], Array]] = []
    for step in plan.rounds:
        packed = None if step.send is None else _packed(x, step.send.pieces, lead)
        if step.recv is None:
            assert packed is not None and step.send is not None  # a round has at least one of the two
            channel.send(packed, step.send.partner)
            continue
        coming = ShapeDtype((math.prod(lead) * step.recv.size,), dtype)
        if packed is None or step.send is None:
            received = channel.receive(coming, step.recv.partner)
        else:
            received = channel.sendrecv(packed, step.send.partner, coming, step.recv.partner)
        arrived.append((step.recv.pieces, received))
    if any(len(pieces) > FEW for pieces in (plan.copies, *(pieces for pieces, _ in arrived))):
        if plan.copies:
            arrived.append((plan.copies, _packed(x, plan.copies, lead)))
        return _placed(plan, arrived, lead, dtype)
    blocks = [(piece, _cut(x, piece, lead)) for piece in plan.copies]
    blocks += [block for pieces, packed in arrived for block in _unpacked(packed, pieces, lead)]
    return _assembled(plan, blocks, lead, dtype)


def exchange_operations(plan: ExchangePlan, lead: tuple[int, ...], dtype: np.dtype, tag: int) -> tuple[Operation, ...]:
    """Return the communication of `exchange`, for blocks of `dtype`, with messages of one tag."""
    operations = []
    for step in plan.rounds:
        sent, coming = (
            None if half is None else ShapeDtype((math.prod(lead) * half.size,), dtype)
            for half in (step.send, step.recv)
        )
        dest, source = (None if half is None else half.partner for half in (step.send, step.recv))
        operations.append(message(tag, sent, dest, coming, source))
    return tuple(operations)


FEW = 32
"""More pieces than this are copied element by element, since a program with a slice of each is slow to compile."""


def _whole(lead: tuple[int, ...]) -> tuple[slice, ...]:
    return (slice(None),) * len(lead)


def _cut(x: Array, piece: Piece, lead: tuple[int, ...]) -> Array:
    place = _whole(lead) + piece.source
    return x[place] if piece.reverse().fills_box else x.at[place].get(mode="promise_in_bounds")


def _packed(x: Array, pieces: Sequence[Piece], lead: tuple[int, ...]) -> Array:
    """Return pieces concatenated, for each index of `lead`; a single one in its own shape."""
    if len(pieces) == 1:
        return _cut(x, pieces[0], lead)
    if len(pieces) > FEW:
        places = _places([(_corner(piece.source_start), piece.shape) for piece in pieces], x.shape[len(lead) :])
        return _elements(x, places, lead)
    return jnp.concatenate([_cut(x, piece, lead).reshape(*lead, -1) for piece in pieces], axis=-1)


def _unpacked(packed: Array, pieces: Sequence[Piece], lead: tuple[int, ...]) -> Iterable[tuple[Piece, Array]]:
    if len(pieces) == 1:
        yield pieces[0], packed.reshape(lead + pieces[0].shape)
        return
    start, packed = 0, packed.reshape(*lead, -1)
    for piece in pieces:
        stop = start + piece.size
        yield piece, packed[..., start:stop].reshape(lead + piece.shape)
        start = stop


def _corner(start: tuple[Start, ...]) -> tuple[int, ...]:
    """Return the start of a box without lists of rows."""
    return tuple(n for n in start if isinstance(n, int))


def _places(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> np.ndarray:
    """Return the flat numbers, in a block of `shape`, of the elements of boxes (start, shape), box after box."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    within: dict[tuple[int, ...], np.ndarray] = {}
    for _, lengths in boxes:
        if lengths not in within:
            within[lengths] = np.tensordot(strides, np.indices(lengths), 1).ravel()
    places = [within[lengths] + int(np.dot(start, strides)) for start, lengths in boxes]
    return np.concatenate(places).astype(np.int32 if math.prod(shape) < 2**31 else np.int64)


def _elements(x: Array, places: np.ndarray, lead: tuple[int, ...]) -> Array:
    flat = x.reshape(*lead, -1)
    return flat.at[..., places].get(mode="promise_in_bounds", unique_indices=True)


def _placed(
    plan: ExchangePlan, arrived: Sequence[tuple[Sequence[Piece], Array]], lead: tuple[int, ...], dtype: np.dtype
) -> Array:
    """Return the output block from packed pieces, element by element."""
    flat = jnp.concatenate([packed.reshape(*lead, -1) for _, packed in arrived], axis=-1)
    places = _places(
        [(_corner(piece.dest_start), piece.shape) for pieces, _ in arrived for piece in pieces], plan.out_shape
    )
    if plan.covers_output:
        return _elements(flat, np.argsort(places).astype(places.dtype), lead).reshape(lead + plan.out_shape)
    wide = dtype if plan.out_disjoint else accumulation_dtype(dtype)
    place = jnp.zeros((*lead, math.prod(plan.out_shape)), wide).at[..., places]
    y = place.max(flat) if wide == jnp.bool_ else place.add(flat.astype(wide))
    return y.reshape(lead + plan.out_shape).astype(dtype)


def _assembled(plan: ExchangePlan, arrived: list[tuple[Piece, Array]], lead: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return the output block from the pieces that arrived, piece by piece."""
    if plan.covers_output and arrived and all(piece.fills_box for piece, _ in arrived):
        return _joined(arrived, plan.out_shape, lead)
    wide = dtype if plan.out_disjoint else accumulation_dtype(dtype)
    # Start from a piece that fills the block, if any, so that nothing has to be zeroed.
    whole = next((item for item in arrived if item[0].shape == plan.out_shape and item[0].fills_box), None)
    if whole is None:
        y = jnp.zeros(lead + plan.out_shape, wide)
    else:
        y = whole[1].astype(wide)
        arrived = [item for item in arrived if item is not whole]
    for piece, block in arrived:
        place = y.at[_whole(lead) + piece.dest]
        known: dict[str, Any] = {}
        if not piece.fills_box:
            known = {
                "unique_indices": plan.out_disjoint,
                "indices_are_sorted": piece.ascends,
                "mode": "promise_in_bounds",
            }
        if plan.out_disjoint:
            y = place.set(block, **known)
        elif wide == jnp.bool_:
            y = place.max(block, **known)
        else:
            y = place.add(block.astype(wide), **known)
    return y.astype(dtype)


def _joined(arrived: list[tuple[Piece, Array]], shape: tuple[int, ...], lead: tuple[int, ...]) -> Array:
    """Join the blocks that tile `shape`: the last dimensions first, in one pass for each cut dimension."""
    blocks = {_corner(piece.dest_start): block for piece, block in arrived}
    for axis in reversed(range(len(shape))):
        lines: dict[tuple[int, ...], list[tuple[int, Array]]] = {}
        for start, block in blocks.items():
            lines.setdefault((*start[:axis], 0, *start[axis + 1 :]), []).append((start[axis], block))
        blocks = {
            start: side_by_side([block for _, block in sorted(line, key=lambda item: item[0])], len(lead) + axis)
            for start, line in lines.items()
        }
    (whole,) = blocks.values()
    return whole


def side_by_side(blocks: Sequence[Array], axis: int) -> Array:
    """Concatenate blocks, faster than `jnp.concatenate` if one block gets a few columns at its ends.

    XLA's CPU compiler copies row by row along the last dimension. Selecting each element from the block or the columns
    takes 0.3 to 0.7 of that time for arrays of megabytes, as long as at most two of them need shifting; a single column
    needs none.
    """
    if len(blocks) == 1:
        return blocks[0]
    sizes = [block.shape[axis] for block in blocks]
    widest, total = sizes.index(max(sizes)), sum(sizes)
    others = [size for place, size in enumerate(sizes) if place != widest]
    few = len(others) <= 2 and 8 * sum(others) <= total and sum(size > 1 for size in others) <= 1
    if axis != blocks[0].ndim - 1 or not few or 0 in blocks[0].shape:
        # Complex numbers are copied one by one if a slice is fused into the copy.
        alone = lax.optimization_barrier(tuple(blocks)) if jnp.iscomplexobj(blocks[0]) else blocks
        return jnp.concatenate(alone, axis=axis)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    zero = jnp.zeros((), blocks[0].dtype)

    def moved(place: int) -> Array:
        ends = (starts[place], total - starts[place] - sizes[place], 0)
        return lax.pad(blocks[place], zero, [(0, 0, 0)] * axis + [ends])

    joined = moved(widest)
    column = lax.broadcasted_iota(jnp.int32, joined.shape, axis)
    for place, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if place != widest and size:
            columns = blocks[place] if size == 1 else moved(place)
            joined = jnp.where((column >= start) & (column < start + size), columns, joined)
    return lax.optimization_barrier(joined)  # otherwise XLA recomputes it at every use


def joined_slices(
    slices: Sequence[tuple[Array, int, int]],
    axis: int,
    join: Callable[[Sequence[Array], int], Array] = lax.concatenate,
) -> Array:
    """Join slices along `axis`, each of an array from a start to a stop; empty slices are omitted.

    JAX 0.10.2 can't compile a branch or loop with an empty slice of a concatenation that has an empty operand: it
    aborts, or reports a custom call without a registered implementation. The result depends on every array, including
    those that contribute nothing, since the adjoint must run on all workers.
    """
    nonempty = [(x, start, stop) for x, start, stop in slices if start < stop]
    blocks = [
        x if stop - start == x.shape[axis] else lax.slice_in_dim(x, start, stop, axis=axis)
        for x, start, stop in nonempty
    ]
    if not blocks:
        x = slices[0][0]
        blocks = [jnp.zeros((*x.shape[:axis], 0, *x.shape[axis + 1 :]), x.dtype)]
    used = {id(x) for x, _, _ in nonempty}
    return tie(blocks[0] if len(blocks) == 1 else join(blocks, axis), *(x for x, _, _ in slices if id(x) not in used))


@dataclass(frozen=True)
class BoxMovement:
    """One worker's part of a chain of exchanges.

    - `name`: of the primitive, for profiles and the messages' tag.
    - `team`: the world ranks that take part.
    - `steps`: the exchanges, in order; each takes the previous one's block.
    - `source`, `target`: this worker's block before and after, zero-volume if it owns or needs nothing.
    - `dtype`: of the data and its messages; a placeholder may have another one.
    - `copies`: whether several workers may get the same element. Then the adjoint adds them.
    - `adds`: whether elements may be sums of several. Then messages have the dtype of sums, on all workers: a worker
      with nothing to add can't know that its partner has.
    - `lead`: the sizes of the leading batch dimensions.
    """

    name: str
    team: Workers
    steps: tuple[ExchangePlan, ...]
    source: ShapeDtype
    target: ShapeDtype
    dtype: np.dtype
    differentiable: bool
    copies: bool = False
    adds: bool = False
    lead: tuple[int, ...] = ()

    def operations(self, worker: int, x: ShapeDtype) -> tuple[Operation, ...]:
        dtype = accumulation_dtype(self.dtype) if self.adds else self.dtype
        tag = tag_of(self.name, self.team)
        return tuple(op for step in self.steps for op in exchange_operations(step, self.lead, dtype, tag))

    def adjoint(self) -> BoxMovement:
        return replace(
            self,
            steps=tuple(step.reverse() for step in reversed(self.steps)),
            source=self.target,
            target=self.source,
            copies=self.adds,
            adds=self.copies,
        )

    def batched(self, n: int) -> BoxMovement:
        return replace(self, source=self.source.batched(n), target=self.target.batched(n), lead=(n, *self.lead))

    @property
    def is_identity(self) -> bool:
        """Whether this worker keeps its block and sends nothing; then the adjoint is the identity too."""
        return self.source == self.target and all(step.is_identity for step in self.steps)

    def run(self, world: World, x: Array) -> Array:
        with jax.named_scope(self.name):
            channel = Channel(world.transport, x, tag_of(self.name, self.team))
            # Only a placeholder can have another dtype, possibly of another kind, and it is never sent.
            y = x.astype(self.dtype) if x.size else tied_zeros(ShapeDtype(x.shape, self.dtype), x)
            if self.adds:
                y = y.astype(accumulation_dtype(self.dtype))
            for step in self.steps:
                if y.size:  # the first step may see the block in another shape
                    y = y.reshape(self.lead + step.in_shape)
                y = exchange(channel, step, y, self.lead)
            # If this worker needs nothing, its placeholder is used as the block.
            y = y.reshape(self.target.shape) if y.size else tied_zeros(self.target, x)
            return channel.finish(y.astype(self.target.dtype))


@dataclass(frozen=True)
class BoxPlan(MovementPlan):
    """A chain of exchanges between all participating workers.

    - `name`: of the primitive.
    - `inputs`: the shapes and dtypes of the workers' blocks.
    - `dtype`: of the data.
    """

    name: str
    inputs: ShapeDtypes = field(hash=False)
    dtype: np.dtype

    @property
    def copies(self) -> bool:
        """Whether several workers may get the same element."""
        return False

    @property
    def adds(self) -> bool:
        """Whether elements may be sums of several."""
        return False

    def team(self, worker: int) -> Workers:
        """Return the world ranks of the exchanges of `worker`, in the same order for all of them."""
        return self.workers

    @abstractmethod
    def steps(self, worker: int) -> tuple[ExchangePlan, ...]:
        """Return the exchanges of `worker`, in order."""

    def part(self, worker: int) -> BoxMovement | None:
        if worker not in self.inputs:
            return None
        part = BoxMovement(
            self.name,
            self.team(worker),
            self.steps(worker),
            self.inputs[worker],
            self.output(worker),
            self.dtype,
            is_differentiable(self.dtype),
            self.copies,
            self.adds,
        )
        return None if part.is_identity else part
