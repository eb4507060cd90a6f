"""MPI operations on arrays inside JAX programs: the only file that imports mpi4jax.

What mpi4jax leaves to its caller is settled here, once:

- *Data ties.* JAX drops or hoists an operation when nothing on that worker depends on it, or it on nothing, and the
  others then wait for ever. So every operation takes the worker's input as an input and gives an output that the
  result depends on, on every worker.
- *dtypes.* MPI has no bfloat16 or float16: they travel as bits, and are summed in float32.
- *Length.* MPI counts elements with a C int: longer messages travel in chunks.
- *Rematerialisation.* `jax.checkpoint` accepts the operations' effect.

A receive has no buffer but its result, so small teams broadcast and reduce by trees of messages; mpi4jax's own
broadcast would first fill a template and copy it on every receiver.
"""

from __future__ import annotations

import jax.numpy as jnp
import mpi4jax
import numpy as np
from jax import Array, lax
from jax._src import effects
from mpi4jax._src.collective_ops.bcast import mpi_bcast_p
from mpi4jax._src.collective_ops.reduce import mpi_reduce_p
from mpi4jax._src.utils import MPI_TYPE_MAP, OrderedMPIEffect, ordered_effect, wrap_as_hashable
from mpi4py import MPI

from distdl_jax.backends.mpi.communicators import World
from distdl_jax.backends.mpi.ring import noted
from distdl_jax.backends.mpi.structure import Structure
from distdl_jax.backends.mpi.tie import tie
from distdl_jax.plans.trees import broadcast_steps, reduction_steps

effects.remat_allowed_effects.add_type(OrderedMPIEffect)

MAX_ELEMENTS = 2**31 - 1
"""The most elements that one MPI message can hold."""

LARGEST_TREE = 8
"""Teams of up to this many workers broadcast and reduce by trees of messages, larger ones by MPI's collectives."""


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which data of `dtype` is summed: float32 for the half precisions, else itself."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return np.dtype(np.float32)
    return np.dtype(dtype)


class Channel:
    """The messages of one worker in one operation, in its program order, tied to the worker's input.

    - `world`: whose ranks name the partners.
    - `anchor`: an array that everything received depends on: the operation's input on this worker.
    - `tag`: the same on both sides of a message; differs between operations, so that a mismatch cannot mix data up.

    `finish` ties what was sent into the operation's result.
    """

    def __init__(self, world: World, anchor: Array, tag: int) -> None:
        self._comm = world.messages
        self._anchor = anchor
        self._tag = tag
        self._done: list[Array] = []

    def send(self, x: Array, to: int) -> None:
        """Send `x` to world rank `to`."""
        for chunk in _chunks(_as_sendable(x)):
            self._exchange(chunk, to, None, MPI.PROC_NULL)

    def receive(self, structure: Structure, source: int) -> Array:
        """Receive an array of the given structure from world rank `source`."""
        parts = []
        for chunk in _chunk_structures(structure):
            if self._anchor.size == 0:
                template = tie(jnp.zeros(chunk.shape, chunk.dtype), self._anchor)
                with noted(f"recv from worker {source} ({chunk.size} x {chunk.dtype})", ordered_effect):
                    parts.append(mpi4jax.recv(template, source=source, tag=self._tag, comm=self._comm))
            else:
                # XLA starts a receive, which has no operand, as early as it can, and the worker then waits before its
                # own work. One element of the anchor, sent to nobody, lets that work come first.
                first = _as_sendable(_first_element(self._anchor))
                parts.append(self._exchange(first, MPI.PROC_NULL, chunk, source))
        return _assembled(parts, structure)

    def sendrecv(self, x: Array, to: int, structure: Structure, source: int) -> Array:
        """Send `x` to `to` while receiving an array of the given structure from `source`."""
        sent, coming = _chunks(_as_sendable(x)), _chunk_structures(structure)
        both = min(len(sent), len(coming))
        parts = [
            self._exchange(chunk, to, expected, source)
            for chunk, expected in zip(sent[:both], coming[:both], strict=True)
        ]
        for chunk in sent[both:]:
            self._exchange(chunk, to, None, MPI.PROC_NULL)
        parts += [self.receive(expected, source) for expected in coming[both:]]
        return _assembled(parts, structure)

    def _exchange(self, x: Array, to: int, structure: Structure | None, source: int) -> Array:
        expected = structure or Structure((0,), np.dtype(x.dtype))
        sent = [] if to == MPI.PROC_NULL else [f"send to worker {to} ({x.size} x {x.dtype})"]
        coming = [] if structure is None else [f"recv from worker {source} ({structure.size} x {structure.dtype})"]
        template = tie(jnp.zeros(expected.shape, expected.dtype), x)
        with noted(" and ".join(sent + coming), ordered_effect):
            received = mpi4jax.sendrecv(
                x, template, source=source, dest=to, sendtag=self._tag, recvtag=self._tag, comm=self._comm
            )
        self._done.append(received)
        return received

    def finish(self, y: Array) -> Array:
        """`y`, tied to every message that was sent."""
        return tie(y, *self._done)


