"""The survey: a question that goes from world to world comes back, and has been everywhere."""

from random import Random

import pytest

from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.coordinator import Coordinator
from distdl_jax.watchdog.deadlock import State
from distdl_jax.watchdog.messages import (
    Allowance,
    Answer,
    Detail,
    EndJob,
    Question,
    StillWaiting,
    SurveyAnswer,
    SurveyAsked,
    SurveyQuestion,
    SurveyResult,
)
from distdl_jax.watchdog.survey import Compiled, Doing, Relay, Survey, at_fault, held_up_by, lines_of, merged

LIMITS = TimeLimits(100.0, 100.0)


def carried(worlds, survey, compiled, random):
    """What the world that begins a survey is told in the end; messages arrive in any order."""
    coordinators = {world: Coordinator(world, LIMITS) for world in worlds}
    relays = {worker: Relay() for worker in compiled}
    of = {worker: [world for world in worlds if worker in world] for worker in compiled}
    answered = {}
    letters = [(survey.world, worker, SurveyQuestion(survey)) for worker in survey.world if len(of[worker]) > 1]
    awaited = len(letters)
    while letters:
        world, worker, letter = letters.pop(random.randrange(len(letters)))
        match letter:
            case SurveyQuestion():
                relays[worker], ask = relays[worker].asked(survey, world, [w for w in of[worker] if w != world])
                letters += [(other, worker, SurveyAsked(other.index(worker), survey)) for other in ask]
            case SurveyResult(_, known):
                relays[worker] = relays[worker].told(survey, world, known)
            case _ if world == survey.world and isinstance(letter, SurveyAnswer):
                answered = merged(answered, letter.known)
                awaited -= 1
            case _:
                coordinators[world], posts = coordinators[world].hear(letter, 0.0)
                letters += [(world, world[to], post) for to, post in posts]
        for mine in of[worker]:
            relays[worker], due = relays[worker].answers(mine, frozenset(of[worker]))
            own = {worker: Doing(Compiled(*compiled[worker]))}
            state = State("compiling")
            letters += [
                (mine, worker, SurveyAnswer(mine.index(worker), which, state, merged(known, own), is_last))
                for which, known, is_last in due
            ]
    assert awaited == 0
    return answered


@pytest.mark.parametrize("seed", range(50))
def test_it_comes_back_from_everywhere(seed):
    random = Random(seed)
    size = random.randint(3, 9)
    worlds = []
    while {0} | set().union(*worlds) != set(range(size)) or len(worlds) < 2:
        old = random.choice(sorted({0}.union(*worlds)))
        team = {old, *random.sample(range(size), random.randint(1, 3))}
        if len(team) > 1 and tuple(sorted(team)) not in worlds:
            worlds.append(tuple(sorted(team)))
    compiled = {worker: (10.0 * worker, 100.0 + worker) for worker in range(size)}
    first = random.choice(worlds)
    told = carried(worlds, Survey(first, 1), compiled, random)
    assert {worker: tuple(told[worker].compiled) for worker in told if worker not in first} == {
        worker: compiled[worker] for worker in range(size) if worker not in first
    }


def test_nobody_is_asked_twice_and_a_world_of_those_who_left_is_not_waited_for():
    relay, ask = Relay().asked(Survey((0, 1), 1), (1, 2), [(2, 3), (2, 4)])
    assert ask == {(2, 3), (2, 4)}
    relay, again = relay.asked(Survey((0, 1), 1), (2, 3), [(1, 2), (2, 4)])
    assert not again
    relay, due = relay.answers((2, 3), {(1, 2), (2, 3), (2, 4)})
    assert due == [(Survey((0, 1), 1), {}, True)]
    relay = relay.told(Survey((0, 1), 1), (2, 4), {4: Doing()})
    relay, due = relay.answers((1, 2), {(1, 2)})
    assert due == [(Survey((0, 1), 1), {4: Doing()}, True)]
    assert relay.answers((1, 2), set())[1] == []


def asks(coordinator, seconds):
    """Worker 0, with a partner that waits in another world, asks; the coordinator, and what it posts."""
    coordinator, _ = coordinator.hear(StillWaiting(0, "agreeing", 1, seconds), seconds)
    coordinator, posts = coordinator.tick(seconds)
    number = next(post.number for _, post in posts if isinstance(post, Question))
    waiting = {0: State("agreeing", waits_for=(1,), episode=1), 1: State("elsewhere", episode=4)}
    for worker, state in waiting.items():
        detail = Detail(awake=seconds, beyond=worker == 1)
        coordinator, _ = coordinator.hear(Answer(worker, number, state, detail), seconds)
    coordinator, posts = coordinator.tick(seconds)
    return coordinator, [(to, post) for to, post in posts if isinstance(post, SurveyQuestion | Allowance | EndJob)]


