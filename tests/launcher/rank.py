"""One process of a world: runs the tests that the pytest process tells it to, and sends their reports."""

import faulthandler
import os
import queue
import shutil
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import Client
from typing import Any

import pytest

from launcher import marks, mpiexec, settings

HIDDEN = ("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen runpy>", "/launcher/", "/threading.py")


def stacks() -> str:
    """Return the stacks of all threads, most recent call last, without the frames of pytest and of this package."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    shown = []
    for ident, top in sys._current_frames().items():
        frames = [f for f in traceback.extract_stack(top) if not any(hidden in f.filename for hidden in HIDDEN)]
        if frames:
            shown.append(f"{names.get(ident, ident)}:\n{''.join(traceback.format_list(frames))}")
    return "\n".join(reversed(shown))


class Rank:
    """Plugin of a process of a world; without the path of a socket the world was started by hand."""

    def __init__(self, config: pytest.Config, path: str | None) -> None:
        self.config, self.path, self.outcome = config, path or "", "passed"
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.parent, self.sending = Client(path, "AF_UNIX") if path else None, threading.Lock()
        self.rank, self.size = mpiexec.rank(), 1
        self.send("hello", self.rank, os.getpid())
        if self.parent is None:
            settings.set_up_rank(os.environ, mpiexec.size_around())
        else:
            config.option.basetemp = f"{path}-{os.getpid()}-tmp"  # of this rank alone
            os.nice(5)  # the plain tests, which one process runs after the other, are not to wait for many ranks
            threading.Thread(target=self.listen, daemon=True).start()
        if config.option.world_threads:
            mpiexec.leave_mpi_alone()
        else:
            from mpi4py import MPI  # before the first test

            self.world, self.rank, self.size = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    def listen(self) -> None:
        """Take orders, answer where the others are, also in a hang; end with the pytest process."""
        assert self.parent is not None
        with suppress(EOFError, OSError):
            while True:
                order = self.parent.recv()
                if order == "stacks":
                    self.send("stacks", stacks())
                else:
                    self.orders.put(order)
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)
        os._exit(1)

    def send(self, kind: str, *what: object) -> None:
        if self.parent is not None:
            with self.sending:
                self.parent.send((kind, *what))

    def pytest_plugin_registered(self, plugin: object, plugin_name: str, manager: pytest.PytestPluginManager) -> None:
        # The pytest process reports for its ranks; of ranks started by hand, the first one does.
        if plugin_name == "terminalreporter" and (self.parent is not None or self.rank != 0):
            manager.unregister(plugin)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.send("not collected", report.longreprtext)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        w = warning_message
        self.send("warning", w.category.__name__, str(w.message), w.filename, w.lineno, when, nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.send("ready", self.size, set(items))
        if self.parent is None:
            self.run_by_hand(session)
        else:
            while order := self.orders.get():
                self.run(*map(items.get, order))
                self.send("done", self.outcome)
        return True

    def run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        self.outcome = "passed"
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if "jax" in sys.modules:
                sys.modules["jax"].effects_barrier()  # a hang behind asynchronous dispatch belongs to its own test
        except BaseException as error:  # pytest.exit, Ctrl-C: whatever it is, the others must know
            shown: Any = item.repr_failure(pytest.ExceptionInfo.from_exception(error))
            self.pytest_runtest_logreport(pytest.TestReport(item.nodeid, item.location, {}, "failed", shown, "call"))

    def run_by_hand(self, session: pytest.Session) -> None:
        """Run the tests of this size up to the first that fails; a hang ends the run with a stack."""
        items = [item for item in session.items if marks.group(item) == self.size]
        for item, following in zip(items, [*items[1:], None], strict=True):
            faulthandler.dump_traceback_later(marks.limit(item), exit=True, file=sys.__stderr__)
            self.run(item, following)
            if "failed" in self.world.allgather(self.outcome):
                session.shouldfail = "a test failed; messages may be half way"
                break
        faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.outcome != "failed" and not report.passed:
            self.outcome = report.outcome
        self.send("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report))
        if report.failed and self.parent is None and self.rank != 0:
            os.write(2, f"\n[rank {self.rank}] {report.nodeid}, {report.when}:\n{report.longreprtext}\n".encode())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Failures have been sent, and a bad status would say that a rank died. By hand, rank 0 speaks for all.
        if self.parent is not None or self.rank != 0:
            session.exitstatus = pytest.ExitCode.OK
