"""Times of what workers do again and again: in loops of compiled programs, in rounds, in a shuffled order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.machine.samples import MEETINGS, Rounds, Subject
from distdl_jax.progress_line import progress

if TYPE_CHECKING:
    from mpi4py import MPI

Seconds = Callable[[int], float]
"""Does something so many times; returns the seconds that this takes."""

BATCHES, MEETING_BATCHES = 5, 15
"""How often a subject is timed in a round: arithmetic, and what workers meet in, whose times vary more."""

MOST_TIMES, LARGEST_STEP = 20000, 20
"""How often it is repeated each time, at most; and how many times more often than in the try before."""


@dataclass(frozen=True)
class Job:
    """A subject, and what this worker does for it.

    - `seconds`: None where it rests.
    """

    subject: Subject
    seconds: Seconds | None


SLOW = 0.2
"""Seconds from which on something is done once in a round."""

SHORTEST = 1e-10
"""Seconds of a repetition where several took no longer than one, by chance."""


def loop(body: Callable[..., tuple[Array, ...]], *arrays: Array) -> Seconds:
    """Compile a loop whose body takes arrays and returns such arrays; what it does is then part of one program.

    A program that is called for each would spend more in the call than in a short message.
    """

    def program(times: Array, *arrays: Array) -> Array:
        last = lax.fori_loop(0, times, lambda _, now: body(*now), arrays)
        return last[0].ravel()[:1]

    compiled = jax.jit(program).lower(np.int32(0), *arrays).compile()

    def seconds(times: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(np.int32(times), *arrays))
        return time.perf_counter() - start

    return seconds


def repeated(operation: Callable[..., Array], *arrays: Array) -> Seconds:
    """Compile a loop of an operation on arrays, each time on the same, which XLA doesn't know.

    The whole result goes from one repetition to the next: else XLA computes only what is read of it. A barrier ties the
    arrays to it; if a number were written into them instead, XLA would copy them each time.
    """

    def body(y: Array, *arrays: Array) -> tuple[Array, ...]:
        _, *tied = lax.optimization_barrier((y, *arrays))
        return (lax.optimization_barrier(operation(*tied)), *tied)

    y = jax.eval_shape(operation, *arrays)
    return loop(body, jnp.zeros(y.shape, y.dtype), *arrays)


def take_rounds(jobs: Sequence[Job], comm: MPI.Intracomm, rounds: int, enough: float) -> dict[Subject, Rounds]:
    """Return this worker's seconds of each subject that it takes part in, by round; all workers have the same jobs.

    - `enough`: seconds for which a subject is repeated each time.
    """
    times = [_often_enough(job, comm, enough) for job in progress(jobs, label="choosing repetitions", unit="program")]
    found: dict[Subject, Rounds] = {job.subject: [] for job in jobs if job.seconds is not None}
    shuffled = random.Random(0)  # the same order on all workers
    with progress(total=rounds * len(jobs), label="measuring the machine", unit="timing") as shown:
        for _ in range(rounds):
            order = list(zip(jobs, times, strict=True))
            shuffled.shuffle(order)
            for job, often in order:
                comm.Barrier()
                meanwhile: Callable[[], object] = rest
                if job.seconds is not None:
                    found[job.subject].append(_batches(job.seconds, often, job.subject))
                    if not isinstance(job.subject, MEETINGS):
                        # Who is done computing goes on, so that the others are not measured while it rests.
                        meanwhile = partial(job.seconds, often)
                until_all_come(comm, meanwhile)
                shown.advance()
    return found


def _often_enough(job: Job, comm: MPI.Intracomm, enough: float) -> int:
    """Return how often a subject is repeated in a batch: the same on all workers."""
    from mpi4py import MPI

    often = 1
    for share in (0.1, 0.3, 1.0):
        comm.Barrier()
        took = 0.0
        if job.seconds is not None:
            once = job.seconds(1)
            took = often * once
            if not _is_slow(once, job.subject):
                once = min(once, job.seconds(1))
                took = min(job.seconds(often + 1) for _ in range(2)) - once
        until_all_come(comm, rest)
        longest = max(comm.allreduce(took, op=MPI.MAX), SHORTEST)
        # A small step at a time: what took no time by chance may take long.
        often = max(1, min(MOST_TIMES, LARGEST_STEP * often, round(often * share * enough / longest)))
    return often


def _batches(seconds: Seconds, often: int, subject: Subject) -> list[float]:
    """Return the seconds of one repetition, in several batches.

    The first repetition does not count, in which buffers are touched for the first time, and neither does the call.
    """
    once = seconds(1)
    if _is_slow(once, subject):
        return [once] * BATCHES
    once = min(once, seconds(1), seconds(1))
    batches = MEETING_BATCHES if isinstance(subject, MEETINGS) else BATCHES
    return [max((seconds(often + 1) - once) / often, SHORTEST) for _ in range(batches)]


def _is_slow(once: float, subject: Subject) -> bool:
    """Return whether something takes so long that it is done once; partners in a meeting could differ in that."""
    return once > SLOW and not isinstance(subject, MEETINGS)


def until_all_come(comm: MPI.Intracomm, meanwhile: Callable[[], object]) -> None:
    """Do something until all workers have come here."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        meanwhile()


def rest() -> None:
    """Leave the core to those that are measured."""
    time.sleep(0.0005)
