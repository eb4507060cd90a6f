"""Messages and collective operations to be timed, in compiled programs as steps have them; and overlap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.machine.places import Pair, Places
from distdl_jax.machine.samples import Collective, Exchange, Message, Overhead, Overlapped
from distdl_jax.machine.tables import LEVELS
from distdl_jax.machine.timed_loops import Job, Seconds, loop, repeated
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.world import Workers, World

if TYPE_CHECKING:
    from mpi4py import MPI

MESSAGE_SIZES = (8, 64, 256, 1024, 4096, 16384, 65536, 2**18, 2**20, 2**22)
LONG = 65536
"""From so many bytes on, what several pairs send together is limited by their host."""

COLLECTIVE_SIZES = (8, 4096, 65536, 2**20)
OVERLAPPED_SIZES = (65536, 2**19, 2**22)

_TAG = 1


def operation_job(world: World) -> Job:
    """Return an operation of MPI's that moves nothing: an all-reduce of one worker."""
    alone = (world.rank,)
    return Job(Overhead("operation"), loop(lambda x: (world.transport.allreduce(x, alone, "sum"),), _zeros(8)))


def message_jobs(world: World, places: Places, sizes: Sequence[int]) -> Iterator[Job]:
    """Yield messages of each level: of one pair in one direction, then of more and more pairs in both at once."""
    for level in LEVELS:
        pairs = places.pairs(level)
        for size in sizes if pairs else ():
            yield Job(Message(level, size), _in_turns(world, pairs[0], size))
            if size < LONG:
                continue
            exchanged = _exchanged(world, pairs, size)
            for count in _counts(len(pairs)):
                takes_part = any(world.rank in pair for pair in pairs[:count])
                senders = count if level == "network" else 2 * count
                yield Job(Exchange(level, size, senders), exchanged if takes_part else None)


def _counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... and the most."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def _zeros(size: int) -> Array:
    return jnp.zeros(size // 4, jnp.float32)


def _like(x: Array) -> ShapeDtype:
    return ShapeDtype(tuple(x.shape), np.dtype(x.dtype))


def _partner(world: World, pair: Pair) -> int:
    return pair[1] if world.rank == pair[0] else pair[0]


def _in_turns(world: World, pair: Pair, size: int) -> Seconds | None:
    """Return messages there and back; half of the time is that of one."""
    if world.rank not in pair:
        return None
    transport, partner = world.transport, _partner(world, pair)

    def begins(x: Array) -> tuple[Array, ...]:
        return (transport.receive(_like(x), partner, _TAG, transport.send(x, partner, _TAG)),)

    def answers(x: Array) -> tuple[Array, ...]:
        y = transport.receive(_like(x), partner, _TAG, x)
        return (lax.optimization_barrier((y, transport.send(y, partner, _TAG)))[0],)

    there_and_back = loop(begins if world.rank == pair[0] else answers, _zeros(size))
    return lambda times: there_and_back(times) / 2


def _exchanged(world: World, pairs: Sequence[Pair], size: int) -> Seconds | None:
    mine = next((pair for pair in pairs if world.rank in pair), None)
    if mine is None:
        return None
    partner = _partner(world, mine)
    return loop(lambda x: (world.transport.sendrecv(x, partner, _like(x), partner, _TAG),), _zeros(size))


def collective_jobs(world: World, places: Places, sizes: Sequence[int]) -> Iterator[Job]:
    """Yield the operations that compiled programs have, of teams of several sizes."""
    for team, hosts in places.teams():
        for size in sizes:
            for kind in ("allreduce", "bcast", "reduce"):
                subject = Collective(kind, len(team), hosts, size, synced=kind != "allreduce")
                is_in = world.rank in team
                yield Job(subject, loop(partial(_collective, world, kind, team), _zeros(size)) if is_in else None)


def _collective(world: World, kind: str, team: Workers, x: Array) -> tuple[Array, ...]:
    transport = world.transport
    match kind:
        case "allreduce":
            return (transport.allreduce(x, team, "sum"),)
        case "bcast":
            y = transport.broadcast(x, team)
        case _:
            y = transport.reduce(x, team, "sum")
    synced = transport.allreduce(lax.optimization_barrier(y)[:2], team, "sum")
    return (lax.optimization_barrier((y, synced))[0],)


def overlap_jobs(comm: MPI.Intracomm, places: Places, sizes: Sequence[int]) -> Iterator[Job]:
    """Yield messages that are begun before, and waited for after, arithmetic that takes about as long.

    It is of the pair that is farthest apart. Compiled programs can't begin a message and go on, so MPI is called here.
    """
    pairs = next((found for level in reversed(LEVELS) if (found := places.pairs(level))), ())
    for size in sizes if pairs else ():
        pair, run = pairs[0], None
        if comm.rank in pair:
            run = _overlapped(comm, pair[1] if comm.rank == pair[0] else pair[0], size)
        for does in ("message", "arithmetic", "both"):
            yield Job(Overlapped(size, does), None if run is None else partial(run, does))


def _overlapped(comm: MPI.Intracomm, partner: int, size: int) -> Callable[[str, int], float]:
    """Return what takes the seconds of messages in both directions, of arithmetic, or of both, so many times."""
    from mpi4py import MPI

    sent, received = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    factor = jnp.full((64, 64), 1 / 64, jnp.float32)
    products = repeated(jnp.matmul, factor, factor)

    def once(does: str) -> None:
        requests = [] if does == "arithmetic" else [comm.Irecv(received, partner), comm.Isend(sent, partner)]
        if does != "message":
            products(often)
        MPI.Request.Waitall(requests)

    def seconds(does: str, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            once(does)
        return time.perf_counter() - start

    of_message = min(seconds("message", 4) for _ in range(5)) / 4
    of_product = (min(products(200) for _ in range(5)) - min(products(0) for _ in range(5))) / 200
    often = min(max(1, round(of_message / max(of_product, 1e-6))), 10000)
    return seconds
