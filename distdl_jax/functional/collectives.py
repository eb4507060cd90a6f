"""Copies and reductions within one team of workers, on arrays inside traced programs.

A receive has no buffer but its result, so small teams broadcast and reduce by trees of messages. Half precisions are
summed in float32 and rounded once; the sum of booleans is their "or".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.functional.channel import Channel, message, tied_zeros
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.trees import broadcast_steps, reduction_steps
from distdl_jax.tracing.world import Reduction, Workers, World
from distdl_jax.watchdog.programs.ir import Operation

LARGEST_TREE = 8
"""Teams of up to this many workers broadcast and reduce by a tree of messages, larger ones in one operation of MPI's.

mpi4jax's own broadcast fills a template and copies it on every receiver before it receives; a message does not.
"""

Operations = tuple[Operation, ...]
"""What one worker communicates, in order."""


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which data of `dtype` is summed: float32 for the half precisions, else itself."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return np.dtype(np.float32)
    return np.dtype(dtype)


def mean_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of means of data of `dtype`: floating for integers and booleans, as in `jnp.mean`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.dtype(dtype)
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


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
    """Return what `worker` communicates in `broadcast_in_team`."""
    if shape_dtype.size == 0 or len(team) == 1:
        return ()
    if len(team) > LARGEST_TREE:
        return (_of_team("bcast", team, shape_dtype),)
    return _tree(broadcast_steps(len(team), team.index(worker)), team, shape_dtype, tag)


def reduce_in_team(
    world: World, team: Workers, x: Array | None, anchor: Array, shape_dtype: ShapeDtype, tag: int
) -> Array:
    """Return the sum of the workers' `x` on the first worker of `team`; on the others something tied to it.

    The first worker may pass None, and then adds nothing of its own. `shape_dtype` is the workers' in common.
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
    """Return what `worker` communicates in `reduce_in_team`."""
    wide = ShapeDtype(shape_dtype.shape, accumulation_dtype(shape_dtype.dtype))
    if shape_dtype.size == 0 or len(team) == 1:
        return ()
    if len(team) > LARGEST_TREE:
        return (_of_team("reduce", team, *_reduced(wide, "sum")),)
    return _tree(reduction_steps(len(team), team.index(worker)), team, wide, tag)


def allreduce_in_team(world: World, team: Workers, x: Array, op: Reduction = "sum") -> Array:
    """Return the sum, or the maximum, of the workers' `x`, on every worker of `team` (the same order on all)."""
    if x.size == 0 or len(team) == 1:
        return x
    reducible, op = _reducible(x.astype(accumulation_dtype(np.dtype(x.dtype))), op)
    return world.transport.allreduce(reducible, team, op).astype(x.dtype)


def allreduce_operations(team: Workers, shape_dtype: ShapeDtype, op: Reduction = "sum") -> Operations:
    """Return what each worker of `team` communicates in `allreduce_in_team`."""
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
    """Return the shape and dtype, and the operation, in which `_reducible` has an array reduced."""
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
    """Return `x` in a dtype, and the operation, that every transport has: of booleans sum and maximum are "or"."""
    return (x.astype(jnp.uint8), "max") if x.dtype == jnp.bool_ else (x, op)


def _add(x: Array, y: Array) -> Array:
    return x | y if x.dtype == jnp.bool_ else x + y


def extreme(dtype: np.dtype, largest: bool) -> Any:
    """Return the largest, or the smallest, number of a real dtype: an infinity, where it has one."""
    if jnp.issubdtype(dtype, np.bool_):
        return np.bool_(largest)
    if jnp.issubdtype(dtype, jnp.inexact):
        infinity = np.asarray(np.inf if largest else -np.inf, dtype)
        if np.isinf(infinity):  # some formats of 8 bits have none
            return infinity
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype)
    return dtype.type(info.max if largest else info.min)
