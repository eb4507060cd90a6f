"""One rank of a world: runs its items, agrees with the other ranks after each, and writes down what happened."""

import contextlib
import faulthandler
import fcntl
import json
import os
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from launcher import costs, examples, marks, mpiexec
from launcher.ranks import MPIRanks, OneProcess, Ranks
from launcher.time_limit import real_stderr
from launcher.world import LOCK, segments

PASSED, SKIPPED, FAILED = 0, 1, 2
BACKSTOP = 600.0  # the parent acts long before


class Worker:
    """Plugin of a rank. Without a directory it was started by hand, and rank 0 reports on the terminal."""

    def __init__(self, config: pytest.Config, home: Path | None) -> None:
        self.config, self.home = config, home
        self.item, self.code, self.dirty = -1, PASSED, False
        self.spec: dict[str, Any] = {}
        self.stderr = real_stderr()
        self.stacks, self.events = self.stderr, -1
        if home is not None:
            self._follow_parent(home)
        else:
            config.hook.pytest_world_environment(environment=os.environ, size=mpiexec.size_around())
        # Everything that can show a hang in what follows is set up by now.
        self.ranks = self._join()
        self.rank, self.size = self.ranks.rank, self.ranks.size
        self.write("rank", rank=self.rank, segments=segments(os.getpid()))

    def _join(self) -> Ranks:
        expected = self.spec.get("size")
        if expected == 0:
            mpiexec.leave_mpi_alone()
            return OneProcess()
        self.config.hook.pytest_world_start()
        ranks = MPIRanks()
        if expected is not None and expected != ranks.size:
            library = mpiexec.mpi_version()
            text = f"mpiexec was asked for {expected} ranks, but mpi4py's library ({library}) sees {ranks.size}"
            self.write("refused", text=f"{text}: they belong to different MPIs")
            ranks.MPI.Finalize()  # or a lone Open MPI process leaves its session's folder behind
            os._exit(1)
        return ranks

    def _follow_parent(self, home: Path) -> None:
        pid = os.getpid()
        os.nice(5)  # the plain tests, which one process runs after the other, are not to wait for many ranks
        self.stacks = os.open(home / f"stacks-{pid}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        faulthandler.register(signal.SIGUSR1, file=self.stacks, all_threads=True)
        self.events = os.open(home / f"events-{pid}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.write("hello")
        lock = os.open(home / LOCK, os.O_RDWR)
        threading.Thread(target=_leave_with_parent, args=(lock, home), daemon=True).start()
        self.spec = json.loads((home / "spec.json").read_text())
        # Before the other plugins read their options. The temporary folder is this rank's alone.
        vars(self.config.option).update(self.spec["options"], basetemp=str(home / f"tmp-{pid}"))

    def write(self, kind: str, **what: Any) -> None:
        if self.events >= 0:
            what.update(kind=kind, t=time.monotonic())
            os.write(self.events, (json.dumps(what, default=str) + "\n").encode())

    def pytest_plugin_registered(self, plugin: object, plugin_name: str, manager: pytest.PytestPluginManager) -> None:
        # The parent reports for its ranks; of ranks started by hand, the first one does.
        if plugin_name == "terminalreporter" and (self.home is not None or self.rank != 0):
            manager.unregister(plugin)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.home is None:
            out = [item for item in items if marks.of(item).world != self.size]
            items[:] = [item for item in items if marks.of(item).world == self.size]
            config.hook.pytest_deselected(items=out)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.write("collect", nodeid=report.nodeid, outcome=report.outcome, text=report.longreprtext)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        w = warning_message
        self.write(
            "warning",
            when=when,
            nodeid=nodeid,
            text=str(w.message),
            category=w.category.__name__,
            filename=w.filename,
            lineno=w.lineno,
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        here = {item.nodeid: item for item in session.items}
        wanted: list[str] = self.spec.get("items", list(here))
        missing = self.ranks.missing(set(wanted) - set(here))
        self.write(
            "ready",
            missing=sorted(missing),
            here=sorted(set(wanted) - set(here)),
            segments=segments(os.getpid()),
            cost=costs.so_far(),
        )
        run = [(n, here[name]) for n, name in enumerate(wanted) if name not in missing]
        for (n, item), (_, after) in zip(run, [*run[1:], (-1, None)], strict=False):  # none in an empty run
            self._run(n, item, after)
            if self.dirty and self.home is not None:
                time.sleep(BACKSTOP)  # the parent ends this world: its messages may be half way
                os._exit(1)
            if self.dirty:
                faulthandler.dump_traceback_later(BACKSTOP, exit=True, file=self.stacks)
                session.shouldfail = "a test failed; this world is not used further, since messages may be half way"
            if session.shouldfail or session.shouldstop:
                break
        return True

    def _run(self, n: int, item: pytest.Item, after: pytest.Item | None) -> None:
        self.item, self.code = n, PASSED
        limit, before = marks.limit(item), costs.so_far()
        examples.fail_at_once(item)
        self.write("start", item=n)
        until = 20 * limit + BACKSTOP if self.home is not None else limit  # the parent knows the slowdown
        faulthandler.dump_traceback_later(until, exit=True, file=self.stacks)
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            item.config.hook.pytest_world_settle()
        except BaseException as error:  # pytest.exit, Ctrl-C: whatever it is, the others must know
            self.code = FAILED
            shown: Any = item.repr_failure(pytest.ExceptionInfo.from_exception(error))
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", shown, "call")
            item.config.hook.pytest_runtest_logreport(report=report)
        self.write("done", item=n, code=self.code)
        # A failing test has made pytest cancel the timer.
        faulthandler.dump_traceback_later(until, exit=True, file=self.stacks)
        self.dirty = self._agree()
        self.write("agreed", item=n, cost=costs.so_far() - before)
        faulthandler.cancel_dump_traceback_later()

    def _agree(self) -> bool:
        """Return whether this item leaves the world in doubt: a failure somewhere, or different outcomes."""
        largest, smallest = self.ranks.largest_and_smallest(self.code)
        return largest == FAILED or largest != smallest

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or hasattr(report, "wasxfail"):
            self.code = FAILED
        elif report.skipped:
            self.code = max(self.code, SKIPPED)
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.write("report", item=self.item, data=data)
        if report.failed and self.home is None and self.rank != 0:
            text = f"\n[rank {self.rank}] {report.nodeid}, {report.when}:\n{report.longreprtext}\n"
            os.write(self.stderr, text.encode())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # With a parent the failures have been written, and a bad status would say that a rank died. By hand, rank 0
        # speaks for all: mpiexec would end it in the middle of its report if another rank ended badly before it.
        if self.home is not None or self.rank != 0:
            session.exitstatus = pytest.ExitCode.OK
        elif self.dirty:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self) -> None:
        self.write("end")


def _leave_with_parent(lock: int, home: Path) -> None:
    """End this rank when the parent lets go of the lock: the parent ends, or gives up this world."""
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)
        for path in segments(os.getpid()):
            Path(path).unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        home.parent.rmdir()
    os._exit(1)
