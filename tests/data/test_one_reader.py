"""Sources that may not be safe in threads are read by one thread at a time; those that are, at once."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
from data.files import Watched
from jobs import run_alone

import distdl_jax as dj
from distdl_jax import TensorSpec
from distdl_jax.data import batches, one_reader, read

WHOLE = np.arange(12 * 3, dtype=np.float32).reshape(12, 3)


class OneAtATime(Watched):
    """An array, or a data set, that counts the threads that use it, or its shape, at once."""

    inside = most = 0

    def __init__(self) -> None:
        self.array, self.dtype, self.asked = WHOLE, WHOLE.dtype, []

    @property
    def shape(self) -> tuple[int, ...]:  # netCDF4 asks its library
        return self._used(self.array.shape)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, at: Any) -> Any:
        return self._used(self.array[at])

    @classmethod
    def _used(cls, value: Any) -> Any:
        cls.inside += 1
        cls.most = max(cls.most, cls.inside)
        time.sleep(0.002)
        cls.inside -= 1
        return value


class Samples(OneAtATime):
    shape = property(lambda self: exec("raise AttributeError"))  # no array


@pytest.mark.parametrize("kind", [OneAtATime, Samples])
def test_readers_of_all_workers_and_threads_take_turns(kind: type[OneAtATime]) -> None:
    def program() -> None:
        P = dj.Partition()
        spec = TensorSpec((3,), P.grid([P.size]))
        both = [batches(kind(), spec, 2, np.array([0, n], np.uint32), epochs=2) for n in (1, 2)]
        if kind is OneAtATime:
            TensorSpec((12, 3), P.grid([1, P.size])).block(kind())
            read(kind(), ((1, 3), (0, 3)))
        for pair in zip(*both, strict=True):
            assert all(batch.shape == (2, 1) for batch in pair)

    kind.inside = kind.most = 0
    dj.simulate(3, program)
    assert (kind.inside, kind.most) == (0, 1)


@pytest.mark.limit(60)
def test_numpy_does_not_wait() -> None:
    with one_reader():
        thread = threading.Thread(target=read, args=(WHOLE, ((0, 1), (0, 3))))
        thread.start()
        thread.join(50)
        assert not thread.is_alive()


@pytest.mark.limit(60)
def test_a_data_set_that_communicates() -> None:
    """One worker reads for all. While it waits for the others, they may read, or none would come to it."""

    def program() -> list[float]:
        P = dj.Partition()

        class Shared:
            def __len__(self) -> int:
                return 4

            def __getitem__(self, i: int) -> np.ndarray:
                with one_reader():
                    own = read(OneAtATime(), ((i, i + 1), (0, 3)))[0] if P.rank == 0 else None
                    return P.broadcast_data(own)

        spec = TensorSpec((3,), P, replicated=True)
        return [float(batch.sum()) for batch in batches(Shared(), spec, 2, prefetch=0)]

    assert dj.simulate(3, program) == [[WHOLE[:2].sum(), WHOLE[2:4].sum()]] * 3


FORKED = """
import gc, os, signal, threading
from distdl_jax.data import one_reader

reads, ends = threading.Event(), threading.Event()

def hold():
    with one_reader():
        reads.set()
        ends.wait(60)

thread = threading.Thread(target=hold)
thread.start()
assert reads.wait(60)
child = os.fork()
if not child:
    signal.alarm(60)
    with one_reader(), one_reader():
        assert not gc.isenabled()
    os._exit(not gc.isenabled())
status = os.waitpid(child, 0)[1]
ends.set()
thread.join()
assert status == 0, status
"""


def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    status, output = run_alone("-c", FORKED)
    assert status == 0, output


@pytest.mark.limit(60)
def test_no_garbage_is_collected_while_a_thread_reads() -> None:
    """It would close a file by the library that reads. In turn, no thread reads while another one collects."""
    events = []
    begins, may_end = threading.Event(), threading.Event()

    class Dropped:
        def __init__(self) -> None:
            self.its = self  # a cycle

        def __del__(self) -> None:
            if threading.current_thread() is collects:
                begins.set()
                assert may_end.wait(50)
                with one_reader():
                    events.append("closed")

    def collect() -> None:
        Dropped()
        gc.collect()

    def use() -> None:
        with one_reader(), one_reader():
            events.append("read")
            many = [[i] for i in range(100_000)]  # which begins a collection
            assert len(gc.get_objects(0)) > len(many)
        assert gc.isenabled()

    collects, reads = threading.Thread(target=collect), threading.Thread(target=use)
    collects.start()
    assert begins.wait(50)
    reads.start()
    time.sleep(0.05)
    may_end.set()
    collects.join(50)
    reads.join(50)
    assert events == ["closed", "read"]
    gc.disable()
    try:
        with one_reader():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_one_reader_in_one_reader_and_after_an_error() -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), one_reader(), one_reader():
            raise ZeroDivisionError
    free = []
    thread = threading.Thread(target=lambda: free.append(read(OneAtATime(), None).shape))
    thread.start()
    thread.join(50)
    assert free == [(0,)]
