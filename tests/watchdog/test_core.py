"""What a reporter tells, and of which waits it asks, where the worker has partitions of several communicators."""

import pytest

from distdl_jax.settings import Settings, TimeLimits
from distdl_jax.watchdog.watch import agent as agent_module
from distdl_jax.watchdog.watch.abort import say_elsewhere
from distdl_jax.watchdog.watch.agent import Agent
from distdl_jax.watchdog.watch.core import Facts, Reporter
from distdl_jax.watchdog.watch.deadlock import State
from distdl_jax.watchdog.watch.messages import Answer, Detail, EndJob, Question, Say, Wait
from distdl_jax.watchdog.watch.status import WorkerStatus, acting_as, worker_status
from distdl_jax.watchdog.watch.thread import WatchdogThread
from distdl_jax.watchdog.watch.thread_sampler import Sample

LIMIT = 16.0


def answers(facts):
    """Return what the reporter answers in a wait that lasts past the limit, while the coordinator asks."""
    reporter, messages = Reporter(0, LIMIT), []
    for now in range(20):
        reporter.hear(Question(now), float(now))
        messages += reporter.look(facts, now + 0.5)
    return messages


@pytest.mark.parametrize(
    ("facts", "counts"),
    [
        (Facts(State("agreeing", "", "a sum", (1,), 1)), True),
        (Facts(State("agreeing", "", "a sum", (1,), 1), covered=True), False),
        (Facts(State("elsewhere", "", "a sum", (1,), 1)), True),
        (Facts(State("elsewhere", "", "a sum", (), 1)), False),
        (Facts(State("executing", episode=1), run=1, covered=True), False),
    ],
)
def test_one_timeout_for_each_wait(facts, counts):
    """That of the world that has all whom the worker waits for, and all who may compile meanwhile."""
    messages = answers(facts)
    kind = facts.state.kind
    assert messages[-1].waits == ((Wait(kind, 1, 19.0),) if counts else ())
    assert {message.state.kind for message in messages} == {kind}


def test_all_questions_are_answered_with_details():
    facts = Facts(detail=Detail(compiled=2.0))
    reporter = Reporter(0, LIMIT)
    for question in (Question(1, in_full=True), Question(2)):
        reporter.hear(question, 0.0)
    assert reporter.look(facts, 0.0) == [Answer(0, facts.state, (), number, facts.detail) for number in (1, 2)]


def alone(facts, *times):
    """Return what the reporter says at these times, if the coordinator is silent."""
    reporter = Reporter(0, LIMIT)
    return [reporter.look(facts, now) for now in times]


def test_a_wait_is_announced_once_after_a_part_of_the_limit():
    facts = Facts(State("executing", episode=3, function="step"), run=3)
    state = facts.state
    announced = Answer(0, state, (Wait("executing", 3, 1.0),))
    assert alone(facts, 0.0, 0.9, 1.0, 1.1) == [[], [Answer(0, state)], [announced], []]


def test_without_a_limit_a_wait_is_announced_after_a_minute_and_ends_nothing():
    reporter, facts, told = Reporter(0, 0.0), Facts(State("executing", episode=3), run=3), []
    for now in range(0, 10_000, 20):
        told += [(now, post.waits) for post in reporter.look(facts, now) if isinstance(post, EndJob) or post.waits]
    assert told == [(60, (Wait("executing", 3, 60.0),))]


def test_it_gives_up_when_the_coordinator_has_been_silent_for_longer_than_the_limit():
    """Not sooner: a coordinator may be in code that does not let Python run."""
    facts = Facts(State("agreeing", "", "a sum", (1,), 1))
    assert alone(facts, 0.0, 1.0, 17.9)[-1] == []
    ((end,),) = alone(facts, 0.0, 1.0, 18.0)[2:]
    assert isinstance(end, EndJob) and end.text.startswith("Worker 0 has waited for 18 s. Worker 0, which knows of all")
    reporter = Reporter(0, LIMIT)
    reporter.look(facts, 0.0)
    reporter.hear(Question(1), 9.0)
    for now, gives_up in ((25.9, False), (26.0, True)):
        assert any(isinstance(post, EndJob) for post in reporter.look(facts, now)) == gives_up


