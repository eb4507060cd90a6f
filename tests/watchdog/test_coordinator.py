"""What the coordinator tells the workers, and when."""

from dataclasses import replace

from played_coordinator import Played, all_reduce, ask, clock, to_all
from test_deadlock import AGREEING, IN_CALL, LEFT, RUNNING, calls

from distdl_jax.watchdog.watch.coordinator import EVENTS
from distdl_jax.watchdog.watch.messages import Answer, CannotAgree, EndJob, Fail, Wait


def test_those_concerned_are_asked_again_before_all_fail():
    played = Played({0: AGREEING, 1: LEFT, 2: RUNNING})
    assert played.tick() == ask(1, 0, 1)
    assert played.tick(99.0) == [] and played.answer(1, 0, now=99.0) == []
    posts = played.answer(1, 1, now=99.0)
    (first, failure) = posts[0]
    assert posts == to_all(failure, 3) and first == 0 and failure.epoch == 0
    assert "Worker 1 has ended its program, after 3 calls, but worker 0 is about" in failure.text
    assert played.tick(999.0) == []  # said once


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
    for names, found in (("fg", True), ("ff", False)):
        played = Played(states, all_reduce(0, 1))
        assert played.tick() == ask(1, 0, 1)
        for worker, in_full in ((0, "fff"), (1, names)):
            state = played.states[worker]
            played.states[worker] = replace(state, calls=replace(state.calls, names=tuple(in_full)))
        posts = played.answer(1)
        assert bool(posts) == found and (not found or "call 2 is f on worker 0 and g on worker 1" in posts[0][1].text)


def test_a_failed_agreement_is_passed_on_once():
    played = Played({0: RUNNING, 1: RUNNING})
    assert played.hear(CannotAgree(0, "no", (0, 1))) == to_all(Fail(0, "no", (0, 1)))
    assert played.hear(CannotAgree(0, "no, as worker 1 has it")) == []
    assert played.hear(CannotAgree(1, "no again")) == to_all(Fail(1, "no again"))


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


def test_the_story_is_bounded():
    played = Played({0: RUNNING, 1: RUNNING})
    for episode in range(2 * EVENTS):
        played.hear(Answer(0, replace(AGREEING, episode=episode)), float(episode))
    story = played.coordinator.story()
    assert len(story) == EVENTS and "  511.0 s: worker 0 is about" in story[-1]
