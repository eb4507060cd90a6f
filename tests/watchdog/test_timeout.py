"""What the coordinator concludes from how long workers wait, and when it asks them."""

from dataclasses import replace

import pytest
from played_coordinator import LIMITS, Played, all_reduce, clock, to_all
from test_deadlock import AGREEING, IN_CALL, LEFT, RUNNING, TRACING, calls

from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.programs.ir import Loop, Operation
from distdl_jax.watchdog.watch.coordinator import Coordinator
from distdl_jax.watchdog.watch.dependencies import Dependencies
from distdl_jax.watchdog.watch.messages import Answer, Detail, EndJob, Fail, Question, Say, Wait
from distdl_jax.watchdog.watch.timeout import UNHEARD, Situation, Timeout


@pytest.mark.parametrize(
    ("states", "seconds", "limit"),
    [
        ({0: IN_CALL, 1: IN_CALL}, 999.0, 1000.0),  # it may simply be long
        ({0: IN_CALL, 1: IN_CALL}, 1001.0, None),
        ({0: replace(IN_CALL, program=0), 1: replace(IN_CALL, program=0)}, 999.0, 1000.0),
        ({0: replace(IN_CALL, program=0), 1: LEFT}, 999.0, 1000.0),
        ({0: IN_CALL, 1: replace(RUNNING, calls=calls("ff"))}, 99.0, 100.0),
        ({0: IN_CALL, 1: replace(RUNNING, calls=calls("ff"))}, 101.0, None),
    ],
)
def test_a_clock_that_ran_out_ends_the_job_or_may_go_on(states, seconds, limit):
    posts = clock(Played(states, all_reduce(0, 1, loop=True)), seconds)
    if limit is not None:
        assert posts == [] and seconds < limit
        return
    text = posts[0][1].text
    assert f"Worker 0 has waited for {seconds:.0f} s; the limit is" in text and "Worker 0 is in call 3, of f." in text


def test_of_a_worker_that_waits_no_more_no_line_is_due():
    timeout, waits = Timeout(100.0), (Wait("agreeing", 1, 20.0),)
    timeout.ask(1, 2, 0.0)
    timeout.hear(Answer(0, AGREEING, waits, 1))
    assert timeout.speaks_at() == UNHEARD
    timeout.ask(2, 2, 10.0)
    timeout.hear(Answer(0, RUNNING, (), 1))
    assert timeout.speaks_at() == float("inf")


def test_a_limit_of_less_than_a_second_is_said():
    played = Played({0: IN_CALL, 1: IN_CALL}, limits=TimeLimits(0.001, 0.001))
    text = clock(played, 0.0013)[0][1].text
    assert "Worker 0 has waited for 0.0013 s; the limit is 0.001 s (DISTDL_JAX_TIMEOUT" in text


def test_who_has_no_operation_left_with_others_does_not_wait():
    """The last program is long on one worker; the other one has ended it, and left."""
    for others in (LEFT, replace(RUNNING, calls=replace(RUNNING.calls, done=3))):
        played = Played({0: IN_CALL, 1: others}, all_reduce(0, 1))
        assert clock(played, 1e6) == []
    mixed = replace(LEFT, calls=replace(LEFT.calls, mixed=True))
    assert isinstance(clock(Played({0: IN_CALL, 1: mixed}, all_reduce(0, 1)), 1e6)[0][1], EndJob)


def test_the_timeout_waits_for_the_silent_until_the_limit():
    played = Played({0: AGREEING, 1: RUNNING, 2: RUNNING})
    played.announces(0, Wait("agreeing", 1, 101.0), 101.0)
    played.answer(1, 0, 1, now=101.0)
    assert [type(message) for _, message in played.tick(200.9)] == [Say, *3 * [Question]]
    text, about = (lambda end: (end.text, end.about))(played.tick(201.0)[0][1])
    assert "Worker 2 was not heard from for 100 s." in text and about == (1,)


