"""Messages of one worker, and broadcasts and reductions within a team, on arrays inside traced programs.

A receive needs no buffer but its result, so small teams broadcast and reduce by trees of messages. Half precisions are
summed in float32 and rounded once; the sum of booleans is their "or".
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.trees import broadcast_steps, reduction_steps
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import Reduction, Transport, Workers, World
from distdl_jax.watchdog.programs.ir import Operation


class Channel:
    """The messages of one worker in one operation, in its program order.

    JAX drops an operation if nothing on that worker depends on it, and hoists it if it depends on nothing, and then the
    other workers wait for ever. So every message depends on the worker's input, and its result on every message.

    - `transport`: sends and receives the messages.
    - `anchor`: an array on which everything received depends: the operation's input on this worker.
    - `tag`: the same on both sides of a message; differs between operations, so that a mismatch cannot mix data up.

    `finish` ties sent messages to the operation's result.
    """

    def __init__(self, transport: Transport, anchor: Array, tag: int) -> None:
        self._transport = transport
        self._anchor = anchor
        self._tag = tag
        self._done: list[Array] = []
        self._sends_alone = False

    def send(self, x: Array, dest: int) -> None:
        """Send `x` to world rank `dest`."""
        self._sends_alone = True
        self._done.append(self._transport.send(x, dest, self._tag))

    def receive(self, expected: ShapeDtype, source: int) -> Array:
        """Receive an array from world rank `source`."""
        return self._transport.receive(expected, source, self._tag, self._anchor)

    def sendrecv(self, x: Array, dest: int, expected: ShapeDtype, source: int) -> Array:
        """Send `x` to `dest` while receiving an array from `source`."""
        received = self._transport.sendrecv(x, dest, expected, source, self._tag)
        self._done.append(received)
        return received

    def finish(self, y: Array) -> Array:
        """Return `y`, tied to all sent messages, and ordered after those sent without a receive."""
        y = tie(y, *self._done)
        return self._transport.sent_first(y) if self._sends_alone else y


def message(
    tag: int,
    sent: ShapeDtype | None = None,
    dest: int | None = None,
    coming: ShapeDtype | None = None,
    source: int | None = None,
) -> Operation:
    """Return the operation of `Channel`: `sent` to `dest`, `coming` from `source`, or both. The team is ()."""
    given = sent or coming
    assert given is not None  # at least one of the two
    return Operation(
        "recv" if sent is None else "send" if coming is None else "sendrecv",
        (),
        dest=dest,
        source=source,
        send_tag=tag,
        recv_tag=tag,
        count=given.size,
        received=0 if coming is None else coming.size,
        dtype=given.dtype.name,
        received_dtype=coming.dtype.name if sent is not None and coming is not None else "",
        itemsize=given.dtype.itemsize,
    )


def tag_of(*operation: object) -> int:
    """Return the tag of an operation's messages: below 32768, the smallest upper bound on tags that MPI guarantees.

    The repr of `operation` identifies it, with the same text on all workers.
    """
    return zlib.crc32(repr(operation).encode()) % 32768


def tied_zeros(shape_dtype: ShapeDtype, anchor: Array) -> Array:
    """Return zeros that depend on `anchor`."""
    return tie(jnp.zeros(shape_dtype.shape, shape_dtype.dtype), anchor)


LARGEST_TREE = 8
"""Teams of up to this many workers broadcast and reduce by a tree of messages, larger ones by one MPI operation.

mpi4jax's own broadcast fills and copies a template on every receiver before receiving; a message does not.
"""

Operations = tuple[Operation, ...]
"""The communication of one worker, in order."""


def broadcast_in_team(
    world: World, team: Workers, x: Array | None, anchor: Array, shape_dtype: ShapeDtype, tag: int
) -> Array:
    """Return the first worker's `x` on every worker of `team`; the others pass None."""
    if shape_dtype.size == 0 or len(team) == 1:
        return tied_zeros(shape_dtype, anchor) if x is None else x
    if len(team) > LARGEST_TREE:
        return world.transport.broadcast(tied_zeros(shape_dtype, anchor) if x is None else x, team)
    channel = Channel(world.transport, anchor, tag)
    for action, partner in broadcast_steps(len(team), team.index(world.rank)):
        if action == "receive":
            x = channel.receive(shape_dtype, team[partner])
        else:
            assert x is not None  # the root has it, and every other worker receives before it sends
            channel.send(x, team[partner])
    assert x is not None
    return channel.finish(x)


def broadcast_operations(team: Workers, worker: int, shape_dtype: ShapeDtype, tag: int) -> Operations:
    """Return the communication of `worker` in `broadcast_in_team`."""
    if shape_dtype.size == 0 or len(team) == 1:
        return ()
    if len(team) > LARGEST_TREE:
        return (_of_team("bcast", team, shape_dtype),)
    return _tree(broadcast_steps(len(team), team.index(worker)), team, shape_dtype, tag)


