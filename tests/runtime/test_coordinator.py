"""What the coordinator tells the workers, and when: messages and times go in, messages come out."""

from dataclasses import replace

import pytest
from test_deadlock import AGREEING, IN_CALL, LEFT, RUNNING, TRACING, calls

from distdl_jax.programs.ir import Loop, Operation
from distdl_jax.programs.matching import find_mismatch
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog import dependencies
from distdl_jax.watchdog.coordinator import EVENTS, PAUSES, Coordinator
from distdl_jax.watchdog.dependencies import Dependencies
from distdl_jax.watchdog.messages import Answer, CannotAgree, Detail, EndJob, Fail, Question, Replay, Say, Wait
from distdl_jax.watchdog.timeout import blockers

LIMITS = TimeLimits(100.0, 1000.0)


class Played:
    """A coordinator, and what the workers do: it keeps the states that the coordinator, which is pure, returns."""

    def __init__(self, states, plan=None, limits=LIMITS):
        self.states, self.details, self.waits = states, {}, {}
        self.coordinator = Coordinator.new(tuple(range(len(states))), limits)
        if plan is not None:
            self.coordinator = self.coordinator.remember("f", plan)
        for worker, state in states.items():
            assert self.hear(Answer(worker, state)) == []

    def hear(self, message, now=0.0):
        self.coordinator, posts = self.coordinator.hear(message, now)
        return posts

    def tick(self, now=0.0):
        self.coordinator, posts = self.coordinator.tick(now)
        return posts

    def announces(self, worker, wait, now):
        """A worker announces a wait, and all are asked; the number of the question."""
        self.waits[worker] = (wait,)
        assert self.hear(Answer(worker, self.states[worker], (wait,)), now) == []
        return self.asks(now)

    def asks(self, now):
        posts = self.tick(now)
        assert posts == to_all(Question(posts[0][1].number), len(self.states))
        return posts[0][1].number

    def answer(self, number, *workers, now=0.0):
        posts = []
        for worker in workers or self.states:
            detail = self.details.get(worker, Detail())
            posts += self.hear(Answer(worker, self.states[worker], self.waits.get(worker, ()), number, detail), now)
        return posts

    def counted(self):
        """For how many seconds each worker waits that count, as the last question has found."""
        found = [event.what.split(" count")[0] for event in self.coordinator.events if "of which" in event.what]
        return float(found[-1].split("of which ")[1].split()[0])


def all_reduce(*workers, loop=False):
    operation = (Operation("allreduce", workers),)
    return {worker: (Loop(None, operation),) if loop else operation for worker in workers}


def ask(number, *workers):
    return [(worker, Question(number, in_full=True)) for worker in workers]


def to_all(message, size=2):
    return [(worker, message) for worker in range(size)]


def test_those_concerned_are_asked_again_before_all_fail():
    played = Played({0: AGREEING, 1: LEFT, 2: RUNNING})
    assert played.tick() == ask(1, 0, 1)
    assert played.tick(99.0) == [] and played.answer(1, 0, now=99.0) == []
    posts = played.answer(1, 1, now=99.0)
    (first, failure) = posts[0]
    assert posts == to_all(failure, 3) and first == 0 and failure.epoch == 0
    assert "Worker 1 has ended its program, after 3 calls, but worker 0 is about" in failure.text
    assert played.tick(999.0) == []  # said once


def test_a_message_on_its_way_is_waited_for():
    played = Played({0: AGREEING, 1: LEFT})
    played.details = {1: Detail(sent={0: 5}), 0: Detail(received={1: 4})}
    played.tick()
    assert played.answer(1) == [] and played.tick(0.5) == []
    assert played.tick(PAUSES[0]) == ask(2, 0, 1)
    played.details[0] = Detail(received={1: 5})
    assert isinstance(played.answer(2)[0][1], Fail)


@pytest.mark.parametrize("now_does", [RUNNING, replace(AGREEING, episode=7)], ids=["goes on", "agrees on another"])
def test_who_does_something_else_by_then_is_not_taken_to_wait(now_does):
    played = Played({0: AGREEING, 1: LEFT})
    played.tick()
    played.states[0] = now_does
    assert played.answer(1) == []


def test_all_in_a_cycle_are_asked():
    cycle = {worker: replace(AGREEING, waits_for=((worker + 1) % 3,), label=f"sum {worker}") for worker in range(3)}
    played = Played({**cycle, 3: RUNNING})
    assert played.tick() == ask(1, 0, 1, 2)
    assert played.answer(1, 0, 1) == []
    assert [worker for worker, _ in played.answer(1, 2)] == [0, 1, 2, 3]


