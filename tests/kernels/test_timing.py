"""How long something takes."""

import hashlib
import threading
import time
from functools import partial

import pytest

from distdl_jax.kernels.cpu.timing import MOST_ROUNDS, in_turns, processor_time

DATA = bytes(2**16)


def test_time_of_other_threads_counts_to_the_last(request: pytest.FixtureRequest) -> None:
    """A thread that still runs has worked as long as it says."""
    asked, answered, over = threading.Event(), threading.Event(), threading.Event()
    answers: list[float] = []

    def works() -> None:
        asked.wait()
        start = time.thread_time()
        while time.thread_time() - start < 0.002:
            hashlib.sha256(DATA)  # without the interpreter's lock
        answers.append(time.thread_time() - start)
        answered.set()
        while not over.is_set():  # as XLA's threads, which look for more to do
            hashlib.sha256(DATA)

    thread = threading.Thread(target=works, daemon=True)
    thread.start()
    request.addfinalizer(over.set)

    def work() -> None:
        asked.set()
        answered.wait()

    assert processor_time(work) >= answers[0]


def test_a_way_that_is_far_behind_is_timed_once() -> None:
    """Not where only its first time is long, in which buffers are touched; nor one of two that are alike."""
    seconds = {"far": iter([2.5]), "quick": iter([2.0, *[0.5] * 9])}
    times = in_turns({name: partial(next, turns) for name, turns in seconds.items()})
    assert {name: len(took) for name, took in times.items()} == {"far": 1, "quick": 4}
    seconds = {"slow at first": iter([4.5, *[1.5] * 9]), "quick": iter([2.0, *[1.2] * 9])}
    times = in_turns({name: partial(next, turns) for name, turns in seconds.items()})
    assert {name: len(took) for name, took in times.items()} == {"slow at first": 4, "quick": 4}
    seconds = {"slow at first": iter([0.09, *[0.001] * 20]), "quick": iter([0.02, *[0.002] * 20])}
    times = in_turns({name: partial(next, turns) for name, turns in seconds.items()})
    assert min(times["slow at first"]) == 0.001
    short = in_turns({"short": lambda: 1e-6})
    assert len(short["short"]) == 1 + MOST_ROUNDS
