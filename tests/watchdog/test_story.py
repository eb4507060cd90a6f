"""The story of a job, and the dump of the coordinator's state."""

from dataclasses import replace

from played_coordinator import Played, all_reduce
from test_deadlock import AGREEING, LEFT, RUNNING

from distdl_jax.watchdog.watch.coordinator import EVENTS
from distdl_jax.watchdog.watch.messages import Answer, Wait


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
    assert (
        len(played.coordinator.story()) == EVENTS and "  511.0 s: worker 0 is about" in played.coordinator.story()[-1]
    )


def test_the_dump_has_the_whole_state():
    played = Played({0: AGREEING, 1: RUNNING}, all_reduce(0, 1))
    played.announces(0, Wait("agreeing", 1, 7.0), 7.0)
    dump = played.coordinator.dump()
    for part in ("members: (0, 1)", "label='broadcast'", "question=OpenQuestion(number=1", "plans of: f"):
        assert part in dump
