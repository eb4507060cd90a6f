"""The watch of a job in virtual time: the real agents of each world, and their messages."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from distdl_jax.watchdog.watch.agent import Agent
from distdl_jax.watchdog.watch.call_log import Calls
from distdl_jax.watchdog.watch.coordinator import COORDINATOR
from distdl_jax.watchdog.watch.deadlock import different_earlier_calls
from distdl_jax.watchdog.watch.dependencies import takes_all
from distdl_jax.watchdog.watch.messages import EndJob, Fail, Posts, Say

if TYPE_CHECKING:
    from virtual_job import Job
    from virtual_worker import Function, Worker

FOREVER = 1e12
TURN = 0.05  # seconds between two turns of a watch


class World:
    """Those workers of a job that have a communicator; `members`: their numbers in the job, by rank in this world."""

    def __init__(self, job: Job, members: tuple[int, ...]) -> None:
        self.job, self.members = job, members
        self.watches = [Watch(self, job.workers[member], rank) for rank, member in enumerate(members)]
        self.counted: set[str] = set()  # the functions whose calls count
        self._agreed = 0

    def agreed_number(self, watch: Watch, function: Function) -> int:
        """Return the number of the call on whose plan all have agreed, by the first worker; 0 where none counts."""
        if watch.rank == COORDINATOR:
            earlier = {watch.rank: watch.calls.earlier() for watch in self.watches}
            if (different := different_earlier_calls(function.name, earlier)) is not None:
                text, about = different
                self.job.end(text, tuple(self.members[worker] for worker in about))  # all raise it
            programs = function.programs()
            watch.remember(function.name, programs)
            self._agreed = 0
            if takes_all(programs):
                self._agreed = 1 + max(w.calls.number - w.calls.inside for w in self.watches)
                self.counted.add(function.name)
        # The first worker has all of it, the others its answer: one number for all.
        return self._agreed


class Watch(Agent):
    """The agent of one worker in one world, which is its own mailbox, and the channel of its agreements."""

    def __init__(self, world: World, worker: Worker, rank: int) -> None:
        super().__init__(self, rank, world.members, world.job.limits)
        self.world, self.worker, self.rank = world, worker, rank
        self.channel, self.monitor, self._status = self, self, worker  # type: ignore[assignment]
        self._ends_at = FOREVER  # it ends the job, not the process
        self.sent: dict[int, int] = defaultdict(int)
        self.received: dict[int, int] = defaultdict(int)
        self.arrived: list[tuple[int, str, Calls]] = []
        self.unread: dict[int, list[tuple[str, Calls]]] = defaultdict(list)
        self._inbox: deque[Any] = deque()
        self._turn_at = FOREVER

    # --- turns: only those in which there is something to do ---

    def look_soon(self) -> None:
        job = self.world.job
        self._look_at(job.now + TURN * job.random.random())

    def _look_at(self, time: float) -> None:
        if time < self._turn_at:
            self._turn_at = time
            self.world.job.at(time, lambda: self._turn() if self._turn_at == time else None, watch=True)

    def _turn(self) -> None:
        """Take an agent's turn: hear all that has arrived, look at the worker, then let the coordinator decide."""
        self._turn_at = FOREVER
        job, worker = self.world.job, self.worker
        if job.now >= worker.dead_at:
            return
        if (time := max(worker.watch.until(job.now), worker.whole.until(job.now))) > job.now:
            self._look_at(time)
            return
        now = worker.awake()
        self.turn(worker.sample(), now)
        if (wakes := self._core.wakes_at(now)) < FOREVER:
            self._look_at(job.now + max(wakes - now, 0.0) + TURN * job.random.random())

    # --- messages ---

    def post(self, message: Any, to: int) -> None:
        job, other = self.world.job, self.world.watches[to]

        def arrive() -> None:
            other._inbox.append(message)
            other.look_soon()

        job.at(job.arrives((self.world, "watch", self.rank, to)), arrive, watch=True)

    def next(self) -> tuple[int, Any] | None:
        if not self._inbox:
            return None
        self.world.job.poke(self.worker, watch=True)  # it may be told to go on
        return COORDINATOR, self._inbox.popleft()

    def _do(self, posts: Posts) -> None:
        job = self.world.job
        for rank, message in posts:
            if isinstance(message, EndJob | Fail):
                job.end(message.text, message.about)
            if isinstance(message, Say) and rank == self.rank:
                job.said.append((job.now, message.text))
            else:
                self.post(message, rank)
        if (end := self._core.reporter.end) is not None:
            job.end(end.text, (self.members[COORDINATOR],))  # the coordinator is silent

    def tell(self, worker: int, label: str) -> None:
        """Send a message of an agreement."""
        self.sent[worker] += 1
        job, other, message = self.world.job, self.world.watches[worker], (self.rank, label, self.calls.summary())

        def arrive() -> None:
            other.arrived.append(message)
            job.poke(other.worker)

        job.at(job.arrives((self.world, "agreement", self.rank, worker)), arrive)