def test_the_report_says_who_did_not_come_and_where_the_others_wait():
    first, second = (Operation("sendrecv", (0, 1), dest=1, source=1, count=n, received=n, dtype="int8") for n in (5, 6))
    plan = {0: (first,), 1: (replace(second, dest=0, source=0),)}
    played = Played({0: IN_CALL, 1: replace(RUNNING, calls=calls("ff"))}, plan)
    text = clock(played, 200.0)[0][1].text
    assert "Worker 1 did not come to call 3, of f." in text
    assert "Worker 0 waits in operation 1 of 1 of its plan: sendrecv to worker 1 and from worker 1 (5 x int8)" in text


@pytest.mark.parametrize(("left", "named"), [(LEFT, (1, 2)), (replace(LEFT, status=3), (2,))])
def test_who_waits_for_one_that_has_ended_is_named_too(left, named):
    """But where that has failed. Worker 0 waits for worker 1, which sends to worker 2."""
    plan = {1: (Operation("send", (), dest=2),), 2: (Operation("recv", (), source=1),)}
    sends = replace(IN_CALL, calls=calls("ffff", inside=True, passed=4), program=4)
    coordinator = Played({0: replace(AGREEING, kind="elsewhere"), 1: sends, 2: left}, plan).coordinator
    situation = Situation(coordinator.states, coordinator.plans, coordinator.programs, LIMITS, {})
    assert situation.blockers(0) == named


def test_the_report_says_what_it_must_be_if_all_are_in_one_call():
    beside_its_thread = replace(IN_CALL, calls=replace(IN_CALL.calls, inside=False), function="f")
    for state in (IN_CALL, beside_its_thread):
        text = clock(Played({0: state, 1: IN_CALL}, all_reduce(0, 1, loop=True)), 2000.0)[0][1].text
        assert "they must have taken different branches of a cond" in text


def test_the_report_says_whose_call_has_ended_where_others_are_still_in_it():
    """Without a cond or a while loop: one worker's call has raised an exception, say, and its program goes on."""
    played = Played({0: IN_CALL, 1: replace(RUNNING, calls=calls("fff"))}, all_reduce(0, 1, loop=True))
    text = clock(played, 2000.0)[0][1].text
    assert "Worker 1 came to call 3, of f, whose plan was found to complete" in text and "an exception" in text


def test_of_several_plans_of_a_function_what_holds_in_all_is_certain():
    coordinator = Coordinator((0, 1, 2), LIMITS)
    for count in range(40):
        coordinator.remember("f", dict.fromkeys((0, 1), (Operation("allreduce", (0, 1), count=count),)))
        both = Dependencies(frozenset({0, 1}), frozenset({0, 1}))
        assert coordinator.plans["f"][0] is coordinator.plans["f"][1] == both
    send = {0: (Operation("send", (), dest=2),), 2: (Operation("recv", (), source=0),)}
    coordinator.remember("f", {**send, 1: (Loop(None, send[2]),)})
    assert coordinator.plans["f"] == {
        0: Dependencies(frozenset(), frozenset({0, 1, 2})),
        1: Dependencies(frozenset(), frozenset({0, 1}), fixed=False),
        2: Dependencies(frozenset(), frozenset({0})),
    }
    assert coordinator.programs["f"][0] == send[0]


HALF_AN_HOUR = TimeLimits(1800.0, 14400.0)


def lines_of(played, times, wait=lambda seconds: Wait("agreeing", 1, seconds)):
    """Return what is said while worker 0 waits, by the seconds for which it has."""
    said = []
    for seconds in times:
        played.announces(0, wait(seconds), seconds)
        played.answer(played.coordinator.questions, now=seconds)
        said += [(seconds, to, post.text) for to, post in played.tick(seconds) if isinstance(post, Say)]
    return said


