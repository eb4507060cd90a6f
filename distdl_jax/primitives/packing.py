"""An exchange plan, carried out on arrays: pack, send and receive round by round, put together."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.plans.messages import ExchangePlan, Message, Piece
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.channel import Channel
from distdl_jax.primitives.team_operations import accumulation_dtype


def exchange(channel: Channel, plan: ExchangePlan, x: Array, lead: tuple[int, ...]) -> Array:
    """This worker's output block of `plan`, given its input block `x`; both have the dimensions `lead` in front.

    Where pieces of the output overlap they are added; where no piece arrives it is zero.
    """
    dtype = np.dtype(x.dtype)
    arrived = [(piece, _cut(x, piece, lead)) for piece in plan.copies]
    for step in plan.rounds:
        packed = None if step.send is None else _packed(x, step.send, lead)
        if step.recv is None:
            assert packed is not None and step.send is not None  # a round has at least one of the two
            channel.send(packed, step.send.partner)
            continue
        coming = ShapeDtype((math.prod(lead) * step.recv.size,), dtype)
        if packed is None or step.send is None:
            received = channel.receive(coming, step.recv.partner)
        else:
            received = channel.sendrecv(packed, step.send.partner, coming, step.recv.partner)
        arrived += _unpacked(received, step.recv, lead)
    return _assembled(plan, arrived, lead, dtype)


def _whole(lead: tuple[int, ...]) -> tuple[slice, ...]:
    return (slice(None),) * len(lead)


def _cut(x: Array, piece: Piece, lead: tuple[int, ...]) -> Array:
    return x[_whole(lead) + piece.source]


def _packed(x: Array, message: Message, lead: tuple[int, ...]) -> Array:
    parts = [_cut(x, piece, lead) for piece in message.pieces]
    return parts[0] if len(parts) == 1 else jnp.concatenate([part.reshape(-1) for part in parts])


def _unpacked(received: Array, message: Message, lead: tuple[int, ...]) -> Iterable[tuple[Piece, Array]]:
    start, copies = 0, math.prod(lead)
    for piece in message.pieces:
        stop = start + copies * piece.size
        yield piece, received[start:stop].reshape(lead + piece.shape)
        start = stop


def _assembled(plan: ExchangePlan, arrived: list[tuple[Piece, Array]], lead: tuple[int, ...], dtype: np.dtype) -> Array:
    if plan.covers_output and arrived:
        return _joined(arrived, plan.out_shape, lead)
    wide = dtype if plan.out_disjoint else accumulation_dtype(dtype)
    # A piece that fills the block is where to start from: nothing has to be zeroed then.
    whole = next((item for item in arrived if item[0].shape == plan.out_shape), None)
    if whole is None:
        y = jnp.zeros(lead + plan.out_shape, wide)
    else:
        y = whole[1].astype(wide)
        arrived = [item for item in arrived if item is not whole]
    for piece, block in arrived:
        place = y.at[_whole(lead) + piece.dest]
        if plan.out_disjoint:
            y = place.set(block)
        elif wide == jnp.bool_:
            y = place.max(block)
        else:
            y = place.add(block.astype(wide))
    return y.astype(dtype)


def _joined(arrived: list[tuple[Piece, Array]], shape: tuple[int, ...], lead: tuple[int, ...]) -> Array:
    """The blocks that tile `shape`, put side by side: the last dimensions first, in one pass for each that is cut."""
    blocks = {piece.dest_start: block for piece, block in arrived}
    for axis in reversed(range(len(shape))):
        lines: dict[tuple[int, ...], list[tuple[int, Array]]] = {}
        for start, block in blocks.items():
            lines.setdefault((*start[:axis], 0, *start[axis + 1 :]), []).append((start[axis], block))
        blocks = {
            start: line[0][1]
            if len(line) == 1
            else jnp.concatenate([block for _, block in sorted(line, key=lambda item: item[0])], axis=len(lead) + axis)
            for start, line in lines.items()
        }
    (whole,) = blocks.values()
    return whole
