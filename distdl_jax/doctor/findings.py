"""Findings: a verdict, what was found, and a cure; merged over the workers that find the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distdl_jax.doctor.facts import Facts

VERDICTS = ("ok", "note", "warning", "error")
"""From good to bad. A note needs no action; a warning costs time or memory; an error stops programs, or makes them
wrong."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    - `subject`: a word or two; `found`: a sentence; `cure`: what to do, "" where there is nothing to do.
    - `workers`: those that it holds for; () for all.
    """

    verdict: str
    subject: str
    found: str
    cure: str = ""
    workers: tuple[int, ...] = ()


OfWorker = Callable[[Facts], Iterable[Finding]]


def on_each_worker(find: OfWorker, everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Merge what `find` finds on each worker, in the order of the first that finds it."""
    by_finding: dict[Finding, list[int]] = {}
    for worker, facts in enumerate(everyone):
        for finding in find(facts):
            by_finding.setdefault(finding, []).append(worker)
    for finding, workers in by_finding.items():
        yield replace(finding, workers=() if len(workers) == len(everyone) else tuple(workers))


HOST = "<host>"
"""Stands in a sentence for the names of the hosts that it holds for."""

OfHost = Callable[[Sequence[Facts], Sequence[int]], Iterable[Finding]]


def on_each_host(find: OfHost, everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Merge what `find` finds on each host, from the facts and the ranks of its workers."""
    by_finding: dict[Finding, list[str]] = {}
    for host, workers in by_host(everyone).items():
        for finding in find([everyone[worker] for worker in workers], workers):
            by_finding.setdefault(finding, []).append(host)
    for finding, hosts in by_finding.items():
        names = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
        yield replace(finding, found=finding.found.replace(HOST, names))


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst verdict.

    >>> worst([Finding("ok", "versions", ""), Finding("warning", "threads", "")])
    'warning'
    """
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default="ok")


def worker_names(workers: Sequence[int]) -> str:
    """Name workers, in ranges.

    >>> worker_names([2]), worker_names([0, 1, 2, 3, 7])
    ('worker 2', 'workers 0 to 3, 7')
    """
    runs: list[list[int]] = []
    for worker in sorted(workers):
        if runs and worker == runs[-1][-1] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"worker{'s' * (len(workers) > 1)} {', '.join(texts)}"


def by_host(everyone: Sequence[Facts]) -> Mapping[str, list[int]]:
    """Return the workers of each host, in the order of their ranks."""
    hosts: dict[str, list[int]] = {}
    for worker, facts in enumerate(everyone):
        hosts.setdefault(facts.host.name, []).append(worker)
    return hosts


def size_text(nbytes: float, digits: int = 3) -> str:
    """Return a size in the largest unit that is not above it.

    >>> size_text(64 * 2**20), size_text(1.5 * 2**30)
    ('64 MiB', '1.5 GiB')
    """
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.{digits}g} {name}"
    return f"{nbytes:.0f} bytes"


def time_text(seconds: float) -> str:
    """Return a time in microseconds or milliseconds.

    >>> time_text(1.234e-6), time_text(0.0123)
    ('1.23 us', '12.3 ms')
    """
    return f"{1e6 * seconds:.3g} us" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"
