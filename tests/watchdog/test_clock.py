"""What time counts."""

import pytest

from distdl_jax.watchdog.watch.clock import LONGEST_TURN, AwakeClock


@pytest.mark.parametrize("turns", [[0.05] * 100, [0.05, 3600.0, 0.05], [0.05, 1e6]])
def test_time_in_which_nobody_looked_does_not_count(turns):
    clock, now = AwakeClock(50.0), 50.0
    for turn in turns:
        now += turn
        seconds = clock.turn(now)
    assert seconds == pytest.approx(sum(min(turn, LONGEST_TURN) for turn in turns))
