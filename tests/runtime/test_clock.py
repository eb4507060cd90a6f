"""When a worker that waits asks whether it may, when it gives up, and what time counts."""

import pytest

from distdl_jax.watchdog.clock import ASKED_AT, LONGEST_TURN, AwakeClock, Wait


def wait(limit: float = 160.0) -> Wait:
    return Wait("agreeing", 1, began=1000.0, limit=limit)


def test_without_a_limit_nothing_happens():
    assert wait(0.0).look(1e9) is None


def test_it_asks_at_parts_of_the_limit():
    waiting, asked = wait(), []
    for second in range(1000, 1200):
        if waiting.look(second) == "ask":
            asked.append(second - 1000)
            waiting = waiting.after_asking(second).noted(second)
    assert asked == [160 * part for part in ASKED_AT]


def test_what_is_allowed_does_not_count():
    waiting = wait().after_asking(1160.0).allow(120.0, 160.0, 1160.0)
    assert waiting.look(1159.0 + 120) == "ask" and waiting.asked == 2  # 40 of 160 s count
    for _ in range(2):
        waiting = waiting.after_asking(1279.0).noted(1279.0)
    assert waiting.look(1279.9) is None and waiting.look(1280.0) == "ask"


def test_it_gives_up_when_the_coordinator_has_been_silent_for_longer_than_the_limit():
    waiting = wait().after_asking(1010.0)
    assert waiting.look(1169.0) == "ask"  # it is time for other questions
    for _ in range(4):
        waiting = waiting.after_asking(1169.0)
    assert waiting.look(1179.9) is None and waiting.look(1180.0) == "give up"
    assert waiting.noted(1169.0).look(1338.9) is None and waiting.noted(1169.0).look(1339.0) == "give up"


@pytest.mark.parametrize("turns", [[0.05] * 100, [0.05, 3600.0, 0.05], [0.05, 1e6]])
def test_time_in_which_nobody_looked_does_not_count(turns):
    clock, now = AwakeClock(50.0), 50.0
    for turn in turns:
        now += turn
        seconds = clock.turn(now)
    assert seconds == pytest.approx(sum(min(turn, LONGEST_TURN) for turn in turns))
