"""The ordinary pytest process: runs the plain tests, has lanes run those of worlds beside them, reports for all."""

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
from launcher.lane import Lane
from launcher.options import for_workers
from launcher.pace import Pace


class Turns:
    """Who may run: a few lanes at a time, in their order; the plain tests count as one."""

    def __init__(self, lanes: list[Lane], at_a_time: int) -> None:
        self.waiting, self.free, self.lock = list(lanes), at_a_time, threading.Lock()

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

    def __init__(self, config: pytest.Config, pace: Pace, costs: Costs) -> None:
        self.config, self.pace, self.costs = config, pace, costs
        self.home: Path | None = None
        self.lanes: dict[marks.Group, Lane] = {}
        self.turns: Turns | None = None
        self.plain = False
        self.warned: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if self.turns is None:
            self._begin(item.session)
        group = marks.of(item)
        if group == marks.PARENT:
            return None
        if self.plain:
            self.plain = False
            self.turns.give_back()
        outcome = self.lanes[group].next_outcome()
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
        ran = [lane for lane in self.lanes.values() if lane.starts]
        if ran:
            terminalreporter.section("worlds")
        for lane in ran:
            starts = ", ".join(f"{seconds:.1f}" for seconds in lane.starts)
            text = f"{len(lane.items)} tests in a {lane.group}: {lane.seconds:.0f} s"
            terminalreporter.line(f"{text}, with {len(lane.starts)} starts that took {starts} s")

    def _begin(self, session: pytest.Session) -> None:
        """Make a lane for each group of processes, and let the first of them run."""
        self.home = Path(tempfile.mkdtemp(prefix="worlds-"))
        arguments, options = for_workers(self.config)
        for group in sorted({marks.of(item) for item in session.items} - {marks.PARENT}):
            environment = mpiexec.clean(os.environ)
            environment.pop("PYTEST_ADDOPTS", None)
            if group.world:
                self.config.hook.pytest_world_environment(environment=environment, size=group.world)
            items = [item for item in session.items if marks.of(item) == group]
            self.lanes[group] = Lane(
                self.config, self.pace, self.costs, self.home, group, items, arguments, options, environment
            )
        # What is shown unread on the terminal must not be mixed up.
        at_a_time = 1 if self.config.option.capture == "no" else settings.worlds_at_a_time()
        self.turns = Turns([*self.lanes.values()], at_a_time)
        for lane in self.lanes.values():
            lane.when_done = self.turns.give_back
        self.plain = marks.of(session.items[0]) == marks.PARENT
        if self.plain:
            self.turns.take()
        self.turns.start()

    def _pass_on_warning(self, event: dict[str, Any]) -> None:
        key = f"{event['nodeid']} {event['filename']} {event['lineno']} {event['text']}"
        if key in self.warned:
            return
        self.warned.add(key)
        category: Any = getattr(builtins, event["category"], UserWarning)
        message = warnings.WarningMessage(category(event["text"]), category, event["filename"], event["lineno"])
        told = {"warning_message": message, "when": event["when"], "nodeid": event["nodeid"], "location": None}
        self.config.hook.pytest_warning_recorded.call_historic(kwargs=told)

    def _stop(self) -> None:
        """End all worlds, whatever they do."""
        if self.turns is not None:
            self.turns.stop()
        for lane in self.lanes.values():
            lane.stopped.set()
        for lane in self.lanes.values():
            if lane.thread.is_alive():
                lane.thread.join(60)