def test_before_the_clock_ends_the_job_those_beyond_are_asked():
    """For who compiles there; what was known before does not count again, and who is at fault there is named."""
    coordinator, posts = asks(Coordinator((5, 3), LIMITS), 110.0)
    assert [(to, type(post)) for to, post in posts] == [(1, SurveyQuestion)]
    partner, compiles = Doing(waits=True, waits_for=frozenset({7})), Doing(Compiled(30.0, 120.0))
    answer = SurveyAnswer(1, posts[0][1].survey, State("elsewhere", episode=4), {3: partner, 7: compiles})
    coordinator, _ = coordinator.hear(answer, 111.0)
    coordinator, posts = coordinator.tick(111.0)
    assert posts == [(0, Allowance("agreeing", 1, 30.0, 100.0))]
    coordinator, posts = asks(coordinator, 130.0)
    hangs = Doing(Compiled(30.0, 140.0), what="is at a.py:3 in f, outside any operation")
    answer = SurveyAnswer(1, posts[0][1].survey, State("elsewhere", episode=4), {3: partner, 7: hangs})
    coordinator, _ = coordinator.hear(answer, 131.0)
    ((_, end), _) = coordinator.tick(131.0)[1]
    assert isinstance(end, EndJob) and end.about == (7,)
    assert "Of MPI.COMM_WORLD, worker 7 is at a.py:3 in f, outside any operation." in end.text


def test_a_survey_that_does_not_come_back_is_given_up_at_the_limit():
    coordinator, _ = asks(Coordinator((5, 3), LIMITS), 110.0)
    assert coordinator.tick(209.0)[1] == []
    assert isinstance(coordinator.tick(211.0)[1][0][1], EndJob)


def test_after_a_survey_that_was_given_up_the_next_one_has_less_time():
    """Where somebody compiled for a moment, say, and is asked again."""
    coordinator, posts = asks(Coordinator((5, 3), LIMITS), 110.0)
    compiled = {7: Doing(Compiled(20.0, 120.0)), 8: Doing(what="was not heard from")}
    told = SurveyAnswer(1, posts[0][1].survey, State("elsewhere", episode=4), compiled, is_last=False)
    coordinator, _ = coordinator.hear(told, 170.0)
    coordinator, posts = coordinator.tick(211.0)
    assert posts == [(0, Allowance("agreeing", 1, 20.0, 100.0))]
    coordinator, _ = asks(coordinator, 212.0)
    assert not coordinator.tick(224.0)[1]
    assert coordinator.tick(225.0)[1][0][1].about == (8,)


def test_what_is_known_goes_on_beforehand_where_somebody_is_silent():
    """So that worker 7 is named, of the world of workers 3 and 7, to which worker 3 belongs, too."""
    survey = Survey((5, 3), 9)
    silent, posts = Coordinator((3, 7), LIMITS).hear(SurveyAsked(0, survey), 10.0)
    assert [to for to, _ in posts] == [0, 1]
    silent, posts = silent.hear(SurveyAnswer(0, survey, State("elsewhere", episode=4), {}), 11.0)
    silent, asked = silent.tick(12.0)
    assert not posts and not asked and silent.wakes_at() == 60.0
    silent, ((to, result),) = silent.tick(60.0)
    assert (to, result.is_last, result.known[7].what) == (0, False, "was not heard from")
    relay, _ = Relay().asked(survey, (5, 3), [(3, 7)])
    relay = relay.told(survey, (3, 7), result.known, result.is_last)
    relay, ((_, known, is_last),) = relay.answers((5, 3), {(5, 3), (3, 7)})
    assert not is_last and not relay.answers((5, 3), {(5, 3), (3, 7)})[1]
    coordinator, posts = asks(Coordinator((5, 3), LIMITS), 110.0)
    begun = posts[0][1].survey
    coordinator, _ = coordinator.hear(SurveyAnswer(1, begun, State("elsewhere", episode=4), known, is_last), 160.0)
    ((_, end), _) = coordinator.tick(211.0)[1]
    assert end.about == (7,) and "Of MPI.COMM_WORLD, worker 7 was not heard from." in end.text
    # It is there after all: the last answer counts.
    silent, ((_, result),) = silent.hear(SurveyAnswer(1, survey, State("compiling"), {}), 70.0)
    assert result.is_last


def test_who_could_not_be_asked_is_named():
    waits = {5: Doing(waits=True, waits_for=frozenset({8})), 3: Doing()}
    assert at_fault(5, waits, is_complete=True) == (8,)
    assert lines_of((8,), waits) == ["worker 8 could not be asked"]
    silent = Doing(what="was not heard from")
    assert at_fault(5, {**waits, 3: silent}, is_complete=True) == (3,)


def test_who_holds_up_whom_is_followed_through_all_worlds():
    chain = {0: Doing(waits=True, perhaps=frozenset({0, 1})), 1: Doing(waits=True, waits_for=frozenset({2}))}
    assert held_up_by(1, {**chain, 2: Doing()}) == (2,)
    assert held_up_by(0, {**chain, 2: Doing()}) == (0, 1, 2)  # where that is not certain
    known = merged(chain, {0: Doing(waits=True, waits_for=frozenset({1}))}, {2: Doing()})
    assert held_up_by(0, known) == (2,)
