"""The ordinary pytest process: runs the plain tests, lets runners do those of worlds, and reports for all."""

import builtins
import os
import shutil
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from launcher import marks, mpiexec, settings
from launcher.costs import Costs
from launcher.options import for_workers
from launcher.runner import GroupRunner
from launcher.slowdown import Slowdown


class Slots:
    """Slots for a few runners at a time, in their order; the plain tests count as one."""

    def __init__(self, runners: list[GroupRunner], at_a_time: int) -> None:
        self.waiting, self.free, self.lock = list(runners), at_a_time, threading.Lock()

    def take(self) -> None:
        with self.lock:
            self.free -= 1

    def start(self) -> None:
        with self.lock:
            while self.free > 0 and self.waiting:
                self.free -= 1
                self.waiting.pop(0).thread.start()

    def give_back(self) -> None:
        with self.lock:
            self.free += 1
        self.start()

    def stop(self) -> None:
        with self.lock:
            self.waiting.clear()


class Parent:
    """Plugin of the parent: takes over the items that other processes run."""

    def __init__(self, config: pytest.Config, slowdown: Slowdown, costs: Costs) -> None:
        self.config, self.slowdown, self.costs = config, slowdown, costs
        self.home: Path | None = None
        self.runners: dict[marks.Group, GroupRunner] = {}
        self.slots: Slots | None = None
        self.plain = False
        self.warned: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if self.slots is None:
            self._begin(item.session)
        group = marks.of(item)
        if group == marks.PARENT:
            return None
        if self.plain:
            self.plain = False
            self.slots.give_back()
        outcome = self.runners[group].next_outcome()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for event in outcome.warnings:
            self._pass_on_warning(event)
        for report in outcome.reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._stop()

    def pytest_unconfigure(self) -> None:
        self._stop()
        if self.home is not None:
            shutil.rmtree(self.home, ignore_errors=True)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        ran = [runner for runner in self.runners.values() if runner.starts]
        if ran:
            terminalreporter.section("worlds")
        for runner in ran:
            starts = ", ".join(f"{seconds:.1f}" for seconds in runner.starts)
            text = f"{len(runner.items)} tests in a {runner.group}: {runner.seconds:.0f} s"
            terminalreporter.line(f"{text}, with {len(runner.starts)} starts that took {starts} s")

    def _begin(self, session: pytest.Session) -> None:
        """Make a runner for each group of processes, and let the first of them run."""
        self.home = Path(tempfile.mkdtemp(prefix="worlds-"))
        arguments, options = for_workers(self.config)
        for group in sorted({marks.of(item) for item in session.items} - {marks.PARENT}):
            environment = mpiexec.clean(os.environ)
            environment.pop("PYTEST_ADDOPTS", None)
            if group.world:
                self.config.hook.pytest_world_environment(environment=environment, size=group.world)
            items = [item for item in session.items if marks.of(item) == group]
            self.runners[group] = GroupRunner(
                self.config, self.slowdown, self.costs, self.home, group, items, arguments, options, environment
            )
        # What is shown unread on the terminal must not be mixed up.
        at_a_time = 1 if self.config.option.capture == "no" else settings.worlds_at_a_time()
        self.slots = Slots([*self.runners.values()], at_a_time)
        for runner in self.runners.values():
            runner.when_done = self.slots.give_back
        self.plain = marks.of(session.items[0]) == marks.PARENT
        if self.plain:
            self.slots.take()
        self.slots.start()

    def _pass_on_warning(self, event: dict[str, Any]) -> None:
        key = f"{event['nodeid']} {event['filename']} {event['lineno']} {event['text']}"
        if key in self.warned:
            return
        self.warned.add(key)
        category: Any = getattr(builtins, event["category"], UserWarning)
        message = warnings.WarningMessage(category(event["text"]), category, event["filename"], event["lineno"])
        recorded = {"warning_message": message, "when": event["when"], "nodeid": event["nodeid"], "location": None}
        self.config.hook.pytest_warning_recorded.call_historic(kwargs=recorded)

    def _stop(self) -> None:
        """End all worlds, whatever they do."""
        if self.slots is not None:
            self.slots.stop()
        for runner in self.runners.values():
            runner.stopped.set()
        for runner in self.runners.values():
            if runner.thread.is_alive():
                runner.thread.join(60)
