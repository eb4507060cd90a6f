"""What a worker is recorded to be doing: the process's own, or that of a thread that acts as a worker."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from distdl_jax.watchdog.watch.call_log import CallLog
from distdl_jax.watchdog.watch.log import log
from distdl_jax.watchdog.watch.status import WorkerStatus, acting_as, worker_status


def in_threads(work, *of_each):
    """Run it in a thread for each argument, at the same time."""
    with ThreadPoolExecutor(len(of_each)) as pool:
        return list(pool.map(work, of_each))


def test_all_threads_of_a_process_are_one_worker():
    assert in_threads(lambda _: worker_status(), 1, 2) == [worker_status()] * 2


def test_threads_may_be_workers_of_their_own(caplog):
    lines, ready = {}, threading.Barrier(3)

    def work(rank):
        with acting_as(WorkerStatus(rank, 3)):
            ready.wait(10)
            with worker_status().call(f"function {rank}"):
                ready.wait(10)
                assert worker_status().in_call and worker_status().calls[-1] == (1, f"function {rank}")
                record = log.makeRecord(log.name, logging.INFO, "", 0, "here", (), None)
                assert log.filter(record)
                lines[rank] = record.getMessage()
        assert worker_status() is before

    before, calls = worker_status(), len(worker_status().calls)
    in_threads(work, 0, 1, 2)
    assert lines == {rank: f"worker {rank} of 3: here" for rank in range(3)}
    assert not before.in_call and len(before.calls) == calls


def test_a_call_that_counts_nowhere_hides_none_of_another_thread():
    """A loader that calls a function of its own, say, while the program's thread calls its step."""
    status, log, inside, goes_on = WorkerStatus(0, 1), CallLog(), threading.Event(), threading.Event()

    def load():
        with status.call("augment"):
            inside.set()
            goes_on.wait(10)

    thread = threading.Thread(target=load)
    thread.start()
    inside.wait(10)
    with status.call("step", log):
        goes_on.set()
        thread.join(10)
        assert status.in_call and status.here.log is log and log.inside
    assert (log.number, log.passed, log.inside, status.in_call) == (1, 1, False, False)
    assert set(status.threads) == {thread.ident, threading.get_ident()}


def test_calls_in_two_threads_count_each_in_its_world():
    """Of a program that trains in a thread, too, over a communicator of its own."""
    status, ours, other = WorkerStatus(0, 1), CallLog(), CallLog()

    def train(worlds):
        status.here.worlds = worlds
        with status.call("step in a thread"), status.traced():
            status.here.worlds.append("theirs")
            status.agreed_on(other, 1, "step in a thread")
            assert status.here.traces
        with status.call("step in a thread", other):
            pass
        assert status.here.worlds == ["theirs"]

    with status.call("step", ours), status.traced():
        status.here.worlds = []
        in_threads(train, [])
        assert status.here.worlds == [] and status.here.traces
        assert ours.inside and ours.tracing and status.here.log is ours
    assert (ours.number, ours.passed, other.number, other.passed) == (1, 1, 2, 2)
    assert not status.in_call and not status.tracing


def test_of_several_threads_that_wait_for_others_the_first_counts():
    """One that agrees again and again, in a communicator of its own, hides none that has waited for long."""
    status = WorkerStatus(0, 2)

    def agree_again(_):
        with status.agreeing(None, "another", "", (1,)):
            status.still_waits_for(())
            return status.waiting.label

    with status.agreeing(None, "the first", "", (1,)):
        assert in_threads(agree_again, 1) == ["the first"]
        assert (status.waiting.label, status.waiting.waits_for) == ("the first", (1,))
    assert status.waiting is None


def test_a_call_that_raises_counts_only_if_it_has_told_others_something():
    status = WorkerStatus(0, 2)
    calls = CallLog()
    with acting_as(status):
        for agrees in (False, True):
            with suppress(ValueError), status.call("step", calls):
                if agrees:
                    with status.agreeing(None, "a sum", "a.py:1", (1,)):
                        pass
                raise ValueError
            assert (calls.number, calls.earlier().digest is None) == ((1, True) if agrees else (0, False))
