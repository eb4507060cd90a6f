"""The hooks of pytest: `pytest_plugins = ["launcher.plugin"]` in the top `conftest.py` brings them in."""

import builtins
import faulthandler
import gc
import os
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.unraisableexception import gc_collect_iterations_key

from launcher import examples, marks, mpiexec, settings
from launcher.rank import Rank, stacks
from launcher.world import Runner

if TYPE_CHECKING:
    from distdl_jax.transports.threads.workers import Workers


def pytest_addoption(parser: pytest.Parser) -> None:
    options = parser.getgroup("world", "tests in MPI worlds")
    by_hand = "mpiexec -n 4 python -m pytest --in-world tests/test_x.py"
    options.addoption("--in-world", action="store_true", help=f"run as one rank of a world started by hand: {by_hand}")
    options.addoption("--world-socket", default=None, help="where a rank that pytest started reports (internal)")
    options.addoption("--world-threads", action="store_true", help="a process for simulated worlds (internal)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported, which stays
    config.stash[gc_collect_iterations_key] = 1  # at the end; five times is a second, on every rank
    for marker in marks.MARKERS:
        config.addinivalue_line("markers", marker)
    examples.load_profile()
    if config.option.in_world:
        config.pluginmanager.register(Rank(config, config.option.world_socket), "world-rank")
        return
    if mpiexec.size_around() > 1:
        raise pytest.UsageError("pytest starts its MPI worlds itself; under mpiexec it needs --in-world")
    mpiexec.leave_mpi_alone()  # initialised here it would break the children of this process
    config.pluginmanager.register(Parent(config), "world-parent")
    config.pluginmanager.register(PlainLimit(), "plain-limit")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each size, whether or not its function takes `world_size`."""
    sizes: list[int] = []
    for mark, kind in (("world", int), ("simulated", marks.Simulated)):
        sizes += map(kind, getattr(metafunc.definition.get_closest_marker(mark), "args", ()))
    if sizes:
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        names = [f"{'simulated' if isinstance(size, marks.Simulated) else 'world'}{size}" for size in sizes]
        metafunc.parametrize("world_size", sizes, ids=names)


_workers: "dict[int, Workers]" = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a simulated test on threads that stay from test to test, with what they have compiled."""
    size = marks.world_size(pyfuncitem)
    if not isinstance(size, marks.Simulated):
        return None
    from distdl_jax.transports.threads.workers import Workers

    arguments = {argument: pyfuncitem.funcargs[argument] for argument in pyfuncitem._fixtureinfo.argnames}
    workers = _workers.pop(size, None) or Workers(size)
    workers.run(lambda: pyfuncitem.obj(**arguments))
    _workers[size] = workers  # unless it failed
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Sort plain tests first, then the simulated ones, then world after world, each in the order of the files."""
    session.items.sort(key=marks.group)
    gc.freeze()  # no need to look through what has been imported, again and again
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    counts = Counter(map(marks.group, items))
    return "worlds: " + ", ".join(f"{counts[group]} in {marks.name(group)}" for group in sorted(counts))


class Parent:
    """Plugin of the pytest process: runs the plain tests, lets runners do the others, and reports for all."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.runners: dict[int, Runner] = {}
        self.slots = threading.Semaphore(1 if config.option.capture == "no" else settings.worlds_at_a_time())
        self.started = self.holds_slot = False
        self.warned: set[object] = set()

    def start(self, items: list[pytest.Item]) -> None:
        groups = sorted(set(map(marks.group, items)))
        self.holds_slot = marks.PLAIN in groups and self.slots.acquire()
        for group in groups:
            if group != marks.PLAIN:
                own = [item for item in items if marks.group(item) == group]
                self.runners[group] = Runner(self.config, group, own, self.slots)
                self.runners[group].start()
        self.started = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not self.started:
            self.start(item.session.items)
        if marks.group(item) == marks.PLAIN:
            return None
        if self.holds_slot:
            self.holds_slot = False
            self.slots.release()
        outcome = self.runners[marks.group(item)].outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for warning in outcome.warnings:
            self.pass_on(*warning)
        for report in outcome.reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pass_on(self, category: str, text: str, filename: str, lineno: int, when: str, nodeid: str) -> None:
        if (filename, lineno, text) not in self.warned:
            self.warned.add((filename, lineno, text))
            kind: Any = getattr(builtins, category, UserWarning)
            message = warnings.WarningMessage(kind(text), kind, filename, lineno)
            recorded = {"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
            self.config.hook.pytest_warning_recorded.call_historic(kwargs=recorded)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """End all worlds, whatever they do."""
        for runner in self.runners.values():
            runner.stopped.set()
        for runner in self.runners.values():
            runner.join(60)


class PlainLimit:
    """Plugin of the pytest process: a plain test fails at its limit, by a signal; or the process ends, with stacks."""

    def __init__(self) -> None:
        self.stderr = os.dup(2)  # while pytest does not capture it

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if marks.group(item) != marks.PLAIN:
            return (yield)
        began = time.monotonic()

        def arm(*_: object) -> None:
            __tracebackhide__ = True
            limit = marks.limit(item)
            left = limit - (time.monotonic() - began)
            if left <= 0:
                pytest.fail(f"{item.nodeid} did not end within its limit of {limit:.3g} s\n\n{stacks()}")
            signal.setitimer(signal.ITIMER_REAL, left)
            faulthandler.dump_traceback_later(3 * left + 5, exit=True, file=self.stderr)

        before = signal.signal(signal.SIGALRM, arm)
        arm()
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()
