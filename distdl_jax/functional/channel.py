"""The messages of one worker in one operation, tied to what goes in and to what comes out."""

from __future__ import annotations

import zlib

import jax.numpy as jnp
from jax import Array

from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.world import Transport
from distdl_jax.watchdog.programs.ir import Operation


class Channel:
    """The messages of one worker in one operation, in its program order.

    JAX drops or hoists an operation when nothing on that worker depends on it, or it on nothing, and the others then
    wait for ever. So every message depends on the worker's input, and its result on every message.

    - `transport`: what carries the messages.
    - `anchor`: an array that everything received depends on: the operation's input on this worker.
    - `tag`: the same on both sides of a message; differs between operations, so that a mismatch cannot mix data up.

    `finish` ties what was sent into the operation's result.
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
        """Return `y`, tied to every message sent, and after those that were sent without receiving another."""
        y = tie(y, *self._done)
        return self._transport.sent_first(y) if self._sends_alone else y


def message(
    tag: int,
    sent: ShapeDtype | None = None,
    dest: int | None = None,
    coming: ShapeDtype | None = None,
    source: int | None = None,
) -> Operation:
    """Return what `Channel` communicates: `sent` to `dest`, `coming` from `source`, or both. The team is ()."""
    given = sent or coming
    assert given is not None  # one of the two at least
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
    """Return the tag of an operation's messages: below 32768, the least upper bound on tags that MPI guarantees.

    The repr of `operation` says which one it is, in the same words on all workers.
    """
    return zlib.crc32(repr(operation).encode()) % 32768


def tied_zeros(shape_dtype: ShapeDtype, anchor: Array) -> Array:
    """Return zeros that depend on `anchor`."""
    return tie(jnp.zeros(shape_dtype.shape, shape_dtype.dtype), anchor)