def test_who_is_in_a_program_can_not_raise_so_the_job_ends():
    played = Played(
        {0: replace(IN_CALL, calls=calls("ffff", inside=True, passed=4), program=4), 1: LEFT}, all_reduce(0, 1)
    )
    played.tick()
    posts = played.answer(1)
    assert (
        posts == to_all(EndJob(2, posts[0][1].text, (1, 0))) and "but worker 0 is in call 4, of f" in posts[0][1].text
    )


def test_different_calls_are_looked_at_before_anything_is_said_of_them():
    states = {0: IN_CALL, 1: replace(LEFT, calls=calls("fg"))}
    for names, said in (("fg", True), ("ff", False)):
        played = Played(states, all_reduce(0, 1))
        assert played.tick() == ask(1, 0, 1)
        for worker, in_full in ((0, "fff"), (1, names)):
            state = played.states[worker]
            played.states[worker] = replace(state, calls=replace(state.calls, names=tuple(in_full)))
        posts = played.answer(1)
        assert bool(posts) == said and (not said or "call 2 is f on worker 0 and g on worker 1" in posts[0][1].text)


def test_what_was_agreed_before_is_replayed_where_others_are_past():
    known = replace(TRACING, calls=replace(TRACING.calls, agreed_before=True))
    played = Played({0: known, 1: RUNNING})
    played.tick()
    assert played.answer(1) == to_all(Replay(3))


def test_a_failed_agreement_is_passed_on_once():
    played = Played({0: RUNNING, 1: RUNNING})
    assert played.hear(CannotAgree(0, "no", (0, 1))) == to_all(Fail(0, "no", (0, 1)))
    assert played.hear(CannotAgree(0, "no, as worker 1 has it")) == []
    assert played.hear(CannotAgree(1, "no again")) == to_all(Fail(1, "no again"))


def clock(played, seconds, kind="executing", episode=0, now=100.0):
    """What follows when worker 0 has waited for so long, and all answer."""
    number = played.announces(0, Wait(kind, episode, seconds), now)
    played.answer(number, now=now)
    return played.tick(now)


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


def test_compile_time_of_others_does_not_count():
    played = Played({0: replace(AGREEING, waits_for=(2,)), 1: RUNNING, 2: replace(RUNNING, kind="compiling")})
    assert clock(played, 10.0, "agreeing", 1, now=10.0) == [] and played.counted() == 10.0
    played.details = {2: Detail(compiled=300.0, awake=350.0), 1: Detail(compiled=20.0, awake=350.0)}
    assert clock(played, 350.0, "agreeing", 1, now=350.0) == [] and played.counted() == 30.0
    assert isinstance(clock(played, 421.0, "agreeing", 1, now=421.0)[0][1], EndJob)


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
    assert blockers(0, coordinator.states, coordinator.plans, ()) == named


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
    coordinator = Coordinator.new((0, 1, 2), LIMITS)
    for count in range(40):
        coordinator = coordinator.remember("f", dict.fromkeys((0, 1), (Operation("allreduce", (0, 1), count=count),)))
        both = Dependencies(frozenset({0, 1}), frozenset({0, 1}))
        assert coordinator.plans["f"][0] is coordinator.plans["f"][1] == both
    send = {0: (Operation("send", (), dest=2),), 2: (Operation("recv", (), source=0),)}
    coordinator = coordinator.remember("f", {**send, 1: (Loop(None, send[2]),)})
    assert coordinator.plans["f"] == {
        0: Dependencies(frozenset(), frozenset({0, 1, 2})),
        1: Dependencies(frozenset(), frozenset({0, 1}), fixed=False),
        2: Dependencies(frozenset(), frozenset({0})),
    }
    assert coordinator.programs["f"][0] == send[0]


def test_who_has_ended_says_now_and_then_who_is_waited_for():
    played = Played({0: LEFT, 1: LEFT, 2: replace(RUNNING, where="a.py:7 in main")})
    for seconds, again in ((60.0, 60.0), (120.0, 120.0), (240.0, 240.0), (9000.0, 3600.0)):
        ((worker, line),) = clock(played, seconds, "left", now=seconds)
        assert worker == 0 and played.coordinator.timeout.due_at == seconds + again
    assert "Workers 0 and 1 ended 9000 s ago or more; the job goes on: worker 2 is at a.py:7 in main" in line.text


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


def test_compile_time_is_not_lost_between_questions():
    """Answers come a little before a question is closed, and the coordinator's own clock may have stood still."""
    waiting = replace(AGREEING, waits_for=(1,))
    played = Played({0: waiting, 1: replace(RUNNING, kind="compiling")})
    now = 0.0
    played.announces(0, Wait("agreeing", 1, 0.0), now)
    for turn in range(1, 2000):
        seconds = 10.0 * turn
        played.waits[0] = (Wait("agreeing", 1, seconds),)
        early = 0.5 * (turn % 2)
        played.details = {1: Detail(compiled=seconds - early, awake=seconds - early), 0: Detail(awake=seconds)}
        played.answer(turn, now=now)
        assert played.tick(now) == [] and played.counted() <= early
        now += 0.3 * LIMITS.waiting  # whatever the workers' clocks say
        assert played.asks(now) == turn + 1


