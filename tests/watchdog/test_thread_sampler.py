"""What a worker's threads do, seen from another one: the watchdog's thread, its clock and its sampler."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distdl_jax.watchdog.watch.clock import LONGEST_TURN, AwakeClock
from distdl_jax.watchdog.watch.status import ThreadRecord, WorkerStatus, is_pending
from distdl_jax.watchdog.watch.thread import WatchdogThread
from distdl_jax.watchdog.watch.thread_sampler import Sampler, _stack_file, main_stack


@contextmanager
def a_thread_in(file: str, function: str) -> Iterator[threading.Thread]:
    """Start a thread whose innermost frame is of this function."""
    inside, ends, names = threading.Event(), [], {}
    exec(compile(f"def {function}():\n inside()\n while not ends: pass", file, "exec"), names)
    names |= {"inside": inside.set, "ends": ends}
    thread = threading.Thread(target=names[function])
    thread.start()
    inside.wait(10)
    try:
        yield thread
    finally:
        ends.append(True)
        thread.join()


class Token:
    """What tells how far a program is."""

    def __init__(self) -> None:
        self.is_over = False

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.is_over


COMPILER, RUNS = "x/jax/_src/compiler.py", "x/jax/_src/interpreters/pxla.py"


def test_sample_says_how_long_a_thread_compiles_and_when_it_last_did():
    sampler = Sampler(WorkerStatus(0, 2))
    before = sampler.look(1.0)
    assert (before.compiles, before.compiled) == (0, float("inf"))
    with a_thread_in(COMPILER, "backend_compile"):
        found = [sampler.look(1.0 + second) for second in range(1, 31)]
    assert max(sample.compiles for sample in found) > 2 and min(sample.compiled for sample in found) == 0
    after = sampler.look(40.0)
    assert after.compiles == 0 and 9 <= after.compiled < 40


def test_runs_are_told_apart_by_the_tokens_of_their_thread():
    status, tokens = WorkerStatus(0, 2), [Token()]
    sampler = Sampler(status)
    with a_thread_in(RUNS, "__call__") as thread:
        status.threads[thread.ident] = ThreadRecord(thread.ident, lambda: list(tokens))
        tokens[0].is_over = True
        sampler.look(0.0)
        first = sampler.look(1.0)
        again = sampler.look(2.0)
        tokens[:] = [Token()]
        tokens[0].is_over = True
        another = sampler.look(3.0)
    assert first.run is again.run and first.run.began == 0 and another.run.began == 3
    assert sampler.look(4.0).run is None


@pytest.mark.parametrize("asks", ["is_deleted", "is_ready"])
def test_where_jax_cannot_say_no_program_is_taken_for_done(asks):
    """jaxlib's random numbers need a file descriptor, of which a worker may have none left."""

    def fails() -> bool:
        raise RuntimeError("random_device could not be read: device not available")

    token = Token()
    setattr(token, asks, fails)
    assert is_pending(token, True) and not is_pending(token, False)
    status = WorkerStatus(0, 2)
    status.threads[0] = ThreadRecord(0, lambda: [token])
    assert status.tokens_pending()


class Fails:
    """An agent, a clock and a sampler each call of which raises."""

    def __getattr__(self, name):
        raise OSError(24, "Too many open files")


@pytest.mark.parametrize("part", ["clock", "sampler", "first", "all"])
def test_a_turn_survives_what_each_of_its_parts_raises(part, caplog):
    """And the others have theirs: what keeps the clock is not kept from it."""
    thread, turns = WatchdogThread(), []

    class Agent:
        def turn(self, sample, now, *_):
            turns.append((sample.run, now))

    class Sees:
        def look(self, now):
            return Sampler(WorkerStatus(0, 2)).look(now)

    class Clock:
        def turn(self, now):
            return now

    agents = [Fails() if part in ("first", "all") else Agent(), Agent()]
    thread._agents = agents
    status = Fails() if part in ("clock", "all") else WorkerStatus(0, 2)
    thread._limit = 1.0
    for _ in range(3):
        thread._turn(Fails() if part in ("sampler", "all") else Sees(), Clock(), status)
    assert len(turns) == (3 if part in ("first", "all") else 6)
    assert len([record for record in caplog.records if "it goes on" in record.message]) <= 3


@pytest.mark.parametrize("turns", [[0.05] * 100, [0.05, 3600.0, 0.05], [0.05, 1e6]])
def test_time_in_which_nobody_looked_does_not_count(turns):
    clock, now = AwakeClock(50.0), 50.0
    for turn in turns:
        now += turn
        seconds = clock.turn(now)
    assert seconds == pytest.approx(sum(min(turn, LONGEST_TURN) for turn in turns))


def test_a_file_of_the_program_that_has_the_descriptor_for_stacks_is_unchanged(tmp_path: Path):
    """A program may close all descriptors, and open files of its own."""
    assert main_stack()
    descriptor, _ = _stack_file()
    ours = os.dup(descriptor)
    (tmp_path / "theirs").write_text("theirs")
    try:
        with open(tmp_path / "theirs", "r+") as theirs:
            os.dup2(theirs.fileno(), descriptor)
            assert main_stack() == []
        assert (tmp_path / "theirs").read_text() == "theirs"
    finally:
        os.dup2(ours, descriptor, inheritable=False)
        os.close(ours)
    assert main_stack()
