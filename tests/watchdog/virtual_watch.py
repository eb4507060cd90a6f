"""The watch of a job in virtual time: the real coordinator of each world, the real reporters, and their messages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdl_jax.watchdog.watch.call_log import CallLog, Calls
from distdl_jax.watchdog.watch.coordinator import COORDINATOR
from distdl_jax.watchdog.watch.core import Core, Facts
from distdl_jax.watchdog.watch.deadlock import State, different_earlier_calls
from distdl_jax.watchdog.watch.dependencies import takes_all
from distdl_jax.watchdog.watch.messages import Detail, EndJob, Fail, Say

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
            earlier = {watch.rank: watch.log.earlier() for watch in self.watches}
            if (different := different_earlier_calls(function.name, earlier)) is not None:
                text, about = different
                self.job.end(text, tuple(self.members[worker] for worker in about))  # all raise it
            programs = function.programs()
            watch.core.coordinator.remember(function.name, programs)
            self._agreed = 0
            if takes_all(programs):
                self._agreed = 1 + max(w.log.number - w.log.inside for w in self.watches)
                self.counted.add(function.name)
        # The first worker has all of it, the others its answer: one number for all.
        return self._agreed


class Watch:
    """One worker's in one world: what it can see, and what has arrived for it since its last turn."""

    def __init__(self, world: World, worker: Worker, rank: int) -> None:
        self.world, self.worker, self.rank = world, worker, rank
        self.log = CallLog()
        self.core = Core(rank, world.members, world.job.limits)
        self.agreement: State | None = None
        self.sent: dict[int, int] = defaultdict(int)
        self.received: dict[int, int] = defaultdict(int)
        self.arrived: list[tuple[int, str, Calls]] = []
        self.unread: dict[int, list[tuple[str, Calls]]] = defaultdict(list)
        self._done = 0
        self._inbox: deque[Any] = deque()
        self._turn_at = FOREVER

    # --- what can be seen ---

    def _facts(self) -> Facts:
        worker = self.worker
        if not worker.busy:
            self._done = max(self._done, self.log.ended())
        program = worker.program if worker.program_of is self.log else 0
        calls = self.log.summary(self._done, any(question.in_full for question in self.core.reporter.questions))
        calls = replace(calls, passed=max(calls.passed, program), mixed=worker.mixed)
        detail = Detail(worker.compiled_ago(), dict(self.sent), dict(self.received))
        agreement = self._agreement()
        if worker.left is not None:
            state = State("left", status=worker.left)
        elif agreement is not None:
            state = agreement
        elif worker.run:
            state = State("executing", episode=worker.run, program=program, function=worker.function)
        else:
            state = State("compiling" if worker.compiles else "running")
        return Facts(replace(state, calls=calls), worker.run, self.is_covered(), detail)

    def is_covered(self) -> bool:
        """Return whether another world of the worker has all workers of this one; of equal worlds the first does."""
        worlds, mine = list(self.worker.watches), set(self.world.members)
        place = worlds.index(self.world)
        return any(
            mine < set(other.members) or (mine == set(other.members) and before < place)
            for before, other in enumerate(worlds)
        )

    def watches(self, team: Sequence[int]) -> bool:
        """Return whether this world's timeout counts for a wait of these workers of the job."""
        return not self.is_covered() and set(self.world.members) >= set(team)

    def _agreement(self) -> State | None:
        """Return what this world sees of another world's agreement."""
        if self.agreement is not None:
            return self.agreement
        for world, watch in self.worker.watches.items():
            if (other := watch.agreement) is not None:
                waits_for = self._here(world.members, [world.members[worker] for worker in other.waits_for])
                return replace(other, waits_for=waits_for, kind="elsewhere")
        if self.worker.opening is None:
            return None
        number, others = self.worker.opening
        return State("elsewhere", "", "the first partition", self._here(others, others), number)

    def _here(self, team: Sequence[int], workers: Sequence[int]) -> tuple[int, ...]:
        members = self.world.members
        return tuple(map(members.index, workers)) if set(members) >= set(team) else ()

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
        job, worker, world = self.world.job, self.worker, self.world
        if job.now >= worker.dead_at:
            return
        if (time := max(worker.watch.until(job.now), worker.whole.until(job.now))) > job.now:
            self._look_at(time)
            return
        now = worker.awake()
        while self._inbox:
            message = self._inbox.popleft()
            self._post_all(self.core.hear(message, now))
            job.poke(worker, watch=True)  # it may be told to go on
        self._post_all(self.core.turn(self._facts(), now))
        if (end := self.core.reporter.end) is not None:
            job.end(end.text, (world.members[COORDINATOR],))  # the coordinator is silent
        if (wakes := self.core.wakes_at(now)) < FOREVER:
            self._look_at(job.now + max(wakes - now, 0.0) + TURN * job.random.random())

    # --- messages ---

    def post(self, message: Any, to: int) -> None:
        job, other = self.world.job, self.world.watches[to]

        def arrive() -> None:
            other._inbox.append(message)
            other.look_soon()

        job.at(job.arrives((self.world, "watch", self.rank, to)), arrive, watch=True)

    def _post_all(self, posts: Any) -> None:
        for rank, message in posts:
            if isinstance(message, EndJob | Fail):
                self.world.job.end(message.text, message.about)
            if isinstance(message, Say) and rank == self.rank:
                self.world.job.said.append((self.world.job.now, message.text))
            else:
                self.post(message, rank)

    def tell(self, worker: int, label: str) -> None:
        """Send a message of an agreement."""
        self.sent[worker] += 1
        job, other, message = self.world.job, self.world.watches[worker], (self.rank, label, self.log.summary())

        def arrive() -> None:
            other.arrived.append(message)
            job.poke(other.worker)

        job.at(job.arrives((self.world, "agreement", self.rank, worker)), arrive)
