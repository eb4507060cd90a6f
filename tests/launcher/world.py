"""A world, seen from the pytest process: one `mpiexec`, or one process without MPI, and what its ranks send."""

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from launcher import marks, mpiexec, reports, settings

GRACE = 5.0  # seconds for the other ranks to fail too, once one has; and for mpiexec to end once a rank has died
TAIL = 4000  # characters
SHARED = re.compile(r"/dev/shm/(?:mpich_shm|sm_segment|vader_segment)\S*$", re.MULTILINE)


class WorldError(Exception):
    """A world has to end."""


class Stopped(Exception):
    """The session ends before all tests have run."""


@dataclass
class Rank:
    """What one process of the world has sent about itself so far."""

    connection: Connection
    number: int = -1
    pid: int = 0
    size: int | None = None
    alive: bool = True
    collected: set[str] = field(default_factory=set)
    problems: str = ""
    reports: list[pytest.TestReport] = field(default_factory=list)
    done: str | None = None
    stacks: str | None = None

    def tell(self, order: object) -> None:
        with contextlib.suppress(OSError):  # it has gone, which shows when it is to answer
            self.connection.send(order)


@dataclass
class Outcome:
    """The reports of an item from all ranks, and the warnings of the first."""

    reports: list[pytest.TestReport]
    warnings: list[tuple[Any, ...]]


class World:
    """Starts ranks, tells them what to run, and leaves none of them behind. A world of 0 is a process without MPI."""

    def __init__(self, config: pytest.Config, size: int, items: list[pytest.Item], stopped: threading.Event) -> None:
        self.config, self.stopped = config, stopped
        self.size, self.processes, self.name = size, max(1, size), marks.name(size)
        self.ranks: list[Rank] = []
        self.warnings: list[tuple[Any, ...]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="world-", ignore_cleanup_errors=True)
        self.output = Path(self.folder.name, "output.txt")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path := f"{self.folder.name}/socket")
        self.listener.listen(self.processes)
        environment = mpiexec.clean(os.environ)
        environment.pop("PYTEST_ADDOPTS", None)
        if size:
            settings.set_up_rank(environment, size)
        show = config.option.capture == "no"
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [
                    *(mpiexec.command(size) if size else []),
                    *(sys.executable, "-m", "pytest", "--in-world", f"--world-socket={path}"),
                    *(["--world-threads"] if size == marks.THREADS else []),
                    *options(config),
                    *sorted({str(item.path) for item in items}),
                ],
                cwd=config.invocation_params.dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if show else output,
                stderr=None if show else output,
                start_new_session=True,  # so that Ctrl-C reaches the pytest process, which then ends the world
            )

    def start(self, items: list[pytest.Item]) -> None:
        """Wait until all ranks have collected all items."""
        began = time.monotonic()
        while len(self.ranks) < self.processes or not all(rank.size for rank in self.ranks):
            self.receive()
            if self.dead():
                raise WorldError(f"{self.name} did not start: {self.last_words()}")
            if time.monotonic() - began > settings.limit(settings.DEFAULT_LIMIT + 20 * self.processes):
                raise WorldError(f"{self.name} was not ready in time\n\n{self.scene()}")
            if sizes := {rank.size for rank in self.ranks} - {None, self.processes}:
                raise WorldError(f"mpiexec was asked for {self.size} ranks, but mpi4py sees {min(sizes)}: two MPIs?")
        for rank in self.ranks:
            if missing := {item.nodeid for item in items} - rank.collected:
                raise WorldError(f"rank {rank.number} has not collected {min(missing)}\n\n{rank.problems}")

    def run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Run the item on all ranks; raise `WorldError` if it does not end on all of them."""
        for rank in self.ranks:
            rank.reports, rank.done = [], None
            rank.tell((item.nodeid, following and following.nodeid))
        began, failed = time.monotonic(), None
        while not all(rank.done for rank in self.ranks):
            self.receive()
            now = time.monotonic()
            if failed is None and any(rank.done == "failed" for rank in self.ranks):
                failed = now
            if self.dead():
                raise WorldError(f"{self.name} died: {self.last_words()}\n\n{self.scene()}")
            if now - began > (limit := marks.limit(item)):
                raise WorldError(f"{item.nodeid} did not end within its limit of {limit:.3g} s\n\n{self.scene()}")
            if failed is not None and now - failed > settings.limit(GRACE):
                raise WorldError(f"a rank failed, and others were still in the test\n\n{self.scene()}")

    def finish(self) -> None:
        """Let a world that has run all its items end by itself."""
        for rank in self.ranks:
            rank.tell(None)
        began = time.monotonic()
        while self.process.poll() is None:
            self.receive()
            if time.monotonic() - began > settings.limit():
                raise WorldError(f"{self.name} ran all its tests and did not end\n\n{self.scene()}")
        if self.process.returncode != 0:
            raise WorldError(f"{self.name} ran all its tests and ended badly: {self.last_words()}")

    def receive(self) -> None:
        """Take what the ranks send within a tenth of a second."""
        if self.stopped.is_set():
            raise Stopped
        connections = {rank.connection: rank for rank in self.ranks if rank.alive}
        for ready in wait([self.listener, *connections], 0.1):
            if ready is self.listener:
                self.ranks.append(Rank(Connection(self.listener.accept()[0].detach())))
                continue
            rank = connections[ready]  # type: ignore[index]
            try:
                self.take(rank, *rank.connection.recv())
            except (EOFError, OSError):
                rank.alive = False

    def take(self, rank: Rank, kind: str, *what: Any) -> None:
        match kind:
            case "hello":
                rank.number, rank.pid = what
            case "ready":
                rank.size, rank.collected = what
            case "not collected":
                rank.problems += what[0]
            case "report":
                rank.reports.append(self.config.hook.pytest_report_from_serializable(config=self.config, data=what[0]))
            case "done":
                rank.done = what[0]
            case "stacks":
                rank.stacks = what[0]
            case "warning" if rank.number == 0:
                self.warnings.append(what)

    def dead(self) -> bool:
        """Return whether mpiexec has ended, or a rank has gone."""
        if all(rank.alive for rank in self.ranks):
            return self.process.poll() is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(settings.limit(GRACE))
        return True

    def last_words(self) -> str:
        """Return how mpiexec has ended, and the end of what it and the ranks wrote outside of tests."""
        status = self.process.poll()
        text = self.output.read_text(errors="replace")[-TAIL:].strip()
        return f"{'it still runs' if status is None else f'exit status {status}'}\n{text}"

    def scene(self) -> str:
        """Say how each rank has ended the test, or where it is: its stacks, which a thread of it sends."""
        asked = [rank for rank in self.ranks if rank.alive and not rank.done]
        for rank in asked:
            rank.stacks = None
            rank.tell("stacks")
        began = time.monotonic()
        while time.monotonic() - began < settings.limit(GRACE) and any(r.alive and r.stacks is None for r in asked):
            self.receive()
        texts = {
            rank.number: (rank.done and f"{rank.done} the test")
            or (f"still there\n{rank.stacks}" if rank.stacks else "died" if not rank.alive else "does not answer")
            for rank in self.ranks
        }
        return "\n\n".join(f"--- {reports.ranks_text(r, self.processes)} {t}" for r, t in reports.once(texts))

    def reports_of_ranks(self) -> dict[int, list[pytest.TestReport]]:
        return {rank.number: rank.reports for rank in sorted(self.ranks, key=lambda rank: rank.number)}

    def has(self, pid: int) -> bool:
        """Return whether a process is one of this world: the number of one that has ended may be another's by now."""
        try:
            return self.folder.name in Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            return pid > 0 and not Path("/proc/self").exists()

    def kill(self) -> None:
        """End every process of this world, at once and without asking."""
        shared: list[str] = []  # memory, which MPI does not remove where it is killed
        for pid in filter(self.has, (rank.pid for rank in self.ranks)):
            with contextlib.suppress(OSError):
                shared += SHARED.findall(Path(f"/proc/{pid}/maps").read_text())
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # mpiexec sees its ranks gone and tidies up; only if it does not, it goes the hard way too.
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for path in set(shared):
            Path(path).unlink(missing_ok=True)
        self.listener.close()
        self.folder.cleanup()


