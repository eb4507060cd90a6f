"""What the coordinator tells the workers, and when: messages and times go in, messages come out."""

from dataclasses import replace

import pytest

from distdl_jax.programs.ir import Operation
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.coordinator import LATE, SETTLED, Coordinator
from distdl_jax.watchdog.deadlock import State
from distdl_jax.watchdog.messages import (
    Answer,
    CannotAgree,
    EndJob,
    Fail,
    Question,
    StateChanged,
    WaitedTooLong,
    WaitLonger,
)

RUNNING = State("running", calls=3, names=("f", "f", "f"))
IN_CALL = replace(RUNNING, kind="executing", in_call=True)
AGREEING = replace(RUNNING, kind="agreeing", purpose="broadcast", where="a.py:1 in f", waits_for=(1,), in_call=True)
LEFT = replace(RUNNING, kind="left")
EPOCH = 4


def coordinator(states):
    """One that was told, at time 0, what each worker does."""
    made = Coordinator(len(states), TimeLimits(100.0, 1000.0))
    for worker, state in states.items():
        assert made.hear(StateChanged(worker, state), 0.0) == []
    return made


def to_all(message, size=2):
    return [(worker, message) for worker in range(size)]


def test_who_waits_is_asked_again_before_all_fail():
    made = coordinator({0: AGREEING, 1: LEFT})
    assert made.decide(EPOCH, 1.0) == [(0, Question(1))]
    assert made.decide(EPOCH, 99.0) == []  # however long the answer takes
    made.hear(Answer(0, 1), 99.0)
    ((first, failure), (second, same)) = made.decide(EPOCH, 99.1)
    assert (first, second) == (0, 1) and failure == same and failure.epoch == EPOCH
    assert "Worker 1 has ended its program as if all were done, after 3 calls, but worker 0 is about" in failure.text
    assert made.decide(EPOCH, 99.2) == []  # said once


def test_a_deadlock_must_hold_for_a_while():
    made = coordinator({0: AGREEING, 1: LEFT})
    made.decide(EPOCH, 1.0)
    made.hear(Answer(0, 1), 1.1)
    assert made.decide(EPOCH, 1.0 + SETTLED) == []
    assert made.decide(EPOCH, 1.1 + SETTLED)


@pytest.mark.parametrize("now_does", [RUNNING, replace(AGREEING, since=7.0)], ids=["goes on", "agrees on another"])
def test_who_does_something_else_by_then_is_not_taken_to_wait(now_does):
    made = coordinator({0: AGREEING, 1: LEFT})
    made.decide(EPOCH, 1.0)
    made.hear(StateChanged(0, now_does), 2.0)
    made.hear(Answer(0, 1), 2.0)
    expected = [(0, Question(2))] if now_does.kind == "agreeing" else []
    assert made.decide(EPOCH, 9.0) == expected
    assert made.decide(EPOCH, 19.0) == []


def test_an_answer_to_an_earlier_question_does_not_count():
    made = coordinator({0: AGREEING, 1: LEFT})
    made.decide(EPOCH, 1.0)
    made.hear(StateChanged(0, replace(AGREEING, since=7.0)), 2.0)
    assert made.decide(EPOCH, 2.0) == [(0, Question(2))]
    made.hear(Answer(0, 1), 3.0)
    assert made.decide(EPOCH, 9.0) == []


def test_all_in_a_cycle_are_asked():
    cycle = {worker: replace(AGREEING, waits_for=((worker + 1) % 3,), purpose=f"sum {worker}") for worker in range(3)}
    made = coordinator({**cycle, 3: RUNNING})
    assert made.decide(EPOCH, 1.0) == [(worker, Question(1)) for worker in range(3)]
    made.hear(Answer(0, 1), 2.0)
    made.hear(Answer(1, 1), 2.0)
    assert made.decide(EPOCH, 9.0) == []
    made.hear(Answer(2, 1), 9.0)
    assert [worker for worker, _ in made.decide(EPOCH, 9.0)] == [0, 1, 2, 3]


def test_what_rests_on_names_alone_asks_nobody_and_ends_the_job():
    """Nobody is in an agreement, so nobody could raise."""
    made = coordinator({0: RUNNING, 1: replace(RUNNING, names=("f", "g", "f"))})
    assert made.decide(EPOCH, 1.0) == []
    posts = made.decide(EPOCH, 9.0)
    assert posts == to_all(EndJob(posts[0][1].text)) and "call 2 is f on worker 0 and g on worker 1" in posts[0][1].text


def test_a_failed_agreement_is_passed_on():
    assert coordinator({0: RUNNING, 1: RUNNING}).hear(CannotAgree(2, "no"), 1.0) == to_all(Fail(2, "no"))


def test_a_program_is_given_time_after_another_worker_has_left():
    made = coordinator({0: IN_CALL, 1: LEFT})
    assert made.decide(EPOCH, LATE) == []
    assert made.decide(EPOCH, LATE + 0.1) == [(0, Question(1))]
    made.hear(Answer(0, 1), LATE + 0.2)
    ((_, message), _) = made.decide(EPOCH, LATE + 1)
    assert "Worker 1 ended long ago, but worker 0 is in call 3, of f." in message.text


@pytest.mark.parametrize(
    ("states", "waited", "ends"),
    [
        ({0: IN_CALL, 1: IN_CALL}, 999.0, False),  # it may simply be long
        ({0: IN_CALL, 1: IN_CALL}, 1001.0, True),
        ({0: IN_CALL, 1: RUNNING}, 101.0, True),
        ({0: IN_CALL, 1: replace(RUNNING, kind="compiling")}, 101.0, False),
    ],
)
def test_a_clock_that_ran_out_ends_the_job_or_has_to_wait(states, waited, ends):
    made = coordinator(states)
    posts = made.hear(WaitedTooLong(0, waited), 101.0)
    if not ends:
        assert posts == to_all(WaitLonger())
        return
    text = posts[0][1].text
    assert posts == to_all(EndJob(text))
    assert f"Worker 0 has waited for {waited:.0f} s; the limit is 100 s (DISTDL_JAX_TIMEOUT" in text
    assert "Worker 0 is in call 3, of f." in text
    assert made.hear(WaitedTooLong(1, waited), 102.0) == []  # it ends already


def test_the_report_says_who_did_not_come_and_where_the_others_wait():
    made = coordinator({0: IN_CALL, 1: replace(RUNNING, calls=2, names=("f", "f"))})
    first, second = (Operation("sendrecv", (0, 1), dest=1, source=1, count=n, received=n, dtype="int8") for n in (5, 6))
    made.programs["f"] = {0: (first,), 1: (replace(second, dest=0, source=0),)}
    text = made.hear(WaitedTooLong(0, 200.0), 200.0)[0][1].text
    assert "Worker 1 did not come to call 3, of f." in text
    assert "Worker 0 waits in operation 1 of 1 of its plan: sendrecv to worker 1 and from worker 1 (5 x int8)" in text


def test_the_report_says_what_it_must_be_if_all_are_in_one_call():
    made = coordinator({0: IN_CALL, 1: IN_CALL})
    made.programs["f"] = {0: (), 1: ()}
    text = made.hear(WaitedTooLong(0, 2000.0), 2000.0)[0][1].text
    assert "they must have taken different branches of a cond" in text