def broadcast_in_team(
    world: World, team: tuple[int, ...], x: Array | None, anchor: Array, structure: Structure, tag: int
) -> Array:
    """The first worker's `x`, on every worker of `team` (world ranks); the others pass None."""
    if structure.size == 0 or len(team) == 1:
        return tie(jnp.zeros(structure.shape, structure.dtype), anchor) if x is None else x
    if len(team) > LARGEST_TREE:
        return _collective_broadcast(world, team, x, anchor, structure)
    channel = Channel(world, anchor, tag)
    for action, partner in broadcast_steps(len(team), team.index(world.rank)):
        if action == "receive":
            x = channel.receive(structure, team[partner])
        else:
            assert x is not None  # the root has it, and every other worker receives before it sends
            channel.send(x, team[partner])
    assert x is not None
    return channel.finish(x)


def reduce_in_team(
    world: World, team: tuple[int, ...], x: Array | None, anchor: Array, structure: Structure, tag: int
) -> Array:
    """The sum of the workers' `x`, on the first worker of `team` (world ranks); on the others something tied to it.

    The first worker may pass None, and then adds nothing of its own. `structure` is that of `x`.
    """
    wide = Structure(structure.shape, accumulation_dtype(structure.dtype))
    if x is not None:
        x = x.astype(wide.dtype)
    if structure.size == 0 or len(team) == 1:
        x = tie(jnp.zeros(wide.shape, wide.dtype), anchor) if x is None else x
    elif len(team) > LARGEST_TREE:
        x = _collective_reduce(world, team, x, anchor, wide)
    else:
        x = _tree_reduce(world, team, x, anchor, wide, tag)
    return x.astype(structure.dtype)


def _tree_reduce(
    world: World, team: tuple[int, ...], x: Array | None, anchor: Array, structure: Structure, tag: int
) -> Array:
    channel = Channel(world, anchor if x is None else x, tag)
    for action, partner in reduction_steps(len(team), team.index(world.rank)):
        if action == "receive":
            received = channel.receive(structure, team[partner])
            x = received if x is None else _add(x, received)
        else:
            assert x is not None  # only the first worker may pass None, and it never sends
            channel.send(x, team[partner])
    assert x is not None
    return channel.finish(x)


def allreduce_in_team(world: World, team: tuple[int, ...], x: Array) -> Array:
    """The sum of the workers' `x`, on every worker of `team` (world ranks, the same order on all)."""
    if x.size == 0 or len(team) == 1:
        return x
    comm = world.communicator(team)
    summable, op = _as_summable(x.astype(accumulation_dtype(np.dtype(x.dtype))))
    operation = f"allreduce in the team {list(team)} ({summable.size} x {summable.dtype})"
    with noted(operation, ordered_effect):
        parts = [mpi4jax.allreduce(chunk, op=op, comm=comm) for chunk in _chunks(summable)]
    return _assembled(parts, Structure(tuple(x.shape), np.dtype(summable.dtype))).astype(x.dtype)


