"""SIGTERM, which ends the job and says which worker got it, also where its main thread runs no Python.

Python runs handlers between two lines of the main thread, which may wait in a compiled program for ever. So the number
comes through a pipe too (`signal.set_wakeup_fd`), to the watchdog's thread. The pipe does not say whose handler was in
place when the signal came: a program may have had its own, which has been run and is gone again before the thread
looks. So what is in the pipe when a handler is installed is taken out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from distdl_jax.watchdog.abort import end_the_job, is_forked
from distdl_jax.watchdog.main_thread import main_stack, stack_text, user_frames
from distdl_jax.watchdog.status import worker_status

_wakeup: list[tuple[int, int]] = []
"""The two ends of the pipe that signals come through."""


def end_the_job_on_sigterm() -> None:
    """Install the handler: it says which worker was told to stop, and where it was; unless the program has its own."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    if (other := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(other)
        os.close(reading)
        os.close(writing)
        return
    signal.signal(signal.SIGTERM, _on_sigterm)
    _record_changes_of_handlers()
    _keep_the_pipe()
    if not _wakeup:
        # A signal that comes between the fork and `_step_back` waits: the child would write into the parent's pipe.
        os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_step_back)
    _wakeup.append((reading, writing))


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
            if signal.SIGTERM in came and is_ours and was_ours:
                _stop(signal.SIGTERM)

    def change(self, install: Callable[[], Any]) -> Any:
        """Install a handler; what came until then was not for it, or Python will tell it."""
        with self.lock:
            before = install()
            _what_came()
            return before


_pending = _PendingSignals()


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
    """`signal.set_wakeup_fd`: who takes away a descriptor of its own (as asyncio does) leaves the pipe in its place."""
    install = signal.set_wakeup_fd
    if getattr(install, "keeps_the_pipe", False):
        return

    @functools.wraps(install)
    def install_or_restore(fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
        if fd == -1 and _wakeup and not is_forked():
            fd, warn_on_full_buffer = _wakeup[-1][1], False
        before = install(fd, warn_on_full_buffer=warn_on_full_buffer)
        return -1 if any(before == writing for _, writing in _wakeup) else before

    install_or_restore.keeps_the_pipe = True  # type: ignore[attr-defined]
    signal.set_wakeup_fd = install_or_restore


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
        if (known := signal.set_wakeup_fd(-1)) not in [writing for _, writing in _wakeup]:
            signal.set_wakeup_fd(known)
    _pending.lock = threading.RLock()  # another thread may have had it
    for ends in _wakeup:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)
    _wakeup.clear()
    _let_through()


def _stop(number: int) -> None:
    name = signal.Signals(number).name
    text = f"Worker {worker_status().rank} got {name}; the job ends. It was at:\n"
    end_the_job(text + stack_text(user_frames(main_stack())), 128 + number)
