"""The reports of all ranks of one item made into one."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from launcher.stacks import ranks_text

FULL_TRACEBACKS = 3
ByRank = Mapping[int, pytest.TestReport]


@dataclass
class Crash:
    """Where and why, in one line, for pytest's summary."""

    path: str
    lineno: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.message}"


@dataclass
class WorldRepr:
    """What went wrong on the ranks, in the form that pytest prints."""

    reprcrash: Crash
    parts: list[tuple[str, Any]] = field(default_factory=list)

    def toterminal(self, tw: Any) -> None:
        for heading, body in self.parts:
            if heading:
                tw.sep("-", heading)
            if hasattr(body, "toterminal"):
                body.toterminal(tw)
            else:
                tw.line(str(body))

    def __str__(self) -> str:
        return "\n".join(f"--- {heading} ---\n{body}" if heading else str(body) for heading, body in self.parts)


def merge(config: pytest.Config, written: Mapping[int, list[dict[str, Any]]], size: int) -> list[pytest.TestReport]:
    """Make one report a phase of what every rank has written; ranks, and phases of ranks, may be missing."""
    phases: dict[tuple[str, ...], dict[int, pytest.TestReport]] = {}
    for rank in sorted(written):
        seen: dict[tuple[str, ...], int] = {}
        for data in written[rank]:
            name = (data["when"], str(data.get("$report_type")), json.dumps(data.get("_subtest.context"), default=str))
            seen[name] = seen.get(name, 0) + 1
            phases.setdefault((*name, str(seen[name])), {})[rank] = _load(config, data)
    merged = []
    setup_passed = True
    for key in sorted(phases, key=lambda key: ("setup", "call", "teardown").index(key[0])):
        if key[0] == "call" and not setup_passed:
            continue
        report = merge_phase(phases[key], size)
        setup_passed = setup_passed and not (key[0] == "setup" and report.outcome != "passed")
        merged.append(report)
    return merged


def merge_phase(reports: ByRank, size: int) -> pytest.TestReport:
    """Report passed or skipped if all ranks are, an expected failure if one rank is, and failed otherwise."""
    kinds = {rank: _kind(report) for rank, report in reports.items()}
    report = next((reports[rank] for rank in reports if kinds[rank] == "xfailed"), next(iter(reports.values())))
    report.duration = max(each.duration for each in reports.values())
    if size == 1:
        return report
    report.sections = _sections(reports, size)
    if set(kinds.values()) <= {"xfailed", "xpassed", "xpassed, strict"} and "xfailed" in kinds.values():
        return report
    failed = {rank: each for rank, each in reports.items() if each.outcome == "failed"}
    if failed:
        report.outcome = "failed"
        report.longrepr = WorldRepr(_crash(next(iter(failed.values()))), _tracebacks(failed, kinds, size))  # type: ignore[assignment]
    elif len(set(kinds.values())) > 1:
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)
        text = "the ranks do not agree: " + _kinds_text(kinds, size)
        reasons = [
            f"{ranks_text([rank], size)}: {each.longrepr[2] if isinstance(each.longrepr, tuple) else each.longrepr}"
            for rank, each in reports.items()
            if each.longrepr
        ]
        report.longrepr = WorldRepr(_place(report, text), [("", "\n".join([text, *reasons]))])  # type: ignore[assignment]
    return report


def failure(
    item: pytest.Item, title: str, text: str, reports: ByRank, size: int, when: str = "call"
) -> pytest.TestReport:
    """Report a test that some ranks could not report on as failed; `reports` are the failures of the others."""
    report = pytest.TestReport(item.nodeid, item.location, {name: 1 for name in item.keywords}, "failed", None, when)  # type: ignore[arg-type]
    parts: list[tuple[str, Any]] = _tracebacks(reports, {}, size) if reports else []
    report.longrepr = WorldRepr(
        _place(report, title), [*parts, *([(title, text)] if parts else [("", f"{title}\n{text}".strip())])]
    )  # type: ignore[assignment]
    report.sections = _sections(reports, size) if reports else []
    return report


def failures(config: pytest.Config, written: Mapping[int, list[dict[str, Any]]]) -> dict[int, pytest.TestReport]:
    """Return the first failed report of every rank that has one."""
    loaded = {rank: [_load(config, data) for data in datas] for rank, datas in written.items()}
    first = {rank: next((each for each in reports if each.failed), None) for rank, reports in sorted(loaded.items())}
    return {rank: report for rank, report in first.items() if report is not None}


def _load(config: pytest.Config, data: dict[str, Any]) -> pytest.TestReport:
    report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=dict(data))
    # JSON has no tuples, and pytest insists on them.
    report.location = tuple(report.location)  # type: ignore[assignment]
    report.sections = [(name, text) for name, text in report.sections]
    report.user_properties = [(name, value) for name, value in report.user_properties]
    if isinstance(report.longrepr, list):
        report.longrepr = tuple(report.longrepr)
    return report


def _kind(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.failed and str(report.longrepr).startswith("[XPASS(strict)]"):
        return "xpassed, strict"
    return report.outcome


def _kinds_text(kinds: Mapping[int, str], size: int) -> str:
    ranks = {kind: [rank for rank in kinds if kinds[rank] == kind] for kind in dict.fromkeys(kinds.values())}
    return "; ".join(f"{kind} on {ranks_text(these, size)}" for kind, these in ranks.items())


def _tracebacks(failed: ByRank, kinds: Mapping[int, str], size: int) -> list[tuple[str, Any]]:
    """Return equal tracebacks once; after the third different one, only the line that says why."""
    groups: dict[str, list[int]] = {}
    for rank, report in failed.items():
        groups.setdefault(re.sub(r"0x[0-9a-f]+", "0x", report.longreprtext), []).append(rank)
    parts: list[tuple[str, Any]] = []
    for number, ranks in enumerate(groups.values()):
        report = failed[ranks[0]]
        body = report.longrepr if number < FULL_TRACEBACKS else _crash(report)
        parts.append((f"failed on {ranks_text(ranks, size)}", body))
    others = {rank: kind for rank, kind in kinds.items() if rank not in failed}
    return [*parts, ("", _kinds_text(others, size))] if others else parts


def _sections(reports: ByRank, size: int) -> list[tuple[str, str]]:
    """Return what the ranks printed, equal texts once."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, report in reports.items():
        for section in report.sections:
            groups.setdefault(section, []).append(rank)
    return [(f"{name}, {ranks_text(ranks, size)}", text) for (name, text), ranks in groups.items()]


def _crash(report: pytest.TestReport) -> Crash:
    found = getattr(report.longrepr, "reprcrash", None)
    if found is None:
        lines = report.longreprtext.strip().splitlines()
        return _place(report, lines[-1] if lines else "failed")
    return Crash(found.path, found.lineno, found.message)


def _place(report: pytest.TestReport, message: str) -> Crash:
    return Crash(report.location[0], (report.location[1] or 0) + 1, message)
