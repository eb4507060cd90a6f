"""The program of `python -m distdl_jax doctor`, on each worker."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distdl_jax.doctor import collect_host, collect_software
from distdl_jax.doctor import launch as launch_findings
from distdl_jax.doctor.facts import Facts, Measured, Mpi
from distdl_jax.doctor.findings import Finding, worst
from distdl_jax.doctor.measure import measure
from distdl_jax.doctor.report import as_json, as_text, findings, findings_of_simulation, lines_of
from distdl_jax.errors import DistDLError
from distdl_jax.launch import supervised
from distdl_jax.settings import own_reading

if TYPE_CHECKING:
    from distdl_jax.tools.cost.machine import Machine

LONGEST = 60.0
"""Seconds in which workers must have answered each other, once MPI is up."""


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line; return the exit status, 1 where an error was found."""
    options = _parser().parse_args(arguments)
    return _simulated(options) if options.simulate else _over_mpi(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m distdl_jax doctor",
        description="Look at the installation, the launch and the machine: alone, under a launcher as a job is "
        "started, or for workers in one process. The exit status is 1 where an error was found.",
    )
    parser.add_argument(
        "--simulate", metavar="N", type=_workers, help="look at dj.simulate with N workers, without MPI"
    )
    parser.add_argument("--json", action="store_true", help="print the findings, and the facts behind them, as JSON")
    parser.add_argument(
        "--machine", metavar="FILE", help="compare messages with this machine's file, or shipped machine"
    )
    parser.add_argument("--checkpoints", metavar="DIR", default=os.getcwd(), help="where checkpoints go (here)")
    return parser


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of workers, 1 or more.")
    return int(text)


def _collect(options: argparse.Namespace) -> Facts:
    """Return the facts of this worker; starts MPI, which waits for the others, but for a simulation."""
    host = collect_host.host()
    launch = collect_host.launch(tries=not options.simulate)
    if (foreseen := launch_findings.foreseen(launch)) is not None:
        if launch.rank in (None, 0):
            print("\n".join(lines_of(foreseen)), file=sys.stderr, flush=True)
        else:
            time.sleep(1)  # let the first worker say it
    mpi = Mpi() if options.simulate else collect_software.start_mpi()
    software = collect_software.software()
    return Facts(
        software=software,
        settings=own_reading(),
        host=host,
        mpi=mpi,
        launch=launch,
        threads=collect_software.threads(),
        devices=collect_software.devices(),
        cache=collect_host.folder(collect_software.cache_folder()),
        checkpoints=collect_host.folder(options.checkpoints),
    )


def _simulated(options: argparse.Namespace) -> int:
    facts = _collect(options)
    seconds, error = None, ""
    if facts.software.jax_error is None:
        try:
            seconds = _seconds_of_a_sum(options.simulate)
        except (DistDLError, RuntimeError) as failure:
            error = str(failure)
    else:
        error = facts.software.jax_error
    return _print(list(findings_of_simulation(facts, options.simulate, seconds, error)), [facts], options)


def _seconds_of_a_sum(workers: int) -> float:
    import jax.numpy as jnp

    import distdl_jax as dj

    def program() -> float:
        P = dj.Partition()
        return float(dj.functional.all_sum_reduce(jnp.ones(1), P, axes_keep=())[0])

    began = time.perf_counter()
    sums = dj.simulate(workers, program)
    if sums != [workers] * workers:
        raise DistDLError(f"the sum of {workers} ones is {sums} on the workers.")
    return time.perf_counter() - began


def _over_mpi(options: argparse.Namespace) -> int:
    facts = _collect(options)
    first = facts.launch.rank in (None, 0)
    if facts.mpi.error is not None:  # the others wait for this worker, and know nothing of it
        if not first:
            time.sleep(1)  # after the first worker, where that has the same to say
        return _print(list(findings([facts], Measured())), [facts], options)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    timer = threading.Timer(LONGEST, _give_up, (facts, options, comm.Get_rank()))
    timer.daemon = True
    timer.start()
    everyone = comm.gather(facts)
    hosts = comm.bcast(everyone and [each.host.name for each in everyone])
    measured = measure(comm, hosts, options.checkpoints) if comm.Get_size() > 1 else Measured()
    status = 0
    if everyone and (first or comm.Get_size() > 1):
        machine, wrong = _machine(options.machine)
        status = _print([*wrong, *findings(everyone, measured, machine)], everyone, options)
    supervised.tell(supervised.ENDS)  # the others need no end from the supervisor
    MPI.Finalize()
    timer.cancel()
    return status


def _machine(path: str | None) -> tuple[Machine | None, list[Finding]]:
    """Return the machine to compare with, or why there is none."""
    if path is None:
        return None, []
    try:
        from distdl_jax.tools.cost.machine import load

        return load(path), []
    except (DistDLError, ImportError) as error:
        return None, [Finding("error", "machine", f"--machine: {error}", "docs/machines.md")]


def _give_up(facts: Facts, options: argparse.Namespace, rank: int) -> None:
    """End the job, whose workers have started MPI but don't answer each other, with what this worker knows."""
    if rank:
        time.sleep(5)  # worker 0 says it
    found = (
        f"Worker {rank} has waited {LONGEST:g} s for the others, although MPI is up: a worker hangs, or messages "
        "between hosts don't arrive."
    )
    cure = "Look for a firewall, and for the network interface that MPI takes; try workers on one host alone."
    lost = Finding("error", "message", found, cure)
    _print([*findings([facts], Measured()), lost], [facts], options)
    os._exit(1)


def _print(found: list[Finding], everyone: Sequence[Facts], options: argparse.Namespace) -> int:
    """Print the report; return the exit status."""
    print(as_json(found, everyone) if options.json else as_text(found, everyone), flush=True)
    return int(worst(found) == "error")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
