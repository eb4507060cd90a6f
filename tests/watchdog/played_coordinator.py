"""A coordinator that is played: messages and times go in, messages come out."""

from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.programs.ir import Loop, Operation
from distdl_jax.watchdog.watch.coordinator import Coordinator
from distdl_jax.watchdog.watch.messages import Answer, Detail, Question, Say, Wait

LIMITS = TimeLimits(100.0, 1000.0)


class Played:
    """A coordinator, and what the workers do."""

    def __init__(self, states, plan=None, limits=LIMITS):
        self.states, self.details, self.waits = states, {}, {}
        self.coordinator = Coordinator(tuple(range(len(states))), limits)
        if plan is not None:
            self.coordinator.remember("f", plan)
        for worker, state in states.items():
            assert self.hear(Answer(worker, state)) == []

    def hear(self, message, now=0.0):
        return self.coordinator.hear(message, now)

    def tick(self, now=0.0):
        return self.coordinator.tick(now)

    def announces(self, worker, wait, now):
        """Let a worker announce a wait, and all be asked; return the number of the question."""
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
        """Return how many seconds of each worker's wait count, as the last question has found."""
        found = [event.what.split(" count")[0] for event in self.coordinator.events if "of which" in event.what]
        return float(found[-1].split("of which ")[1].split()[0])


def all_reduce(*workers, loop=False):
    operation = (Operation("allreduce", workers),)
    return {worker: (Loop(None, operation),) if loop else operation for worker in workers}


def ask(number, *workers):
    return [(worker, Question(number, in_full=True)) for worker in workers]


def to_all(message, size=2):
    return [(worker, message) for worker in range(size)]


def clock(played, seconds, kind="executing", episode=0, now=100.0):
    """Let worker 0 have waited for so long and all answer; return what follows, without lines about waits."""
    number = played.announces(0, Wait(kind, episode, seconds), now)
    played.answer(number, now=now)
    return [post for post in played.tick(now) if not is_about_a_wait(post[1])]


def is_about_a_wait(message):
    return isinstance(message, Say) and "The job goes on" in message.text
