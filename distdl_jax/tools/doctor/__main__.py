"""The program of `python -m distdl_jax doctor`, on each worker."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module

from distdl_jax.settings import Reading, own_reading, setting_problems, warning_of_unknown
from distdl_jax.tools.doctor import job_checks as job
from distdl_jax.tools.doctor import worker_checks as worker
from distdl_jax.tools.doctor.report import Finding, as_json, as_text, lines_of, merged, worst
from distdl_jax.watchdog.launch import supervised
from distdl_jax.watchdog.launch.launcher import job_rank, job_size

LONGEST = 60.0
"""Seconds in which workers must have answered each other, once MPI has started."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line; return the exit status, 1 if an error was found."""
    parser = argparse.ArgumentParser(
        prog="python -m distdl_jax doctor",
        description="Check the installation, the launch and the machine: alone, under a launcher as a job is started, "
        "or for workers in one process. The exit status is 1 if an error was found.",
    )
    help_of_simulate = "check dj.simulate with N workers, without MPI"
    parser.add_argument("--simulate", metavar="N", type=_workers, help=help_of_simulate)
    parser.add_argument("--json", action="store_true", help="print the findings, and the hosts, as JSON")
    parser.add_argument(
        "--checkpoints",
        metavar="DIR",
        default=os.getcwd(),
        help="the folder for checkpoints (default: the current one)",
    )
    options = parser.parse_args(arguments)
    return _simulated(options) if options.simulate else _over_mpi(options)


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of workers, 1 or more.")
    return int(text)


def _print(title: str, findings: list[Finding], hosts: Sequence[job.Host], options: argparse.Namespace) -> int:
    """Print the report; return the exit status."""
    shown = as_json(findings, [host._asdict() for host in hosts]) if options.json else as_text(title, findings)
    print(shown, flush=True)
    return int(worst(findings) == "error")


def settings(everyone: Sequence[Reading]) -> Iterator[Finding]:
    """Yield problems in the settings of the workers, by rank."""
    problems = list(setting_problems(everyone))
    for problem in problems:
        yield Finding("error", "settings", problem, "docs/settings.md has a table of all of them.")
    if warning := warning_of_unknown(everyone):
        yield Finding("warning", "settings", warning, "Correct the name, or remove it.")
    elif not problems:
        yield Finding("ok", "settings", "All are right.")


def _simulated(options: argparse.Namespace) -> int:
    findings = [*worker.versions(needs_mpi=False), *settings([own_reading()]), *worker.jax_and_devices()]
    host = job.Host.here()
    findings += [*job.find([host], options.simulate), *worker.checkpoints(options.checkpoints)]
    began = time.perf_counter()
    try:
        dj = import_module("distdl_jax")
        ranks = dj.simulate(options.simulate, lambda: sum(dj.Partition().allgather_data(1)))
        if ranks != [options.simulate] * options.simulate:
            raise RuntimeError(f"the sums of ones are {ranks}")
        text = f"{options.simulate} workers in this process counted each other in {time.perf_counter() - began:.1f} s."
        findings.append(Finding("ok", "simulate", text))
    except Exception as error:
        findings.append(Finding("error", "simulate", f"dj.simulate fails: {worker.sentence(error)}."))
    return _print(f"{options.simulate} simulated workers", findings, [host], options)


def _over_mpi(options: argparse.Namespace) -> int:
    rank = job_rank()
    if problem := worker.launcher_mismatch():
        if rank in (None, 0):
            print("\n".join(lines_of(problem)), file=sys.stderr, flush=True)
        else:
            time.sleep(1)  # leave it to the first worker
    comm, of_mpi = worker.start_mpi()
    findings = [*worker.versions(), *of_mpi, *worker.jax_and_devices(), *worker.checkpoints(options.checkpoints)]
    host = job.Host.here()
    if comm is None:  # the others wait for this worker without knowing this
        if rank not in (None, 0):
            time.sleep(1)  # after the first worker, if that has the same finding
        findings += [*settings([own_reading()]), *(job.find([host]) if job_size() == 1 else [])]
        return _print(f"worker {rank or 0} of {job_size()}, alone", findings, [host], options)
    timer = threading.Timer(LONGEST, _give_up, (findings, host, options, comm.Get_rank()))
    timer.daemon = True
    timer.start()
    everyone = comm.gather((findings, host, own_reading(), worker.installation()))
    measured = job.messages(comm, comm.allgather(host.name)) + job.folder_seen(comm, options.checkpoints)
    MPI, count = import_module("mpi4py.MPI"), comm.Get_size()
    supervised.tell(supervised.ENDS)  # the others don't need to be ended by the supervisor
    MPI.Finalize()
    timer.cancel()
    if everyone is None or (rank and count == 1):
        return 0
    found, hosts, readings, installations = (list(values) for values in zip(*everyone, strict=True))
    together = [*settings(readings), *worker.disagreements(installations), *job.find(hosts), *measured]
    together += worker.compilation_cache(MPI.Get_library_version())
    return _print(f"{count} worker{'s' * (count > 1)}", merged(found) + together, hosts, options)


def _give_up(findings: list[Finding], host: job.Host, options: argparse.Namespace, rank: int) -> None:
    """End a job whose workers have started MPI but don't answer each other, printing what this worker knows."""
    if rank:
        time.sleep(5)  # worker 0 prints it
    text = (
        f"Worker {rank} has waited {LONGEST:g} s for the others, although MPI has started: a worker hangs, or messages "
        "between hosts don't arrive."
    )
    cure = "Look for a firewall, and for the network interface that MPI uses; try workers on one host only."
    _print(f"worker {rank}, alone", [*findings, Finding("error", "message", text, cure)], [host], options)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
