"""Processor seconds of tests, children and all ranks included."""

import json
import resource
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher import forkserver, marks
from launcher.slowdown import Slowdown

SHOWN = 10
BUDGET = 40.0  # processor seconds that the tests of one file may take before it is named, where starts cost as usual


def of_children() -> float:
    """Return the processor seconds of the children of this process that have ended, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def so_far() -> float:
    """Return the processor seconds of this process, its ended children, and the programs forked for it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + of_children() + forkserver.seconds()


class Costs:
    """Plugin of the parent: counts the plain tests here, adds what the worlds report, and sums up."""

    def __init__(self, slowdown: Slowdown) -> None:
        self.slowdown = slowdown
        self.by_test: defaultdict[str, float] = defaultdict(float)
        self.starts = 0.0
        self._of_worlds = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def reaping(self) -> Iterator[None]:
        """Mark where a world may be found to have ended: it is no child of a plain test."""
        with self._lock:
            before = of_children()
            yield
            self._of_worlds += of_children() - before

    def of_plain(self) -> float:
        with self._lock:
            return so_far() - self._of_worlds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if marks.of(item) != marks.PARENT:
            return (yield)
        before = self.of_plain()
        try:
            return (yield)
        finally:
            self.by_test[item.nodeid] += self.of_plain() - before

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if config.option.costs:
            rows = sorted(self.by_test.items(), key=lambda row: -row[1])
            Path(config.option.costs).write_text(json.dumps(dict(rows), indent=0))
        if not self.by_test:
            return
        files: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
        for name, seconds in self.by_test.items():
            files[name.split("::")[0]].append((seconds, name.split("::", 1)[-1]))
        totals = sorted(((sum(seconds for seconds, _ in each), name) for name, each in files.items()), reverse=True)
        terminalreporter.section("processor seconds")
        tests = sum(self.by_test.values())
        terminalreporter.line(
            f"{so_far():.0f} s in all: {tests:.0f} s in tests, {self.starts:.0f} s in starts of worlds; of files:"
        )
        budget = BUDGET * self.slowdown.processor
        for seconds, name in totals[:SHOWN]:
            dearest = max(files[name])
            over = f"; over the budget of {budget:.0f} s" if seconds > budget else ""
            terminalreporter.line(f"{seconds:.1f} s {name}: {dearest[0]:.1f} s in {dearest[1]}{over}")