@pytest.mark.parametrize(("rank", "lines"), [(1, 1), (2, 0)])
def test_one_worker_says_that_the_coordinator_is_silent_long_before_the_limit(rank, lines):
    facts = Facts(State("agreeing", "a.py:3", "a sum", (0,), 1))
    for asked, said in ((None, lines), (70.0, 0)):
        reporter, lines_said = Reporter(rank, 1800.0), []
        for now in range(0, 900, 10):
            if now == asked:
                reporter.hear(Question(1), float(now))
            lines_said += [post.text for post in reporter.look(facts, float(now)) if isinstance(post, Say)]
        assert len(lines_said) == said
        assert all("Worker 1 has waited for 120 s: it is about to run a sum (a.py:3)" in text for text in lines_said)


@pytest.mark.parametrize(("rank", "lines"), [(1, 1), (2, 0)])
def test_after_the_end_of_its_program_one_worker_says_that_the_coordinator_is_silent(rank, lines):
    reporter = Reporter(rank, LIMIT)
    said = [
        post.text
        for now in (0.0, 16.0, 80.0)
        for post in reporter.look(Facts(State("left")), now)
        if isinstance(post, Say)
    ]
    assert len(said) == lines and all("Worker 1 ended 80 s ago; Worker 0, which knows" in text for text in said)


class Letters:
    """A mailbox into which these have come."""

    def __init__(self, *arrived):
        self.arrived, self.posted = list(arrived), []

    def post(self, message, to):
        self.posted.append(message)

    def next(self):
        return (0, self.arrived.pop(0)) if self.arrived else None


class Talk:
    """The channel of an agreement."""

    def __init__(self, agent):
        self.monitor, self.sent, self.received = agent, {}, {}


def test_an_agreement_of_some_is_seen_in_the_world_of_all():
    with acting_as(WorkerStatus(1, 4)):
        everyone, some, others = (
            Agent(Letters(), rank, members, TimeLimits(LIMIT, LIMIT))
            for rank, members in ((3, (0, 1, 2, 3)), (1, (2, 3)), (1, (2, 3)))
        )
        agents, watch = [some, everyone, others], WatchdogThread()
        for agent in agents:
            watch.add(agent)
        say_elsewhere.clear()
        with worker_status().agreeing(Talk(some), "a sum", "a.py:1", (0,)):
            for now in range(15):
                for agent in agents:
                    agent.turn(Sample(), float(now))
    messages = [agent._mailbox.posted for agent in agents]
    (state, *_) = (message.state for message in messages[1])
    assert (state.kind, state.waits_for) == ("elsewhere", (2,))
    assert [any(message.waits for message in posted) for posted in messages] == [False, True, False]


@pytest.mark.parametrize("debug", [False, True])
def test_worker_0_reports_the_story_and_for_debugging_the_whole_state(monkeypatch, debug):
    reports = []
    monkeypatch.setattr(agent_module, "say", reports.append)
    monkeypatch.setattr(agent_module, "current_settings", lambda: Settings(debug=debug))
    mailbox = Letters(Answer(1, State("left", status=3)), EndJob(1, "why"))
    with acting_as(WorkerStatus(0, 2)):
        agent = Agent(mailbox, 0, (0, 1), TimeLimits(LIMIT, LIMIT))
        agent.turn(Sample(), 7.0)
    (report,) = reports
    assert report.startswith("Worker 0 of 2") and "7.0 s: worker 1 has ended its program with exit status 3\n" in report
    for part in ("kind='left'", "members: (0, 1)", "concluded: ()", "plans of: "):
        assert (part in report) == debug
    assert mailbox.posted[-1].question == 1  # it has reported


def test_a_message_that_moves_while_the_worker_is_looked_at_seems_to_be_on_its_way(monkeypatch):
    """What came in is counted before the state is looked at, what went out after it."""
    with acting_as(WorkerStatus(0, 2)):
        agent = Agent(Letters(Question(1)), 0, (0, 1), TimeLimits(LIMIT, LIMIT))
        agent.channel = talk = Talk(agent)

        def look():
            talk.sent[1] = talk.received[1] = 1
            return State("agreeing", "", "a sum", (1,), 1)

        monkeypatch.setattr(agent, "_agreement", look)
        agent.turn(Sample(), 7.0)
    (answer,) = agent._mailbox.posted
    assert (answer.detail.sent, answer.detail.received) == ({1: 1}, {})
