"""What a reporter tells, and of which waits it asks, where the worker has partitions of several communicators."""

import pytest

from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.agent import Agent, Worlds
from distdl_jax.watchdog.main_thread import Sample
from distdl_jax.watchdog.messages import Answer, Detail, Question, StateChanged, StillWaiting
from distdl_jax.watchdog.reporter import Agreement, Facts, Reporter
from distdl_jax.watchdog.status import WorkerStatus, acting_as, worker_status

LIMIT = 16.0


def told(facts):
    """What it tells in a wait that lasts past the limit."""
    reporter, messages = Reporter(0, LIMIT), []
    for now in range(15):
        reporter, posts, orders = reporter.look(facts, float(now), lambda in_full: Detail())
        messages += posts
        assert orders.finish is None
    return messages


@pytest.mark.parametrize(
    ("facts", "asks"),
    [
        (Facts(agreement=Agreement(1, "a sum", "", (1,))), True),
        (Facts(agreement=Agreement(1, "a sum", "", (1,)), covered=True), False),
        (Facts(agreement=Agreement(1, "a sum", "", (1,), elsewhere=True)), True),
        (Facts(agreement=Agreement(1, "a sum", "", (), elsewhere=True)), False),
        (Facts(run=1, covered=True), False),
    ],
)
def test_one_clock_for_each_wait(facts, asks):
    """That of the world that has all whom the worker waits for, and all who may compile meanwhile."""
    messages = told(facts)
    assert any(isinstance(message, StillWaiting) for message in messages) == asks
    states = [message.state.kind for message in messages if isinstance(message, StateChanged)]
    assert states == [facts.state().kind]


def test_only_who_is_asked_in_full_tells_its_calls():
    reporter, details = Reporter(0, LIMIT), {True: Detail(compiled=1.0), False: Detail(compiled=2.0)}
    for question in (Question(1), Question(2, in_full=False)):
        reporter, _ = reporter.hear(question, 0.0)
    _, posts, _ = reporter.look(Facts(), 0.0, lambda in_full: details[in_full])
    assert [post.detail for post in posts if isinstance(post, Answer)] == [details[True], details[False]]


class Letters:
    """A mailbox into which nothing comes."""

    def __init__(self):
        self.posted = []

    def post(self, message, to):
        self.posted.append(message)

    def next(self):
        return None


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
        agents = [some, everyone, others]
        with worker_status().agreeing(Talk(some), "a sum", "a.py:1", (0,)):
            for now in range(15):
                for agent in agents:
                    agent.turn(Sample(), float(now), Worlds(agents))
    state = next(message.state for message in everyone._mailbox.posted if isinstance(message, StateChanged))
    assert (state.kind, state.waits_for) == ("elsewhere", (2,))
    asking = [any(isinstance(message, StillWaiting) for message in c._mailbox.posted) for c in agents]
    assert asking == [False, True, False]