def test_several_that_compile_at_once_count_once():
    played = Played({0: replace(AGREEING, waits_for=(1,)), 1: RUNNING, 2: RUNNING})
    clock(played, 1.0, "agreeing", 1, now=1.0)
    played.details = {worker: Detail(compiled=80.0, awake=81.0) for worker in (1, 2)}
    clock(played, 81.0, "agreeing", 1, now=81.0)
    assert played.counted() >= 0.0


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
    assert played.tick(5900.0) == []
    assert played.announces(1, Wait("agreeing", 1, 7.0), 5900.0) == 2


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
    known = replace(TRACING, calls=replace(TRACING.calls, agreed_before=True))
    played = Played({0: known, 1: RUNNING})
    played.tick()
    assert played.answer(1, 0) == []
    played.hear(Answer(0, IN_CALL))
    assert played.answer(1, 1) == to_all(Replay(3))


def test_of_those_that_have_left_one_is_enough_to_say_so():
    played = Played({0: LEFT, 1: LEFT, 2: RUNNING})
    played.waits[1] = (Wait("left", 0, 60.0),)
    assert len(clock(played, 60.0, "left", now=60.0)) == 1


def test_the_story_of_a_worker_and_of_all():
    played = Played({0: AGREEING, 1: LEFT, 2: RUNNING})
    played.tick(1.0)
    played.answer(1, 0, 1, now=2.0)
    story = played.coordinator.story()
    assert [line.split(": ", 1)[0].strip() for line in story] == ["0.0 s", "0.0 s", "1.0 s", "2.0 s"]
    assert "worker 0 is about to run broadcast" in story[0] and "worker 1 has ended its program" in story[1]
    assert "workers 0 and 1 asked to confirm" in story[2] and "all fail: Worker 1 has ended" in story[3]
    assert played.coordinator.story(1) == story[1:] and played.coordinator.story(2) == story[2:]


def test_the_story_is_bounded():
    played = Played({0: RUNNING, 1: RUNNING})
    for episode in range(2 * EVENTS):
        played.hear(Answer(0, replace(AGREEING, episode=episode)), float(episode))
    assert (
        len(played.coordinator.story()) == EVENTS and "  511.0 s: worker 0 is about" in played.coordinator.story()[-1]
    )


def test_the_dump_has_the_whole_state():
    played = Played({0: AGREEING, 1: RUNNING}, all_reduce(0, 1))
    played.announces(0, Wait("agreeing", 1, 7.0), 7.0)
    dump = played.coordinator.dump()
    for part in (
        "members: (0, 1)",
        "label='broadcast'",
        "timeout: Timeout(question=OpenQuestion(number=1",
        "plans of: f",
    ):
        assert part in dump


def test_equal_programs_cost_what_one_costs(monkeypatch):
    """Of a thousand workers with one and the same program, one is looked at."""
    looked_at, walk = [], dependencies.dependencies_of
    monkeypatch.setattr(dependencies, "dependencies_of", lambda *of: looked_at.append(of) or walk(*of))
    workers = tuple(range(1000))
    program = (Operation("allreduce", workers), Operation("bcast", workers, root=3))
    programs = dict.fromkeys(workers, program)
    coordinator = Coordinator.new(tuple(range(1000)), LIMITS).remember("f", programs)
    assert len(looked_at) == 1 and coordinator.plans["f"][7].required == set(workers)
    assert dependencies.takes_all(programs) and find_mismatch(programs) is None
    reduction = (Operation("reduce", workers, root=3),)
    reduced = Coordinator.new(tuple(range(1000)), LIMITS).remember("f", dict.fromkeys(workers, reduction)).plans["f"]
    assert len(looked_at) == 3 and reduced[3].required == set(workers) and not reduced[4].required


@pytest.mark.parametrize(
    ("teams", "all_must"),
    [
        ([(0, 1, 2)], True),
        ([(0, 1), (1, 2)], True),
        ([(0, 1)], False),
        ([(0, 1), (2, 3)], False),
        ([(0, 3), (1, 2)], False),
    ],
)
def test_whom_a_plan_binds_together(teams, all_must):
    """Found by way of others, too, and not by what the data decide."""
    size = 1 + max(map(max, teams)) if len(teams) > 1 else 3
    programs = {w: tuple(Operation("allreduce", team) for team in teams if w in team) for w in range(size)}
    assert dependencies.takes_all(programs) == all_must
    assert not dependencies.takes_all({w: (Loop(None, program),) for w, program in programs.items()})
