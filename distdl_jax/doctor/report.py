"""All findings about a job, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from distdl_jax.doctor import devices, hosts, launch, messages, software, storage
from distdl_jax.doctor.facts import Facts, Measured
from distdl_jax.doctor.findings import VERDICTS, Finding, by_host, worker_names, worst

if TYPE_CHECKING:
    from distdl_jax.tools.cost.machine import Machine

_WIDTH = 120


def findings(everyone: Sequence[Facts], measured: Measured, machine: Machine | None = None) -> Iterator[Finding]:
    """Yield all findings about workers that MPI has started, or one that can't start it."""
    yield from software.find(everyone)
    yield from launch.find(everyone)
    if len(everyone) >= everyone[0].launch.started:  # else nothing is known of the workers beside this one
        yield from hosts.find(everyone)
    yield from devices.find(everyone)
    yield from storage.find(everyone, measured)
    yield from messages.find(everyone, measured, machine)


def findings_of_simulation(facts: Facts, workers: int, seconds: float | None, error: str = "") -> Iterator[Finding]:
    """Yield all findings about `dj.simulate` on so many workers, which took so long to add up a number, or failed."""
    yield from software.find([facts], simulated=True)
    yield from hosts.find([facts], simulated=workers)
    yield from devices.find([facts])
    yield from storage.find([facts])
    if seconds is None:
        yield Finding("error", "simulate", f"dj.simulate({workers}, ...) fails: {error}")
    else:
        yield Finding("ok", "simulate", f"{workers} workers in this process added up a number in {seconds:.1f} s.")


def as_text(found: Sequence[Finding], everyone: Sequence[Facts]) -> str:
    """Return the report that is printed."""
    count, number, started = len(everyone), len(by_host(everyone)), everyone[0].launch
    who = f"{count} worker{'s' * (count > 1)} on {number} host{'s' * (number > 1)}"
    if count < started.started:
        who = f"worker {started.rank} of {started.started}, by itself"
    lines = [f"distdl_jax doctor: {who}", ""]
    for finding in found:
        lines += lines_of(finding)
    counts = {verdict: sum(finding.verdict == verdict for finding in found) for verdict in VERDICTS[:0:-1]}
    summary = ", ".join(f"{number} {verdict}{'s' * (number != 1)}" for verdict, number in counts.items())
    return "\n".join([*lines, "", f"{summary}."])


def lines_of(finding: Finding) -> list[str]:
    """Return the lines that a finding takes."""
    where = f" ({worker_names(finding.workers)})" if finding.workers else ""
    lines = _wrapped(f"{finding.verdict:8} {finding.subject:17} ", finding.found + where)
    return lines + (_wrapped(f"{'':26} -> ", finding.cure) if finding.cure else [])


def _wrapped(start: str, text: str) -> list[str]:
    indent = " " * (27 if "->" not in start else 30)
    return textwrap.wrap(start + text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def as_json(found: Sequence[Finding], everyone: Sequence[Facts]) -> str:
    """Return findings and facts as JSON."""
    content = {
        "verdict": worst(found),
        "workers": len(everyone),
        "findings": [asdict(finding) for finding in found],
        "facts": [asdict(facts) for facts in everyone],
    }
    return json.dumps(content, indent=1, default=str)
