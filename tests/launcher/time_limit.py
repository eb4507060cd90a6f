"""The time limit of tests that run in the parent itself."""

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any

import pytest

from launcher import marks, settings
from launcher.slowdown import Slowdown
from launcher.stacks import shorten


def backstop(limit: float) -> float:
    """Return the seconds after which the process ends where the limit's signal does not get through."""
    return 3 * limit + 5


def real_stderr() -> int:
    """Copy stderr, while pytest does not capture it, for messages that must come through."""
    return os.dup(2)


@contextlib.contextmanager
def within(limit: Callable[[], float], name: str, stderr: int) -> Iterator[None]:
    """Fail the test after `limit()` seconds; end the process with stacks where that does not get through.

    The first is a signal, which needs the main thread to come back to Python; the limit may have grown by then. The
    second is a thread of faulthandler's, which needs nothing.
    """
    began = time.monotonic()

    def arm() -> None:
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, limit() - (time.monotonic() - began)))
        faulthandler.dump_traceback_later(backstop(limit()), exit=True, file=stderr)

    def on_alarm(_: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if time.monotonic() - began < limit():
            return arm()
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file=file)
            file.seek(0)
            stacks = shorten(file.read())
        pytest.fail(f"{name} did not end within its limit of {limit():.3g} s\n\n{stacks}")

    before: Any = signal.signal(signal.SIGALRM, on_alarm)
    arm()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


class TimeLimit:
    """Plugin of the parent: every test that runs in the parent has its limit, and so has each file that is collected.

    The collection as a whole has none: how long it takes depends on how busy the machine is.
    """

    def __init__(self, slowdown: Slowdown) -> None:
        self.slowdown = slowdown
        self.stderr = real_stderr()
        self.pytest_collectreport()

    def pytest_collectreport(self) -> None:
        """Give the next file as long again, now that one more has been collected."""
        limit = settings.own_limit() or settings.DEFAULT_LIMIT
        faulthandler.dump_traceback_later(backstop(limit), exit=True, file=self.stderr)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if marks.of(item) != marks.PARENT:
            return (yield)
        with within(lambda: marks.limit(item, self.slowdown), item.nodeid, self.stderr):
            return (yield)
