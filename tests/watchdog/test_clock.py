"""What time counts."""

import pytest

from distdl_jax.watchdog.clock import LONGEST_TURN, AwakeClock, pause_after


@pytest.mark.parametrize("turns", [[0.05] * 100, [0.05, 3600.0, 0.05], [0.05, 1e6]])
def test_time_in_which_nobody_looked_does_not_count(turns):
    clock, now = AwakeClock(50.0), 50.0
    for turn in turns:
        now += turn
        seconds = clock.turn(now)
    assert seconds == pytest.approx(sum(min(turn, LONGEST_TURN) for turn in turns))


def test_the_pauses_between_lines_double():
    seconds, lines = 60.0, []
    while seconds < 20_000:
        lines.append(seconds)
        seconds += pause_after(seconds)
    assert lines == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0, 7440.0, 11040.0, 14640.0, 18240.0]
