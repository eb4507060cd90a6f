"""What is concluded from what the workers say that they do, and what must not be concluded."""

from dataclasses import replace

import pytest

from distdl_jax.watchdog.deadlock import State, find_deadlock, workers_text

RUNNING = State("running", calls=3, names=("f", "f", "f"))
IN_CALL = replace(RUNNING, kind="executing", in_call=True)
AGREEING = replace(RUNNING, kind="agreeing", purpose="broadcast", where="a.py:1 in f", waits_for=(1,), in_call=True)
LEFT = replace(RUNNING, kind="left")


@pytest.mark.parametrize(
    "states",
    [
        {},
        {0: RUNNING, 1: RUNNING},
        {0: IN_CALL, 1: RUNNING},
        {0: IN_CALL, 1: replace(IN_CALL, calls=2, names=("f", "f"))},
        {0: AGREEING, 1: RUNNING},
        {0: AGREEING, 1: IN_CALL},  # it may still come
        {0: replace(AGREEING, waits_for=(1,)), 1: replace(AGREEING, waits_for=(2,)), 2: RUNNING},
        {0: IN_CALL, 1: LEFT},  # its part may have been done before it left
        {0: LEFT, 1: LEFT},
        {0: replace(AGREEING, tracing=True), 1: replace(RUNNING, calls=2, names=("f", "f"))},
        {0: replace(AGREEING, tracing=True), 1: replace(RUNNING, in_call=True)},  # it may be about to trace
        {0: replace(AGREEING, waits_for=(2,)), 1: LEFT},
        # One agreement: worker 2 has told worker 0, which has worker 1's message to look for first; worker 1 is late.
        {0: replace(AGREEING, waits_for=(1, 2)), 1: RUNNING, 2: replace(AGREEING, waits_for=(0,))},
        {0: replace(AGREEING, waits_for=(1,)), 1: replace(AGREEING, waits_for=(0,))},
        {0: replace(AGREEING, waits_for=(2,)), 1: RUNNING, 2: replace(AGREEING, waits_for=(1, 0))},
        # What is no longer remembered is not compared.
        {0: replace(RUNNING, calls=5000, names=("f",)), 1: replace(RUNNING, calls=3, names=("g", "g", "g"))},
    ],
)
def test_what_may_still_go_on(states):
    assert find_deadlock(states) is None


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (
            {0: AGREEING, 1: LEFT},
            "Worker 1 has ended its program as if all were done, after 3 calls, but worker 0 is about",
        ),
        ({0: replace(IN_CALL, calls=4, names=("f",) * 4), 1: LEFT}, "but worker 0 is in call 4, of f"),
        ({0: IN_CALL, 1: replace(LEFT, status=3)}, "Worker 1 has ended its program with exit status 3"),
        (
            {0: replace(AGREEING, waits_for=(2,)), 1: replace(LEFT, status=1), 2: RUNNING},
            "Worker 1 has ended its program with exit status 1",
        ),
        (
            {0: AGREEING, 1: replace(AGREEING, waits_for=(2,)), 2: replace(AGREEING, waits_for=(3, 0))},
            "in a cycle: worker 0 is about to run broadcast (a.py:1 in f), and waits for worker 1; worker 1",
        ),
        (
            {0: replace(AGREEING, tracing=True), 1: IN_CALL},
            "Worker 0 traces f anew in call 3 (at a.py:1 in f), but worker 1",
        ),
        ({0: replace(AGREEING, tracing=True), 1: RUNNING}, "but worker 1 did not"),
        (
            {0: RUNNING, 1: replace(RUNNING, names=("f", "g", "f"))},
            "call 2 is f on worker 0 and g on worker 1",
        ),
        (
            {0: RUNNING, 1: replace(RUNNING, calls=2, names=("f", "g"))},
            "call 2 is f on worker 0 and g on worker 1",
        ),
    ],
)
def test_what_can_never_go_on(states, said):
    assert said in find_deadlock(states).text


def test_workers_are_listed():
    assert workers_text((3,)) == "worker 3"
    assert workers_text((1, 2, 5)) == "workers 1, 2 and 5"
    assert workers_text(tuple(range(20))) == "workers 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