class Runner(threading.Thread):
    """Runs the items of one group; after a failure, since messages may be half way, in a new world."""

    def __init__(self, config: pytest.Config, size: int, items: list[pytest.Item], slots: threading.Semaphore) -> None:
        super().__init__(name=marks.name(size), daemon=True)
        self.config, self.size, self.items, self.slots = config, size, items, slots
        self.outcomes: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
        self.stopped = threading.Event()

    def run(self) -> None:
        try:
            with self.slots:
                begun = 0
                while begun < len(self.items) and not self.stopped.is_set():
                    begun += self.run_in_a_world(self.items[begun:])
        except Stopped:
            pass
        except BaseException as error:  # whatever it is, the main thread waits for it
            self.outcomes.put(error)

    def run_in_a_world(self, items: list[pytest.Item]) -> int:
        """Run items until one fails; return how many have run."""
        world = None
        try:
            world = World(self.config, self.size, items, self.stopped)
            world.start(items)
            for number, (item, following) in enumerate(zip(items, [*items[1:], None], strict=True), 1):
                if not self.run_item(world, item, following):
                    return number
        except (OSError, WorldError) as error:  # it has not started, and another one would fail in the same way
            for item in items:
                self.outcomes.put(Outcome([reports.failure(item, str(error), {}, max(1, self.size))], []))
        finally:
            if world is not None:
                world.kill()
        return len(items)

    def run_item(self, world: World, item: pytest.Item, following: pytest.Item | None) -> bool:
        """Return whether the world is good for another item."""
        good, began = False, time.monotonic()
        try:
            world.run(item, following)
            merged = reports.merge(world.reports_of_ranks(), world.processes)
            good = {rank.done for rank in world.ranks} in ({"passed"}, {"skipped"})
        except WorldError as error:
            merged = [reports.failure(item, str(error), world.reports_of_ranks(), world.processes)]
            merged[0].duration = time.monotonic() - began
        if good and following is None:
            try:
                world.finish()
            except WorldError as error:
                merged.append(reports.failure(item, str(error), {}, world.processes, "teardown"))
        self.outcomes.put(Outcome(merged, world.warnings))
        world.warnings = []
        return good


def options(config: pytest.Config) -> list[str]:
    """Return the arguments of pytest that concern the ranks, too."""
    option = config.option
    lines = ["-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors", "--color=no"]
    lines += [f"--rootdir={config.rootpath}", f"--capture={option.capture}", f"--tb={option.tbstyle}"]
    lines += ["-c", str(config.inipath)] if config.inipath else []
    lines += ["-l"] * bool(option.showlocals) + ["-v"] * max(0, option.verbose)
    for flag, values in (("-p", option.plugins), ("-W", option.pythonwarnings)):
        lines += [word for value in values or [] for word in (flag, value)]
    return lines
