"""What a loader reads, and when: each worker its own boxes, some batches ahead, in a thread that ends with it."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from data.files import Watched
from data.test_batches import IMAGES, KEY, one, spec
from jobs import run_alone

import distdl_jax as dj
from distdl_jax.data import batches


def test_each_worker_reads_its_own_boxes_only() -> None:
    def program() -> tuple[int, int]:
        watched = Watched(IMAGES)
        for _ in batches(watched, spec(False)["x"], 4, KEY):
            pass
        return sum(watched.asked), len(watched.asked)

    assert [elements for elements, _ in dj.simulate(3, program)] == [1 + 11 * 4 * 2] * 3  # one tells the dtype


@pytest.mark.simulated(1)
def test_consecutive_samples_are_read_at_once() -> None:
    watched = Watched(IMAGES)
    list(batches(watched, one((4, 6)), 4))
    assert watched.asked == [1, 96, 96, 72]


@pytest.mark.simulated(1)
def test_batches_are_read_ahead_by_prefetch() -> None:
    class Slow(Watched):
        def __getitem__(self, at: Any) -> np.ndarray:
            if self.asked:  # the first one tells the dtype
                threads.add(threading.current_thread())
            return super().__getitem__(at)

    threads: set[threading.Thread] = set()
    slow = Slow(IMAGES)
    its = batches(slow, one((4, 6)), 1, prefetch=2)
    next(its)
    for _ in range(500):
        if len(slow.asked) == 5:
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(slow.asked) == 5  # its dtype; one taken, two in the queue, one in the thread's hand
    (thread,) = threads
    assert thread is not threading.main_thread()
    its.close()
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(StopIteration):
        next(its)


@pytest.mark.simulated(1)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_comes_with_its_batch(prefetch: int) -> None:
    class Broken(Watched):
        def __getitem__(self, at: Any) -> np.ndarray:
            if at[0].start >= 8:
                raise OSError(5, "Input/output error")
            return super().__getitem__(at)

    its = batches(Broken(IMAGES), one((4, 6)), 4, prefetch=prefetch)
    assert next(its).shape == next(its).shape == (4, 4, 6)
    with pytest.raises(OSError, match="Input/output error"):
        next(its)


@pytest.mark.simulated(1)
@pytest.mark.limit(20)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_are_closed_by_another_thread(prefetch: int) -> None:
    """All who wait in next are woken, though the source gives no batch."""
    waits, may_go_on = threading.Event(), threading.Event()

    def source() -> Any:
        yield np.zeros((2, 3))
        waits.set()
        assert may_go_on.wait(60)
        yield np.ones((2, 3))

    its = batches(source(), one((3,)), prefetch=prefetch)
    found: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda: found.append([float(batch[0, 0]) for batch in its]))
        for _ in range(3 if prefetch else 1)
    ]
    for thread in threads:
        thread.start()
    assert waits.wait(60)
    its.close()
    if not prefetch:
        may_go_on.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    may_go_on.set()
    assert len(found) == len(threads)
    assert next(its, None) is None
    its.close()


FORKED = """
import os, signal, sys
import numpy as np
import distdl_jax as dj
from distdl_jax.errors import SetupError

spec = dj.TensorSpec((), dj.Partition().create_partition_inclusive([0]))
its = dj.data.batches(np.arange(8.0), spec, 2)
next(its)
child = os.fork()
if not child:
    signal.alarm(60)
    try:
        next(its)
    except SetupError as error:
        its.close()
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert len([*its]) == 3
"""


def test_a_forked_process_has_no_thread_that_reads_ahead() -> None:
    status, output = run_alone("-c", FORKED)
    assert status == 0 and "which was forked from it, has no thread that reads ahead" in output, output
