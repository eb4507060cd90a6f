"""Findings: a verdict, a description, and a cure; merged over the workers with the same finding, and printed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from distdl_jax.plans.shape_dtype import ranks_text

VERDICTS = ("ok", "note", "warning", "error")
"""From good to bad. A note needs no action; a warning costs time or memory; an error stops programs, or spoils
results."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    - `subject`: a word or two; `found`: a sentence; `cure`: what to do, "" if nothing.
    - `workers`: those concerned; () for all.
    """

    verdict: str
    subject: str
    found: str
    cure: str = ""
    workers: tuple[int, ...] = ()


def merged(everyone: Sequence[Iterable[Finding]]) -> list[Finding]:
    """Merge the findings of the workers, by rank: a finding common to all is listed once; subjects stay together."""
    workers: dict[Finding, list[int]] = {}
    for worker, findings in enumerate(everyone):
        for finding in findings:
            workers.setdefault(finding, []).append(worker)
    subjects = list(dict.fromkeys(finding.subject for finding in workers))
    found = (
        replace(finding, workers=() if len(ranks) == len(everyone) else tuple(ranks))
        for finding, ranks in workers.items()
    )
    return sorted(found, key=lambda finding: subjects.index(finding.subject))


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst verdict.

    >>> worst([Finding("ok", "versions", ""), Finding("warning", "threads", "")])
    'warning'
    """
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default="ok")


def as_text(title: str, findings: Sequence[Finding]) -> str:
    """Return the report to print."""
    lines = [line for finding in findings for line in lines_of(finding)]
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS[:0:-1]}
    summary = ", ".join(f"{number} {verdict}{'s' * (number != 1)}" for verdict, number in counts.items())
    return "\n".join([f"distdl_jax doctor: {title}", "", *lines, "", f"{summary}."])


def lines_of(finding: Finding) -> list[str]:
    """Return the lines of a finding."""
    where = f" ({'workers' if finding.workers[1:] else 'worker'} {ranks_text(finding.workers)})"
    texts = [(f"{finding.verdict:8} {finding.subject:17} ", finding.found + where * bool(finding.workers))]
    if finding.cure:
        texts.append((f"{'':26} -> ", finding.cure))
    return [
        line
        for start, text in texts
        for line in textwrap.wrap(start + text, 120, subsequent_indent=" " * len(start), break_on_hyphens=False)
    ]


def as_json(findings: Sequence[Finding], hosts: Sequence[object]) -> str:
    """Return the findings, and each worker's description of its host, as JSON."""
    content = {
        "verdict": worst(findings),
        "workers": len(hosts),
        "findings": [asdict(finding) for finding in findings],
        "hosts": hosts,
    }
    return json.dumps(content, indent=1, default=str)
