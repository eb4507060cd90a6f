"""When a worker that waits asks to end the job, and when it ends it."""

import pytest

from distdl_jax.watchdog.clock import BETWEEN_QUESTIONS, Clock


@pytest.mark.parametrize(("limit", "waited"), [(0.0, 1e9), (10.0, 9.9)])
def test_within_the_limit_nothing_happens(limit, waited):
    assert Clock(limit).look(waited, 1e9) is None


def test_it_asks_once_and_gives_up_without_an_answer():
    clock = Clock(10.0)
    assert clock.look(10.0, 100.0) == "ask"
    assert clock.look(10.1, 100.1) is None
    assert clock.look(30.0, 100.0 + 2 * BETWEEN_QUESTIONS) is None
    assert clock.look(30.1, 100.1 + 2 * BETWEEN_QUESTIONS) == "give up"


def test_after_an_answer_it_asks_again_later():
    clock = Clock(10.0)
    clock.look(10.0, 100.0)
    clock.wait_longer(101.0)
    assert clock.look(20.0, 101.0 + BETWEEN_QUESTIONS) is None
    assert clock.look(20.1, 101.1 + BETWEEN_QUESTIONS) == "ask"
