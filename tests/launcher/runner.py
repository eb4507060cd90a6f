"""A thread of the parent that runs all tests of one group, in one world after the other."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher import marks, reports
from launcher.costs import Costs
from launcher.slowdown import Slowdown
from launcher.stacks import ranks_text
from launcher.world import Rank, World

POLL = 0.02
GRACE = 5.0  # for the other ranks to fail too, once one has
LAST_WORDS = 10.0  # for mpiexec to end by itself, once a rank is gone


class WorldError(Exception):
    """A world has to end. `broken`: another one of its kind would fail in the same way."""

    def __init__(self, title: str, text: str, broken: bool = False):
        super().__init__(title)
        self.title, self.text, self.broken = title, text, broken


class Stopped(Exception):
    """The session ends before all tests have run."""


@dataclass
class Outcome:
    """The reports of an item from all ranks, and their warnings."""

    reports: list[pytest.TestReport]
    warnings: list[dict[str, Any]] = field(default_factory=list)


class GroupRunner:
    """Runs the items of one group, in their order."""

    def __init__(
        self,
        config: pytest.Config,
        slowdown: Slowdown,
        costs: Costs,
        home: Path,
        group: marks.Group,
        items: list[pytest.Item],
        arguments: list[str],
        options: dict[str, Any],
        environment: dict[str, str],
    ) -> None:
        self.thread = threading.Thread(target=self._run_all, name=str(group), daemon=True)
        self.config, self.slowdown, self.costs, self.home = config, slowdown, costs, home
        self.group, self.items = group, items
        self.size = group.processes
        self.arguments, self.options, self.environment = arguments, options, environment
        self.when_done: Callable[[], None] = lambda: None
        self.stopped = threading.Event()
        self.starts: list[float] = []
        self.seconds = 0.0
        self._outcomes: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
        self._world: World | None = None
        self._starting = False
        self._numbers: dict[str, int] = {}
        self._broken: WorldError | None = None

    def next_outcome(self) -> Outcome:
        """Wait for the outcome of the next item."""
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _run_all(self) -> None:
        began = time.monotonic()
        try:
            for place, item in enumerate(self.items):
                outcome = Outcome(self._run(item, place))
                if self._world is not None:
                    outcome.warnings, self._world.warnings = self._world.warnings, []
                if self._world is not None and self._world.spent:
                    self._kill()
                self.seconds = time.monotonic() - began
                self._outcomes.put(outcome)
        except BaseException as error:  # whatever it is, the main thread waits for it
            self._outcomes.put(error)
        finally:
            self._kill()
            self.when_done()

    def _run(self, item: pytest.Item, place: int) -> list[pytest.TestReport]:
        began = time.monotonic()
        try:
            if self._broken is not None:
                raise self._broken
            if self._world is None:
                self._start(place)
            assert self._world is not None
            number = self._numbers[item.nodeid]
            missing = self._wait(item, number)
            if missing:
                merged = [reports.failure(item, missing.title, missing.text, {}, self.size, "setup")]
            else:
                written = {rank.rank: rank.reports.get(number, []) for rank in self._world.numbered()}
                merged = reports.merge(self.config, written, self.size)
                self.costs.by_test[item.nodeid] += self._world.cost(number)
                if self._world.dirty(number):
                    self._world.spent = True
                    return merged
        except WorldError as error:
            if error.broken:
                self._broken = error
            failed = self._failures(self._numbers.get(item.nodeid, -1))
            self._kill()
            report = reports.failure(item, error.title, error.text, failed, self.size)
            report.duration = time.monotonic() - began
            return [report]
        if place + 1 == len(self.items):
            try:
                self._finish()
            except WorldError as error:
                merged.append(reports.failure(item, error.title, error.text, {}, self.size, "teardown"))
            self._world.spent = True
        return merged

    def _start(self, place: int) -> None:
        """Start a world for the item at this place and all that come after it."""
        todo = self.items[place:]
        self._numbers = {each.nodeid: number for number, each in enumerate(todo)}
        arguments = [*self.arguments, *sorted({str(each.path) for each in todo})]
        spec = {"size": self.group.world, "items": list(self._numbers), "options": self.options}
        show = self.config.option.capture == "no"
        where = self.config.invocation_params.dir
        try:
            self._world = World(self.group, self.costs, self.home, spec, arguments, self.environment, where, show)
        except OSError as error:
            raise WorldError(f"no {self.group} could be started", str(error), broken=True) from error
        self._starting = True
        self.slowdown.begin(self.group, self.size)

    def _started(self, world: World) -> None:
        self._starting = False
        self.slowdown.end(self.group)
        self.starts.append(time.monotonic() - world.began)
        self.costs.starts += sum(world.start_costs())
        self.slowdown.started(sum(world.start_costs()) / self.size)

    def _wait(self, item: pytest.Item, number: int) -> WorldError | None:
        """Wait until the item is done on every rank; return why it cannot run, if a rank could not collect it."""
        world = self._world
        assert world is not None
        died = 0.0
        while True:
            dead = world.dead()
            world.poll()
            if self._starting and world.ready():
                self._started(world)
            if world.complete(number):
                return None
            now = time.monotonic()
            refused = next((rank.refused for rank in world.ranks.values() if rank.refused), "")
            if refused:
                raise WorldError(refused, "", broken=True)
            # Before its end, for a world that has nothing to run may have ended by now.
            if world.ready() and any(item.nodeid in (rank.ready or {})["missing"] for rank in world.ranks.values()):
                return self._missing(world, item)
            if dead and died == 0:
                died = now
            if dead and (world.ended() or now - died > LAST_WORDS * self.slowdown.factor()):
                world.poll()
                if not world.complete(number):
                    raise self._death(world, number)
            elif not dead:
                self._check_time(world, item, number, now)
            self._pause()

    def _pause(self) -> None:
        if self.stopped.wait(POLL):
            raise Stopped

    def _check_time(self, world: World, item: pytest.Item, number: int, now: float) -> None:
        if not world.ready():
            limit = marks.start_limit(self.size, self.slowdown)
            if now - world.began > limit:
                title = f"the {self.group} was not ready within {limit:.3g} s"
                raise WorldError(title, self._scene(world), broken=True)
            return
        limit = marks.limit(item, self.slowdown)
        starts = [rank.started[number] for rank in world.ranks.values() if number in rank.started]
        since = min(starts) if starts else world.last_sign()
        if now - since > limit:
            text = f"{item.nodeid} did not end within its limit of {limit:.3g} s"
            raise WorldError("a hang", f"{text}\n{self._where(world, number)}\n\n{self._scene(world)}")
        failed = [rank.done[number][0] for rank in world.ranks.values() if rank.done.get(number, (0, 0))[1] == 2]
        grace = GRACE * self.slowdown.factor()
        if failed and now - min(failed) > grace:
            title = f"{grace:.3g} s after a rank had failed, others were still in the test"
            raise WorldError(title, f"{self._where(world, number)}\n\n{self._scene(world)}")

    def _death(self, world: World, number: int) -> WorldError:
        scene = self._scene(world, stacks=not world.ended())
        started = any(rank.ready for rank in world.ranks.values())
        verb = "died" if started else "did not start"
        named = world.named_by_mpiexec()
        if named:
            scene = f"mpiexec names {ranks_text(named, world.size)}\n\n{scene}"
        where = self._where(world, number) + "\n\n" if started else ""
        return WorldError(f"the {self.group} {verb}: {world.exit_text()}", where + scene, broken=not started)

    def _missing(self, world: World, item: pytest.Item) -> WorldError:
        lacking = [rank for rank in world.numbered() if item.nodeid in (rank.ready or {})["here"]]
        title = f"not collected on {ranks_text([rank.rank for rank in lacking], world.size)}"
        texts: dict[str, list[int]] = {}
        for rank in lacking:
            for event in rank.collected:
                if item.nodeid.startswith(event["nodeid"]):
                    texts.setdefault(f"{event['outcome']}: {event['text']}", []).append(rank.rank)
        shown = [f"--- {ranks_text(ranks, world.size)} ---\n{text}" for text, ranks in texts.items()]
        return WorldError(title, "\n".join(shown))

    def _finish(self) -> None:
        """Let a world that has run all its items end by itself."""
        world = self._world
        assert world is not None
        began = time.monotonic()
        while not world.ended():
            limit = marks.end_limit(self.slowdown)
            if time.monotonic() - began > limit:
                title = f"the {self.group} ran all its tests and did not end within {limit:.3g} s"
                raise WorldError(title, self._scene(world))
            self._pause()
        if world.process.returncode != 0:
            title = f"the {self.group} ran all its tests and ended badly: {world.exit_text()}"
            raise WorldError(title, self._scene(world, stacks=False))

    def _scene(self, world: World, stacks: bool = True) -> str:
        """Return the stacks, and what was written outside of tests."""
        shown = [world.stacks()] if stacks else []
        if world.tail():
            shown.append(f"--- the end of the world's own output ---\n{world.tail()}")
        return "\n\n".join(shown)

    def _where(self, world: World, number: int) -> str:
        """Say which ranks were in the test, and which had finished it or not reached it."""
        groups: dict[str, list[int]] = {}
        for rank in world.numbered():
            groups.setdefault(_place(rank, number), []).append(rank.rank)
        places = [f"{ranks_text(ranks, world.size)}: {place}" for place, ranks in groups.items()]
        lost = world.size - len(world.numbered())
        return "\n".join([*places, *([f"{lost} ranks were never heard of"] if lost else [])])

    def _failures(self, number: int) -> dict[int, pytest.TestReport]:
        if self._world is None:
            return {}
        written = {rank.rank: rank.reports.get(number, []) for rank in self._world.numbered()}
        return reports.failures(self.config, written)

    def _kill(self) -> None:
        if self._world is not None:
            if self._starting:
                self._starting = False
                self.slowdown.starting.pop(self.group, None)
            self._world.kill()
            self._world = None


def _place(rank: Rank, number: int) -> str:
    if number in rank.done:
        return f"had finished the test ({('passed', 'skipped', 'failed')[rank.done[number][1]]})"
    if number not in rank.started:
        return "had not begun the test"
    phases = [data["when"] for data in rank.reports.get(number, [])]
    return f"in the test's {('setup', 'call', 'teardown')[min(2, len(set(phases)))]}"