def _collective_broadcast(
    world: World, team: tuple[int, ...], x: Array | None, anchor: Array, structure: Structure
) -> Array:
    # mpi4jax.bcast returns the root's input and hides the operation's own result: bind it, to tie the two.
    comm = wrap_as_hashable(world.communicator(team))

    def bind(chunk: Array) -> Array:
        with noted(f"bcast in the team {list(team)} ({structure})", ordered_effect):
            result: Array = mpi_bcast_p.bind(chunk, root=0, comm=comm)
        return result

    if x is not None:
        return tie(x, *(bind(chunk) for chunk in _chunks(_as_sendable(x))))
    template = tie(jnp.zeros(structure.size, _sendable_dtype(structure.dtype)), anchor)
    return _assembled([bind(chunk) for chunk in _chunks(template)], structure)


def _collective_reduce(
    world: World, team: tuple[int, ...], x: Array | None, anchor: Array, structure: Structure
) -> Array:
    if x is None:
        x = tie(jnp.zeros(structure.shape, structure.dtype), anchor)
    summable, op = _as_summable(x)
    comm = wrap_as_hashable(world.communicator(team))
    with noted(f"reduce in the team {list(team)} ({structure})", ordered_effect):
        results = [mpi_reduce_p.bind(chunk, op=wrap_as_hashable(op), root=0, comm=comm) for chunk in _chunks(summable)]
    if world.rank != team[0]:
        return tie(x, *results)
    return _assembled(results, Structure(structure.shape, np.dtype(summable.dtype))).astype(structure.dtype)


def _as_summable(x: Array) -> tuple[Array, MPI.Op]:
    """`x` in a dtype, and the operation, with which MPI adds as numpy does: the sum of truth values is their "or"."""
    return (x.astype(jnp.uint8), MPI.MAX) if x.dtype == jnp.bool_ else (x, MPI.SUM)


def _add(x: Array, y: Array) -> Array:
    return x | y if x.dtype == jnp.bool_ else x + y


def _first_element(x: Array) -> Array:
    # Of x behind a barrier: XLA would move the slice into what computes x, and compute that element apart.
    x = lax.optimization_barrier(x)
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(1)


def _sendable_dtype(dtype: np.dtype) -> np.dtype:
    """`dtype`, or the unsigned integer of its width where MPI does not know it."""
    return np.dtype(dtype) if np.dtype(dtype).name in MPI_TYPE_MAP else np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def _as_sendable(x: Array) -> Array:
    dtype = _sendable_dtype(np.dtype(x.dtype))
    return x if dtype == x.dtype else lax.bitcast_convert_type(x, dtype)


def _chunk_structures(structure: Structure) -> list[Structure]:
    """Those of the messages that carry an array of `structure`: its own, but for the dtype, where one is enough."""
    dtype = _sendable_dtype(structure.dtype)
    if structure.size <= MAX_ELEMENTS:
        # Not flat: XLA's loops over a reshaped array are several times slower.
        return [Structure(structure.shape, dtype)] if structure.size else []
    full, rest = divmod(structure.size, MAX_ELEMENTS)
    return [Structure((size,), dtype) for size in [MAX_ELEMENTS] * full + [rest] * (rest > 0)]


def _chunks(x: Array) -> list[Array]:
    """`x` as the messages that carry it: itself where one is enough."""
    if x.size <= MAX_ELEMENTS:
        return [x] if x.size else []
    starts = range(0, x.size, MAX_ELEMENTS)
    return [x.reshape(-1)[start : start + MAX_ELEMENTS] for start in starts]


def _assembled(parts: list[Array], structure: Structure) -> Array:
    """The array of the given structure that arrived as `parts`."""
    whole = parts[0] if len(parts) == 1 else jnp.concatenate([part.reshape(-1) for part in parts])
    if whole.dtype != structure.dtype:
        whole = lax.bitcast_convert_type(whole, structure.dtype)
    return whole.reshape(structure.shape)
