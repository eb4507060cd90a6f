"""The time limit of tests that run in the parent itself."""

import contextlib
import faulthandler
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

import pytest

from launcher import marks
from launcher.stacks import shorten

BACKSTOP = 5.0


def real_stderr() -> int:
    """A copy of stderr, taken while pytest does not capture it, for messages that must come through."""
    return os.dup(2)


@contextlib.contextmanager
def within(limit: float, name: str, stderr: int) -> Iterator[None]:
    """Fail the test after `limit` seconds; end the process with stacks where that does not get through.

    The first is a signal, which needs the main thread to come back to Python. The second is a thread of
    faulthandler's, which needs nothing.
    """

    def on_alarm(_: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file=file)
            file.seek(0)
            stacks = shorten(file.read())
        pytest.fail(f"{name} did not end within its limit of {limit:g} s\n\n{stacks}")

    before: Any = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + BACKSTOP, exit=True, file=stderr)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


class PlainGuard:
    """Plugin of the parent: every test that runs in the parent has its limit, and so has the collection."""

    def __init__(self) -> None:
        self.stderr = real_stderr()
        faulthandler.dump_traceback_later(2 * marks.general_limit() + BACKSTOP, exit=True, file=self.stderr)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if marks.of(item):
            return (yield)
        with within(marks.limit(item), item.nodeid, self.stderr):
            return (yield)
