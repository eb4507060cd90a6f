"""The measurement of the machine that a job runs on: `measure`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING, Any

import jax
import jaxlib

from distdl_jax.errors import SetupError
from distdl_jax.machine import measure_compute as compute
from distdl_jax.machine import measure_messages as messages
from distdl_jax.machine.fit import fit_machine
from distdl_jax.machine.machine import Machine
from distdl_jax.machine.places import Places, host_memory, own_place, processor, xla_threads
from distdl_jax.machine.samples import Rounds, Subject, combined
from distdl_jax.machine.timed_loops import Job, rest, take_rounds, until_all_come
from distdl_jax.partition import Partition
from distdl_jax.progress_line import progress
from distdl_jax.transports.open_world import open_world
from distdl_jax.validation import checked_boolean
from distdl_jax.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

ROUNDS, ENOUGH = 3, 0.005
"""How many rounds there are; seconds for which something is repeated each time, five times in a round."""

QUICK_ROUNDS, QUICK_ENOUGH = 1, 0.001

_FEW = compute.CONVOLUTIONS[2:3]


def measure(*, quick: bool = False) -> Machine:
    """Measure the machine that this job runs on: messages, collective operations, arithmetic, memory.

    Collective: all workers of the job call it, and nothing else should run on their cores. It takes about a minute;
    worker 0 shows how far it is. Start as many workers on each host as the jobs will have that are to be foreseen,
    bound alike: a worker computes slower, and messages take longer, where more of them share a host. Levels
    that are not among the workers stay guesses: measure on two hosts or more for messages between hosts.

    **Arguments:**

    - `quick`: take one round of few sizes and shapes, in a few seconds, for a first look. Nothing then says how far
      the numbers can be trusted.

    **Returns:** the machine, the same on all workers. `save` writes it as a file, from which `load` reads it.

    **Raises:** `SetupError`, on all workers, where the rounds of the measurement differ by more than 20 %, since other
    programs run, say; in `dj.simulate`, whose workers share one process.

    >>> import distdl_jax as dj
    >>> machine = dj.machine.measure(quick=True)
    >>> machine.workers_per_host, machine.message_seconds(1024, "host") > 0
    (1, True)
    """
    quick = checked_boolean("quick", quick)
    world = open_world()
    if not world.may_measure:
        raise SetupError(
            "`dj.machine.measure()` times workers that are processes of their own; here they are threads of one "
            "process. Run it under mpiexec, or alone."
        )
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    places = Places(tuple(comm.allgather(own_place())))
    memory = min(comm.allgather(host_memory()))
    about, today = comm.bcast((_about(), date.today().isoformat()))
    with jax.enable_x64(True):
        samples = combined(comm.allgather(_take(world, comm, places, quick)))
    comm.Free()
    hosts = len(places.hosts)
    return Machine(
        name=places.of[0].host,
        about=f"{about}; {world.size} {'worker' if world.size == 1 else 'workers'} on {hosts} "
        f"{'host' if hosts == 1 else 'hosts'}, measured with dj.machine.measure()",
        mpi=" ".join(MPI.Get_library_version().splitlines()[0].split()),
        measured_on=today,
        **fit_machine(samples, places, memory),
    )


def _take(world: World, comm: MPI.Intracomm, places: Places, quick: bool) -> dict[Subject, Rounds]:
    """Return this worker's seconds of each subject that it takes part in, by round."""
    jobs = list(progress(_jobs(world, comm, places, quick), label="compiling what is measured", unit="program"))
    until_all_come(comm, rest)
    rounds, enough = (QUICK_ROUNDS, QUICK_ENOUGH) if quick else (ROUNDS, ENOUGH)
    return take_rounds(jobs, comm, rounds, enough)


def _jobs(world: World, comm: MPI.Intracomm, places: Places, quick: bool) -> Iterator[Job]:
    """Yield all that is timed, on all workers the same in the same order."""

    def sizes(all_of_them: tuple[Any, ...], few: tuple[Any, ...]) -> tuple[Any, ...]:
        return few if quick else all_of_them

    rests = comm.rank > 0
    yield messages.operation_job(world)
    yield from compute.overhead_jobs()
    yield from messages.message_jobs(world, places, sizes(messages.MESSAGE_SIZES, (8, 1024, 65536, 2**20)))
    yield from messages.collective_jobs(world, places, sizes(messages.COLLECTIVE_SIZES, (8, 65536)))
    yield from messages.overlap_jobs(comm, places, sizes(messages.OVERLAPPED_SIZES, (2**19,)))
    yield from compute.array_jobs(sizes(compute.STREAMED, (2**18, 2**22)), rests)
    products, convolutions = sizes(compute.PRODUCTS, compute.PRODUCTS[:2]), sizes(compute.CONVOLUTIONS, _FEW)
    for dtype, step in sizes((("float32", 1), ("float64", 2)), (("float32", 1),)):
        yield from compute.product_jobs(products[::step], dtype, rests)
        yield from compute.convolution_jobs(convolutions[::step], dtype, rests)
    yield from compute.optimiser_jobs(sizes(compute.OPTIMISED, compute.OPTIMISED[:2]))
    here = Partition.of_workers(world, (world.rank,))
    yield from compute.window_jobs(sizes(compute.POOLINGS, compute.POOLINGS[:1]), "float32")
    yield from compute.normalisation_jobs(sizes(compute.NORMALISATIONS, compute.NORMALISATIONS[:1]), here, "float32")


def _about() -> str:
    """Return all that a time depends on besides the program: processor, XLA's threads and flags, and jaxlib."""
    flags = " ".join(sorted(set(os.environ.get("XLA_FLAGS", "").split())))
    return f"{processor()}, threads {xla_threads()}, jaxlib {jaxlib.__version__}{f', {flags}' if flags else ''}"
