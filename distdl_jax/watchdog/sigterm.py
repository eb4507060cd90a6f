"""SIGTERM, which ends the job and says which worker got it, also where its main thread runs no Python.

Python runs handlers between two lines of the main thread, which may wait in a compiled program for ever. So the number
comes through a pipe too (`signal.set_wakeup_fd`), to the watchdog's thread. The pipe does not say whose handler was in
place when the signal came: a program may have had its own, which has been run and is gone again before the thread
looks. So what is in the pipe when a handler is installed is taken out.

Event loops want such a pipe, too, and Python has one for each process. So ours stays in its place, and what comes goes
on to theirs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from distdl_jax.watchdog.abort import end_the_job, is_forked
from distdl_jax.watchdog.main_thread import main_stack, stack_text, user_frames
from distdl_jax.watchdog.source_lines import is_library
from distdl_jax.watchdog.status import worker_status

_wakeup: list[tuple[int, int]] = []
"""The pipe that signals come through: its two ends."""

_set_wakeup_fd = signal.set_wakeup_fd


def end_the_job_on_sigterm() -> None:
    """Install the handler: it says which worker was told to stop, and where it was; unless the program has its own."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    if not _wakeup:
        _lay_the_pipe()
    signal.signal(signal.SIGTERM, _on_sigterm)
    _record_changes_of_handlers()


def _lay_the_pipe() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    _wakeup.append((reading, writing))
    # A signal that comes between the fork and `_step_back` waits: the child would write into the parent's pipe.
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_step_back)
    _passed_on.begin(_set_wakeup_fd(writing, warn_on_full_buffer=False))
    _keep_the_pipe()


class _PendingSignals:
    """What came through the pipe, and since when the handler is the one that it is."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a handler may be run inside `change`, and change handlers
        self._was_ours = True

    def look(self) -> None:
        """End the job if this worker was told to stop and the handler is ours."""
        with self.lock:
            is_ours = signal.getsignal(signal.SIGTERM) is _on_sigterm
            came, was_ours, self._was_ours = _what_came(), self._was_ours, is_ours
            _passed_on.write(came)
            if signal.SIGTERM in came and is_ours and was_ours:
                _stop(signal.SIGTERM)

    def change(self, install: Callable[[], Any]) -> Any:
        """Install a handler; what came until then was not for it, or Python will tell it."""
        with self.lock:
            before = install()
            _passed_on.write(_what_came())
            return before


class _PassedOn:
    """Where the program wants to hear of signals, by the descriptor that it has given; -1 where it does not."""

    def __init__(self) -> None:
        self.to = -1
        self._thread: threading.Thread | None = None

    def begin(self, to: int) -> None:
        """From now on signals go to `to`. A thread sees to that: an event loop waits for them, not for the watch."""
        self.to = to
        if self._thread is None and to != -1:
            self._thread = threading.Thread(target=_pass_signals_on, name="distdl_jax signals", daemon=True)
            self._thread.start()

    def write(self, numbers: bytes) -> None:
        """As Python itself would: what does not go in is lost."""
        if numbers and self.to != -1:
            with contextlib.suppress(OSError):
                os.write(self.to, numbers)

    def forget_the_thread(self) -> None:
        """In a forked process, which has none."""
        self._thread = None


def _pass_signals_on() -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):  # closed, at the end
        while select.select([_wakeup[0][0]], [], [])[0]:
            _pending.look()


_pending = _PendingSignals()
_passed_on = _PassedOn()


def handle_pending_signals() -> None:
    """End the job if this worker was told to stop; called from the watchdog's thread."""
    _pending.look()


def _record_changes_of_handlers() -> None:
    """`signal.signal`, which says from then on when the handler of SIGTERM changes."""
    install = signal.signal
    if getattr(install, "records_changes", False):
        return

    @functools.wraps(install)
    def install_and_record(number: Any, handler: Any) -> Any:
        if number != signal.SIGTERM or is_forked():
            return install(number, handler)
        return _pending.change(lambda: install(number, handler))

    install_and_record.records_changes = True  # type: ignore[attr-defined]
    signal.signal = install_and_record  # type: ignore[assignment]


def _keep_the_pipe() -> None:
    """`signal.set_wakeup_fd`: the pipe stays, and what comes through it goes on to the program's descriptor."""

    @functools.wraps(_set_wakeup_fd)
    def install_or_pass_on(fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
        if is_forked() or not _wakeup:
            return _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
        with _pending.lock:
            _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)  # which refuses what is none
            _set_wakeup_fd(_wakeup[0][1], warn_on_full_buffer=False)
            before = _passed_on.to
            _passed_on.begin(fd)
            return before

    signal.set_wakeup_fd = install_or_pass_on


def _what_came() -> bytes:
    """The numbers of the signals that came since it was last asked."""
    numbers = b""
    for reading, _ in _wakeup:
        with contextlib.suppress(OSError):  # nothing there, or closed
            numbers += os.read(reading, 64)
    return numbers


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if is_forked():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    _stop(number)


_masks: dict[int, set[int]] = {}
"""The signals that each thread that forks had blocked before."""


def _hold_back() -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _masks[threading.get_ident()] = {int(number) for number in blocked}


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(threading.get_ident(), set()))


def _step_back() -> None:
    """In a forked process: SIGTERM is as it was, and the pipe is the parent's."""
    with contextlib.suppress(ValueError):  # forked by a thread that isn't the main one
        if signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (known := _set_wakeup_fd(_passed_on.to)) not in [writing for _, writing in _wakeup]:
            _set_wakeup_fd(known)
    _pending.lock = threading.RLock()  # another thread may have had it
    _passed_on.forget_the_thread()
    for ends in _wakeup:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)
    _wakeup.clear()
    _let_through()


def _stop(number: int) -> None:
    name = signal.Signals(number).name
    stack = main_stack()
    text = f"Worker {worker_status().rank} got {name}; the job ends. "
    if stack and all(is_library(line.file) for line in stack):  # in an exit handler
        text += "Its program had ended.\n"
    else:
        text += f"It was at:\n{stack_text(user_frames(stack))}"
    end_the_job(text, 128 + number)
