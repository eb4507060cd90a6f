"""One reader at a time: libraries that read files in C, such as netCDF's, may crash when two threads call them.

So may the collector of garbage in another thread, which closes the files that nobody uses any more. Hence no collection
begins while a thread reads, and no thread begins to read within one.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Held(threading.local):
    """The lock, as often as this thread has taken it."""

    def __init__(self) -> None:
        self.locks: list[threading.RLock] = []


_held = _Held()
_lock = threading.RLock()
_collector: int | None = None  # the thread that collects garbage
_stops_collector = False  # whether the thread that holds the lock has


def _note_collector(phase: str, _: object) -> None:
    global _collector
    _collector = threading.get_ident() if phase == "start" else None


def _take(lock: threading.RLock) -> None:
    global _stops_collector
    while True:
        lock.acquire()
        if not _held.locks:
            _stops_collector = gc.isenabled()
            gc.disable()
        if _held.locks or _collector in (None, threading.get_ident()):
            return _held.locks.append(lock)
        # What another thread collects may need the lock in order to close. It can't set an event when it is done: a
        # collection may begin within the event's own lock.
        _let_collect()
        lock.release()
        time.sleep(1e-4)


def _give() -> None:
    lock = _held.locks.pop()
    if not _held.locks:
        _let_collect()
    lock.release()


def _let_collect() -> None:
    global _stops_collector
    if _stops_collector:
        gc.enable()
    _stops_collector = False


def _start_in_fork() -> None:
    """Forget the threads that a forked process doesn't have."""
    global _lock, _collector
    _lock, _collector = threading.RLock(), None
    if not _held.locks:
        _let_collect()


gc.callbacks.append(_note_collector)
os.register_at_fork(after_in_child=_start_in_fork)


@contextmanager
def one_reader() -> Iterator[None]:
    """Run the body of a `with` while no other thread of this process reads a source that may not be safe in threads.

    `dj.data.read`, `dj.data.batches` and `TensorSpec.block` do so themselves, in the threads of `batches`, too. Use it
    around your own calls of such a library: to open or close a file, to slice a variable, in an iterable over batches.
    Garbage is not collected meanwhile, unless by `gc.collect()`: a collection closes files, too.

    **Returns:** a context manager, which may be nested. Not collective. While a worker of `dj.simulate` waits for
    others in the body, these may read.

    >>> import numpy as np, distdl_jax as dj
    >>> with dj.data.one_reader():  # netCDF4.Dataset("p.nc"), for instance
    ...     dj.data.read(np.arange(6), ((2, 4),)).tolist()
    [2, 3]
    """
    _take(_lock)
    try:
        yield
    finally:
        _give()


@contextmanager
def others_may_read() -> Iterator[None]:
    """Give the lock back for the body of a `with`, in which this thread waits for others: a source may communicate."""
    locks = [*_held.locks]
    for _ in locks:
        _give()
    try:
        yield
    finally:
        for lock in locks:
            _take(lock)