@pytest.mark.parametrize("limits", [HALF_AN_HOUR, TimeLimits(0.0, 0.0)])
def test_it_is_said_now_and_then_who_waits_where_for_whom(limits):
    """One line for hundreds of workers, and nothing ends."""
    waiting = {worker: replace(AGREEING, label="sum", waits_for=(7,)) for worker in range(300)}
    played = Played({**waiting, 7: replace(RUNNING, where="load.py:7")}, limits=limits)
    said = lines_of(played, [59.0, *range(60, 1800, 30)])
    assert [seconds for seconds, _, _ in said] == [60, 300, 900] and {to for _, to, _ in said} == {0}
    for seconds, _, text in said:
        assert text.startswith(f"distdl_jax: Worker 0 has waited for {seconds} s: it is about to run sum")
        assert (
            "Worker 7 is at load.py:7, outside any operation. Workers 1, 2, 3" in text and "290 more wait, too" in text
        )
        assert ("the limit is 1800 s (DISTDL_JAX_TIMEOUT)" in text) == bool(limits.waiting) and len(text) < 400


def test_of_steps_that_take_long_it_is_said_once():
    played = Played({0: replace(AGREEING, waits_for=(1,)), 1: RUNNING}, limits=HALF_AN_HOUR)
    said = []
    for step in range(5):
        played.states[0] = replace(played.states[0], episode=step)
        said += lines_of(played, [70.0 + 1000 * step], lambda seconds, step=step: Wait("agreeing", step, 70.0))
    assert len(said) == 1
    played.states[0] = replace(played.states[0], label="another place")
    assert len(lines_of(played, [9000.0], lambda seconds: Wait("agreeing", 4, 70.0))) == 1


def test_of_a_program_that_all_are_in_it_is_said_that_they_may_compute():
    played = Played({0: IN_CALL, 1: IN_CALL}, all_reduce(0, 1, loop=True), limits=HALF_AN_HOUR)
    ((_, _, text),) = lines_of(played, [61.0], lambda seconds: Wait("executing", 0, seconds))
    assert "Worker 0 has waited, or computed, for 61 s: it is in call 3, of f. Worker 1 is in call 3, of f." in text


def test_of_who_waits_for_nobody_nothing_is_said():
    played = Played({0: IN_CALL, 1: LEFT}, all_reduce(0, 1), limits=HALF_AN_HOUR)
    assert lines_of(played, [61.0], lambda seconds: Wait("executing", 0, seconds)) == []


def test_who_has_ended_says_now_and_then_who_is_waited_for():
    played = Played({0: LEFT, 1: LEFT, 2: replace(RUNNING, where="a.py:7 in main")})
    said = lines_of(played, range(30, 9000, 30), lambda seconds: Wait("left", 0, float(seconds)))
    assert [(seconds, worker) for seconds, worker, _ in said] == [(n, 0) for n in (60, 300, 900, 1800, 3600, 7200)]
    text = said[-1][2]
    assert "Workers 0 and 1 ended 7200 s ago or more; the job goes on: worker 2 is at a.py:7 in main" in text


def test_of_who_is_silent_a_line_is_said_long_before_the_limit():
    """Once in each silence; and nothing else follows from it."""
    played = Played({0: AGREEING, 1: RUNNING, 2: RUNNING})
    played.announces(0, Wait("agreeing", 1, 7.0), 7.0)
    played.answer(1, 0, 1, now=7.0)
    assert played.tick(18.9) == [] and played.coordinator.wakes_at() == 19.0
    ((worker, line),) = played.tick(19.0)
    assert worker == 0 and "worker 2 was not heard from for 12 s" in line.text
    assert played.tick(31.0) == []
    played.waits.clear()
    played.answer(1, now=31.0)
    assert played.tick(31.0) == [] and played.coordinator.wakes_at() == float("inf")


def test_while_one_is_silent_the_others_hear_of_the_coordinator():
    played = Played({0: AGREEING, 1: RUNNING})
    played.announces(0, Wait("agreeing", 1, 7.0), 7.0)
    played.answer(1, 0, now=7.0)
    assert to_all(Question(1))[0] in played.tick(32.0) and played.tick(56.9) == []
    assert played.tick(57.0) == to_all(Question(1))


