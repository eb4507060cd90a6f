"""The ordinary pytest process: starts worlds, waits for them, and reports."""

import builtins
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from launcher import marks, reports
from launcher.options import for_workers
from launcher.stacks import ranks_text
from launcher.world import Rank, World

POLL = 0.02
GRACE = 5.0  # for the other ranks to fail too, once one has
LAST_WORDS = 3.0  # for mpiexec to end by itself, once a rank is gone


class Trouble(Exception):
    """A world that has to go. `broken`: and another one of its size would be no better."""

    def __init__(self, title: str, text: str, broken: bool = False):
        super().__init__(title)
        self.title, self.text, self.broken = title, text, broken


class Parent:
    """Plugin of the parent: takes over the items that need a world."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.home: Path | None = None
        self.world: World | None = None
        self.numbers: dict[str, int] = {}
        self.broken: dict[int, Trouble] = {}
        self.warned: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        size = marks.of(item)
        if not size:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item, nextitem, size):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._kill()

    def pytest_unconfigure(self) -> None:
        self._kill()
        if self.home is not None:
            shutil.rmtree(self.home, ignore_errors=True)

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None, size: int) -> list[pytest.TestReport]:
        try:
            if size in self.broken:
                raise self.broken[size]
            if self.world is None:
                self._start(item, size)
            assert self.world is not None
            number = self.numbers[item.nodeid]
            missing = self._wait(item, number)
            if missing:
                merged = [reports.failure(item, missing.title, missing.text, {}, size, "setup")]
            else:
                written = {rank.rank: rank.reports.get(number, []) for rank in self.world.numbered()}
                merged = reports.merge(self.config, written, size)
                self._pass_on_warnings()
                if self.world.dirty(number):
                    self._kill()
        except Trouble as trouble:
            if trouble.broken:
                self.broken[size] = trouble
            failed = self._failures(self.numbers.get(item.nodeid, -1))
            self._kill()
            return [reports.failure(item, trouble.title, trouble.text, failed, size)]
        if self.world is not None and (nextitem is None or marks.of(nextitem) != size):
            try:
                self._finish()
            except Trouble as trouble:
                merged.append(reports.failure(item, trouble.title, trouble.text, {}, size, "teardown"))
            self._kill()
        return merged

    def _start(self, item: pytest.Item, size: int) -> None:
        """Start a world for this item and all that come after it and need the same size."""
        todo = [each for each in item.session.items[item.session.items.index(item) :] if marks.of(each) == size]
        self.numbers = {each.nodeid: number for number, each in enumerate(todo)}
        arguments, options = for_workers(self.config)
        arguments += sorted({str(each.path) for each in todo})
        spec = {"size": size, "items": list(self.numbers), "options": options}
        if self.home is None:
            self.home = Path(tempfile.mkdtemp(prefix="worlds-"))
        show = self.config.option.capture == "no"
        try:
            self.world = World(size, self.home, spec, arguments, self.config.invocation_params.dir, show)
        except OSError as error:
            raise Trouble(f"no world of {size} could be started", str(error), broken=True) from error

    def _wait(self, item: pytest.Item, number: int) -> Trouble | None:
        """Until the item is done on every rank; the reason why it cannot run, if a rank could not collect it."""
        world = self.world
        assert world is not None
        died = 0.0
        while True:
            dead = world.dead()
            world.poll()
            if world.complete(number):
                return None
            now = time.monotonic()
            refused = next((rank.refused for rank in world.ranks.values() if rank.refused), "")
            if refused:
                raise Trouble(refused, "", broken=True)
            if dead and died == 0:
                died = now
            if dead and (world.process.poll() is not None or now - died > LAST_WORDS):
                world.poll()
                if not world.complete(number):
                    raise self._death(world, number)
            elif not dead:
                self._check_time(world, item, number, now)
            if world.ready() and any(item.nodeid in (rank.ready or {})["missing"] for rank in world.ranks.values()):
                return self._missing(world, item)
            time.sleep(POLL)

    def _check_time(self, world: World, item: pytest.Item, number: int, now: float) -> None:
        if not world.ready():
            if now - world.began > marks.general_limit():
                title = f"the world of {world.size} was not ready within {marks.general_limit():g} s"
                raise Trouble(title, self._scene(world), broken=True)
            return
        limit = marks.limit(item)
        starts = [rank.started[number] for rank in world.ranks.values() if number in rank.started]
        since = min(starts) if starts else world.last_sign()
        if now - since > limit:
            text = f"{item.nodeid} did not end within its limit of {limit:g} s"
            raise Trouble("a hang", f"{text}\n{self._where(world, number)}\n\n{self._scene(world)}")
        failed = [rank.done[number][0] for rank in world.ranks.values() if rank.done.get(number, (0, 0))[1] == 2]
        if failed and now - min(failed) > GRACE:
            title = f"{GRACE:g} s after a rank had failed, others were still in the test"
            raise Trouble(title, f"{self._where(world, number)}\n\n{self._scene(world)}")

    def _death(self, world: World, number: int) -> Trouble:
        scene = self._scene(world, stacks=world.process.poll() is None)
        started = any(rank.ready for rank in world.ranks.values())
        verb = "died" if started else "did not start"
        named = world.named_by_mpiexec()
        if named:
            scene = f"mpiexec names {ranks_text(named, world.size)}\n\n{scene}"
        where = self._where(world, number) + "\n\n" if started else ""
        return Trouble(f"the world of {world.size} {verb}: {world.exit_text()}", where + scene, broken=not started)

    def _missing(self, world: World, item: pytest.Item) -> Trouble:
        lacking = [rank for rank in world.numbered() if item.nodeid in (rank.ready or {})["here"]]
        title = f"not collected on {ranks_text([rank.rank for rank in lacking], world.size)}"
        texts: dict[str, list[int]] = {}
        for rank in lacking:
            for event in rank.collected:
                if item.nodeid.startswith(event["nodeid"]):
                    texts.setdefault(f"{event['outcome']}: {event['text']}", []).append(rank.rank)
        told = [f"--- {ranks_text(ranks, world.size)} ---\n{text}" for text, ranks in texts.items()]
        return Trouble(title, "\n".join(told))

    def _finish(self) -> None:
        """Let a world that has run all its items end by itself."""
        world = self.world
        assert world is not None
        limit = marks.general_limit()
        until = time.monotonic() + limit
        while world.process.poll() is None:
            if time.monotonic() > until:
                title = f"the world of {world.size} ran all its tests and did not end within {limit:g} s"
                raise Trouble(title, self._scene(world))
            time.sleep(POLL)
        if world.process.returncode != 0:
            title = f"the world of {world.size} ran all its tests and ended badly: {world.exit_text()}"
            raise Trouble(title, self._scene(world, stacks=False))

    def _scene(self, world: World, stacks: bool = True) -> str:
        """Stacks, and what was written outside of tests."""
        shown = [world.stacks()] if stacks else []
        if world.tail():
            shown.append(f"--- the end of the world's own output ---\n{world.tail()}")
        return "\n\n".join(shown)

    def _where(self, world: World, number: int) -> str:
        """Which ranks were in the test, and which had finished it or not reached it."""
        groups: dict[str, list[int]] = {}
        for rank in world.numbered():
            groups.setdefault(_place(rank, number), []).append(rank.rank)
        told = [f"{ranks_text(ranks, world.size)}: {place}" for place, ranks in groups.items()]
        lost = world.size - len(world.numbered())
        return "\n".join([*told, *([f"{lost} ranks were never heard of"] if lost else [])])

    def _failures(self, number: int) -> dict[int, pytest.TestReport]:
        if self.world is None:
            return {}
        written = {rank.rank: rank.reports.get(number, []) for rank in self.world.numbered()}
        return reports.failures(self.config, written)

    def _pass_on_warnings(self) -> None:
        assert self.world is not None
        for event in self.world.warnings:
            key = f"{event['nodeid']} {event['filename']} {event['lineno']} {event['text']}"
            if key in self.warned:
                continue
            self.warned.add(key)
            category: Any = getattr(builtins, event["category"], UserWarning)
            message = warnings.WarningMessage(category(event["text"]), category, event["filename"], event["lineno"])
            told = {"warning_message": message, "when": event["when"], "nodeid": event["nodeid"], "location": None}
            self.config.hook.pytest_warning_recorded.call_historic(kwargs=told)
        self.world.warnings.clear()

    def _kill(self) -> None:
        if self.world is not None:
            self.world.kill()
            self.world = None


def _place(rank: Rank, number: int) -> str:
    if number in rank.done:
        return f"had finished the test ({('passed', 'skipped', 'failed')[rank.done[number][1]]})"
    if number not in rank.started:
        return "had not begun the test"
    phases = [data["when"] for data in rank.reports.get(number, [])]
    return f"in the test's {('setup', 'call', 'teardown')[min(2, len(set(phases)))]}"
