"""One reader at a time: libraries that read files in C, such as netCDF's, may crash when two threads call them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Held(threading.local):
    """The lock, as often as this thread has taken it."""

    def __init__(self) -> None:
        self.locks: list[threading.RLock] = []


_held = _Held()
_lock = os.getpid(), threading.RLock()


@contextmanager
def one_reader() -> Iterator[None]:
    """Run the body of a `with` while no other thread of this process reads a source that may not be safe in threads.

    `dj.data.read`, `dj.data.batches` and `TensorSpec.block` do so themselves, in the threads of `batches`, too. Use it
    around your own calls of such a library: to open or close a file, to slice a variable, in an iterable over batches.

    **Returns:** a context manager, which may be nested. Not collective. While a worker of `dj.simulate` waits for
    others in the body, these may read.

    >>> import numpy as np, distdl_jax as dj
    >>> with dj.data.one_reader():  # netCDF4.Dataset("p.nc"), for instance
    ...     dj.data.read(np.arange(6), ((2, 4),)).tolist()
    [2, 3]
    """
    global _lock
    if _lock[0] != os.getpid():  # a forked process, in which no thread will release it
        _lock = os.getpid(), threading.RLock()
    lock = _lock[1]
    with lock:
        _held.locks.append(lock)
        try:
            yield
        finally:
            _held.locks.pop()


@contextmanager
def others_may_read() -> Iterator[None]:
    """Give the lock back for the body of a `with`, in which this thread waits for others: a source may communicate."""
    locks, _held.locks = _held.locks, []
    for lock in locks:
        lock.release()
    try:
        yield
    finally:
        for lock in locks:
            lock.acquire()
        _held.locks = locks