def reduce_in_team(
    world: World, team: Workers, x: Array | None, anchor: Array, shape_dtype: ShapeDtype, tag: int
) -> Array:
    """Return the sum of the workers' `x` on the first worker of `team`; on the others, an array tied to it.

    The first worker may pass None, and then contributes nothing. `shape_dtype` is common to the workers.
    """
    wide = ShapeDtype(shape_dtype.shape, accumulation_dtype(shape_dtype.dtype))
    if x is not None:
        x = x.astype(wide.dtype)
    if shape_dtype.size == 0 or len(team) == 1:
        y = tied_zeros(wide, anchor) if x is None else x
    elif len(team) > LARGEST_TREE:
        summable, op = _reducible(tied_zeros(wide, anchor) if x is None else x, "sum")
        y = world.transport.reduce(summable, team, op)
    else:
        y = _tree_reduce(world, team, x, anchor, wide, tag)
    return y.astype(shape_dtype.dtype)


def reduce_operations(team: Workers, worker: int, shape_dtype: ShapeDtype, tag: int) -> Operations:
    """Return the communication of `worker` in `reduce_in_team`."""
    wide = ShapeDtype(shape_dtype.shape, accumulation_dtype(shape_dtype.dtype))
    if shape_dtype.size == 0 or len(team) == 1:
        return ()
    if len(team) > LARGEST_TREE:
        return (_of_team("reduce", team, *_reduced(wide, "sum")),)
    return _tree(reduction_steps(len(team), team.index(worker)), team, wide, tag)


def allreduce_in_team(world: World, team: Workers, x: Array, op: Reduction = "sum") -> Array:
    """Return the sum, or the maximum, of the workers' `x`, on every worker of `team` (in the same order on all)."""
    if x.size == 0 or len(team) == 1:
        return x
    reducible, op = _reducible(x.astype(accumulation_dtype(np.dtype(x.dtype))), op)
    return world.transport.allreduce(reducible, team, op).astype(x.dtype)


def allreduce_operations(team: Workers, shape_dtype: ShapeDtype, op: Reduction = "sum") -> Operations:
    """Return the communication of each worker of `team` in `allreduce_in_team`."""
    if shape_dtype.size == 0 or len(team) == 1:
        return ()
    wide = ShapeDtype(shape_dtype.shape, accumulation_dtype(shape_dtype.dtype))
    return (_of_team("allreduce", team, *_reduced(wide, op)),)


def _tree(steps: Iterable[tuple[str, int]], team: Workers, shape_dtype: ShapeDtype, tag: int) -> Operations:
    return tuple(
        message(tag, coming=shape_dtype, source=team[partner])
        if action == "receive"
        else message(tag, shape_dtype, team[partner])
        for action, partner in steps
    )


def _reduced(shape_dtype: ShapeDtype, op: Reduction) -> tuple[ShapeDtype, Reduction]:
    """Return the shape and dtype, and the operation, with which `_reducible` reduces an array."""
    is_bool = shape_dtype.dtype == np.bool_
    return (ShapeDtype(shape_dtype.shape, np.dtype(np.uint8)), "max") if is_bool else (shape_dtype, op)


def _of_team(kind: str, team: Workers, given: ShapeDtype, op: str = "") -> Operation:
    return Operation(
        kind,
        team,
        root=None if kind == "allreduce" else team[0],
        count=given.size,
        dtype=given.dtype.name,
        itemsize=given.dtype.itemsize,
        op=op.upper(),
    )


def _tree_reduce(
    world: World, team: Workers, x: Array | None, anchor: Array, shape_dtype: ShapeDtype, tag: int
) -> Array:
    channel = Channel(world.transport, anchor if x is None else x, tag)
    for action, partner in reduction_steps(len(team), team.index(world.rank)):
        if action == "receive":
            received = channel.receive(shape_dtype, team[partner])
            x = received if x is None else _add(x, received)
        else:
            assert x is not None  # only the first worker may pass None, and it never sends
            channel.send(x, team[partner])
    assert x is not None
    return channel.finish(x)


def _reducible(x: Array, op: Reduction) -> tuple[Array, Reduction]:
    """Return `x` in a dtype, and the operation, that all transports support: sum and maximum of booleans are "or"."""
    return (x.astype(jnp.uint8), "max") if x.dtype == jnp.bool_ else (x, op)


def _add(x: Array, y: Array) -> Array:
    return x | y if x.dtype == jnp.bool_ else x + y


def as_indices(x: Array) -> Array:
    """Return integers or booleans in at least 32 bits, signed if they were narrower.

    JAX compares in the dtype of the array: in bytes, 256 would be 0, and -100 a class.
    """
    return x if x.dtype.itemsize >= 4 else x.astype(np.int32)
