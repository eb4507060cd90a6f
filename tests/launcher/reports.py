"""The reports of all ranks of one test made into one."""

import re
from collections.abc import Iterable, Mapping

import pytest

ByRank = Mapping[int, list[pytest.TestReport]]


def ranks_text(ranks: Iterable[int], size: int) -> str:
    """Return `rank 2 of 4`, `ranks 0, 1, 3 of 4` or `all 4 ranks`."""
    numbers = sorted(ranks)
    if len(numbers) == size > 1:
        return f"all {size} ranks"
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))} of {size}"


def once(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Return each text once, with its ranks; addresses make no difference."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(re.sub(r"0x[0-9a-f]+", "0x", texts[rank]), []).append(rank)
    return [(ranks, texts[ranks[0]]) for ranks in groups.values()]


def outcome(reports: list[pytest.TestReport]) -> str:
    """Return how a rank has ended the test."""
    outcomes = [report.outcome for report in reports]
    return next((each for each in ("failed", "skipped") if each in outcomes), "passed")


def merge(by_rank: ByRank, size: int) -> list[pytest.TestReport]:
    """Make one report a phase: passed or skipped if it is so on all ranks, else failed."""
    merged = []
    for when in ("setup", "call", "teardown"):
        phase = {rank: report for rank, reports in by_rank.items() for report in reports if report.when == when}
        if phase and (when != "call" or merged[0].passed):
            merged.append(_merge_phase(phase, size))
    return merged


def failure(item: pytest.Item, title: str, by_rank: ByRank, size: int, when: str = "call") -> pytest.TestReport:
    """Report a test that has not ended on all ranks as failed, and show the failures of those where it has."""
    keywords = dict.fromkeys(item.keywords, 1)
    report = pytest.TestReport(item.nodeid, item.location, keywords, "failed", title, when)  # type: ignore[arg-type]
    failed = {rank: each for rank, reports in by_rank.items() for each in reports if each.failed}
    report.sections = _tracebacks(failed, size) + _printed(failed, size)
    return report


def _merge_phase(phase: Mapping[int, pytest.TestReport], size: int) -> pytest.TestReport:
    """Return the report of the first rank that failed, else that of the first; others' tracebacks are its sections."""
    failed = {rank: report for rank, report in phase.items() if report.failed}
    merged = next(iter((failed or phase).values()))
    merged.duration = max(report.duration for report in phase.values())
    if size == 1:
        return merged
    merged.sections = (_tracebacks(failed, size)[1:] if failed else []) + _printed(phase, size)
    ways = once({rank: report.outcome for rank, report in phase.items()})
    if len(ways) > 1:
        text = "; ".join(f"{way} on {ranks_text(ranks, size)}" for ranks, way in ways)
        if failed:
            merged.sections.insert(0, (text, ""))
        else:
            merged.outcome, merged.longrepr = "failed", f"the ranks do not agree: {text}"
    elif failed:
        merged.sections.insert(0, (f"failed on {ranks_text(failed, size)}", ""))
    return merged


def _tracebacks(failed: Mapping[int, pytest.TestReport], size: int) -> list[tuple[str, str]]:
    texts = once({rank: report.longreprtext for rank, report in failed.items()})
    return [(f"failed on {ranks_text(ranks, size)}", text) for ranks, text in texts]


def _printed(phase: Mapping[int, pytest.TestReport], size: int) -> list[tuple[str, str]]:
    """Return what the ranks printed, equal texts once."""
    names = dict.fromkeys(name for report in phase.values() for name, _ in report.sections)
    return [
        (f"{name}, {ranks_text(ranks, size)}", text)
        for name in names
        for ranks, text in once({rank: dict(report.sections).get(name, "") for rank, report in phase.items()})
        if text
    ]