def test_who_is_silent_is_never_said_to_be_at_work():
    """Neither by the clock nor by those who have ended."""
    played = Played({0: LEFT, 1: RUNNING})
    played.announces(0, Wait("left", 0, 60.0), 60.0)
    played.answer(1, 0, now=60.0)
    (_, first), *_ = played.tick(72.0)
    (line,) = (message for _, message in played.tick(160.0) if isinstance(message, Say))
    assert "worker 1 was not heard from for 12 s" in first.text
    assert "the job goes on: worker 1 was not heard from for 100 s." in line.text


def test_a_wait_that_is_announced_meanwhile_is_in_the_next_question():
    """What others have answered before says nothing of how long they have compiled since."""
    played = Played({0: replace(AGREEING, waits_for=(1,)), 1: RUNNING, 2: replace(AGREEING, waits_for=(1,))})
    number = played.announces(0, Wait("agreeing", 1, 10.0), 10.0)
    played.answer(number, 0, 1, now=10.0)
    played.hear(Answer(2, played.states[2], (Wait("agreeing", 1, 101.0),)), 10.1)
    played.answer(number, 2, now=10.1)
    assert played.tick(10.1) == [] and played.tick(11.5) == []
    assert played.tick(10.0 + 100 / 64) == to_all(Question(number + 1), 3)


def test_a_wait_is_looked_at_soon_though_others_have_ended_long_ago():
    played = Played({0: LEFT, 1: replace(AGREEING, waits_for=(2,)), 2: RUNNING})
    clock(played, 3000.0, "left", now=3000.0)
    assert played.tick(3550.0) == []
    assert played.announces(1, Wait("agreeing", 1, 7.0), 3550.0) == 2


def test_while_one_waits_all_are_asked_at_parts_of_the_limit():
    for seconds, again in ((10.0, 25.0), (80.0, 20.0), (99.9, 100 / 64)):
        played = Played({0: AGREEING, 1: RUNNING})
        assert clock(played, seconds, "agreeing", 1, now=seconds) == []
        assert played.coordinator.timeout.due_at == pytest.approx(seconds + again)


def test_who_answers_another_question_first_has_yet_to_answer_this_one():
    played = Played({0: replace(AGREEING, waits_for=(1,)), 1: RUNNING})
    number = played.announces(0, Wait("agreeing", 1, 1000.0), 1000.0)
    played.answer(number, 0, now=1000.0)
    played.answer(number - 1, 1, now=1000.0)
    assert played.tick(1001.0) == []


def test_what_is_concluded_follows_from_the_answers_not_from_what_came_since():
    """Worker 0 has been told to go on by then, and is in its next call."""
    played = Played({0: TRACING, 1: RUNNING})
    played.tick()
    assert played.answer(1, 0) == []
    played.hear(Answer(0, IN_CALL))
    ((_, failure), _) = played.answer(1, 1)
    assert isinstance(failure, Fail) and "Worker 0 traces f again in call 3" in failure.text


@pytest.mark.parametrize(
    ("seconds", "compiled", "counts"),
    [(150.0, 0.0, 0.0), (150.0, 99.0, 99.0), (150.0, 101.0, None), (799.0, 0.0, 0.0), (800.0, 0.0, None)],
)
def test_wait_counts_from_the_last_compilation_but_for_eight_limits(seconds, compiled, counts):
    """`counts` is None where the job ends."""
    played = Played({0: replace(AGREEING, waits_for=(2,)), 1: RUNNING, 2: RUNNING})
    played.details = {1: Detail(compiled=compiled), 2: Detail(compiled=500.0)}
    posts = clock(played, seconds, "agreeing", 1, now=seconds)
    if counts is None:
        assert "Worker 0 has waited for" in posts[0][1].text
    else:
        assert posts == [] and played.counted() == counts
