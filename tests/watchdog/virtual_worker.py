"""One worker of a job in virtual time: what its program does, and what its watch can see of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from virtual_watch import FOREVER, TURN, Watch, World

from distdl_jax.plans.trees import gathered
from distdl_jax.watchdog.programs.ir import Loop, Operation, Program
from distdl_jax.watchdog.watch.call_log import Calls
from distdl_jax.watchdog.watch.clock import LONGEST_TURN
from distdl_jax.watchdog.watch.coordinator import COORDINATOR
from distdl_jax.watchdog.watch.messages import CannotAgree
from distdl_jax.watchdog.watch.status import Waiting
from distdl_jax.watchdog.watch.thread_sampler import Run, Sample

if TYPE_CHECKING:
    from virtual_job import Job

Steps = Generator[Any, None, None]


@dataclass(frozen=True)
class Function:
    """A checked function: each worker's program, the same in plain words, and whether only the data say how long it is.

    - `world`: of which of the job's worlds it is.
    - `parts`: by worker of that world, ("all", team), ("send", worker), ("receive", worker) or ("compute", seconds).
    """

    name: str
    world: int
    parts: dict[int, list[tuple[str, Any]]]
    depends_on_data: bool = False

    def programs(self) -> dict[int, Program]:
        programs: dict[int, Program] = {}
        for worker, part in self.parts.items():
            items: list[Operation | Loop] = []
            for kind, value in part:
                match kind:
                    case "all":
                        items.append(Operation("allreduce", value))
                    case "send":
                        items.append(Operation("send", (), dest=value))
                    case "receive":
                        items.append(Operation("recv", (), source=value))
            programs[worker] = (Loop(None, tuple(items)),) if self.depends_on_data and items else tuple(items)
        return programs


@dataclass
class Still:
    """When a watch, or a worker altogether, does not run: from, to."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    def until(self, time: float) -> float:
        """Return when the worker runs again."""
        for begin, end in self.spans:
            if begin <= time < end:
                time = end
        return time

    def awake(self, time: float) -> float:
        """Return for how long the worker has run, by the watch's clock."""
        lost = (max(0.0, min(time, end) - begin - LONGEST_TURN) for begin, end in self.spans if begin < time)
        return time - sum(lost)


class Worker:
    """One worker: what its watches can see, and what the program waits for."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.watches: dict[World, Watch] = {}
        self.episodes = self.runs = 0
        self.run: Run | None = None
        self.waiting: Waiting | None = None
        self.mixed = False
        self.compiles = False
        self.compiled_at = -FOREVER
        self.left: int | None = None
        self.dead_at = FOREVER
        self.busy = False
        self.watch, self.whole = Still(), Still()
        self.blocked: list[tuple[Callable[[], bool], Steps]] = []

    def is_at_work(self) -> bool:
        """Return whether the worker neither waits for others nor has left."""
        return self.left is None and self.run is None and self.waiting is None

    def is_in_an_unknown_program(self) -> bool:
        """Return whether one of the worker's largest worlds does not know what its program waits for."""
        largest = [watch.calls for watch in self.watches.values() if not watch.is_covered]
        run = self.run
        return run is not None and (not run.call or self.mixed or any(run.log is not log for log in largest))

    def tokens_pending(self) -> bool:
        return self.busy

    def sample(self) -> Sample:
        """Return what its watchdog sees of it."""
        return Sample(self.run, float(self.compiles), 0.0 if self.compiles else self.awake() - self.compiled_at)

    def awake(self) -> float:
        return self.watch.awake(self.job.now) + self.whole.awake(self.job.now) - self.job.now

    def _look_soon(self) -> None:
        for watch in self.watches.values():
            watch.look_soon()

    # --- what the program does; generators yield seconds, or what they wait for ---

    def compute(self, seconds: float) -> Steps:
        yield seconds

    def compile(self, seconds: float) -> Steps:
        self.compiles = True
        yield seconds
        self.compiles, self.compiled_at = False, self.awake()
        self._look_soon()

    def agree(self, watch: Watch, team: Sequence[int], label: str) -> Steps:
        if len(team) == 1:
            return
        parent, children = gathered(team, watch.rank)
        self._wait(watch, label, children or (parent,))
        yield from self._gather(watch, label, children)
        if parent is not None:
            self._still_waits((parent,))
            self._look_soon()
            watch.tell(parent, label)
            yield from self._gather(watch, label, [parent])
        for worker in children:
            watch.tell(worker, label)
        self.waiting = None
        self._look_soon()

    def _wait(self, watch: Watch | None, label: str, waits_for: tuple[int, ...]) -> None:
        self.episodes += 1
        self.waiting = Waiting(self.episodes, watch, label, "", waits_for, 0)
        self._look_soon()

    def _still_waits(self, waits_for: tuple[int, ...]) -> None:
        assert self.waiting is not None
        self.waiting = replace(self.waiting, waits_for=waits_for)

    def open(self, team: tuple[int, ...]) -> Steps:
        """Open one more world, with these workers of the job."""
        self._wait(None, "the first partition", tuple(worker for worker in team if worker != self.rank))
        if not any(watch.watches(team) for watch in self.watches.values()):
            self._time_opening(self.episodes, self.awake())
        yield self.job.meet(self, team)
        self.waiting = None
        self._look_soon()

    def _time_opening(self, number: int, began: float) -> None:
        """Time the opening of a world that no world watches, as the watchdog's thread does."""
        limit, job = self.job.limits.waiting, self.job
        if not limit or self.waiting is None or self.waiting.number != number or job.now >= self.dead_at:
            return
        if (left := began + limit - self.awake()) <= 0:
            job.end("A worker has waited for others to come to the first partition", ())
        job.at(job.now + max(left, TURN), lambda: self._time_opening(number, began), watch=True)

    def _gather(self, watch: Watch, label: str, sources: Iterable[int]) -> Steps:
        """Wait for a message of each of `sources`."""
        silent = list(sources)
        while silent:
            self._still_waits(tuple(silent))
            yield lambda: _has_read(watch, silent)
            source = next(worker for worker in silent if _next(watch, worker))
            other_label, _ = watch.unread[source].pop(0)
            if other_label != label:
                text = f"worker {watch.rank} is about to run {label}, but worker {source} {other_label}"
                watch.post(CannotAgree(0, text, (watch.rank, source)), COORDINATOR)
                yield lambda: False  # all raise
            silent.remove(source)

    def call(
        self,
        function: Function,
        traces: bool,
        compiles: float,
        overlaps: bool,
        raises: bool = False,
        pause: float = 0.0,
    ) -> Steps:
        """Call a checked function, tracing it or not.

        - `overlaps`: its program goes on beside what comes next.
        - `raises`: it raises first, before it does anything; that is caught, and it is called again.
        - `pause`: seconds between its agreements, and before its program.
        """
        world = self.job.worlds[function.world]
        watch, part = self.watches[world], function.parts[self.watches[world].rank]
        log = watch.calls
        if raises and function.name in world.counted:
            log.begin(function.name)
            yield pause
            log.undo()
        if function.name in world.counted:
            log.begin(function.name)
        if traces:
            log.tracing = True
            for team in dict.fromkeys(value for kind, value in part if kind == "all"):
                yield from self.agree(watch, team, f"a sum in {function.name}")
                yield pause
            yield from self.agree(watch, tuple(range(len(world.members))), f"the plan of {function.name}")
            if number := world.agreed_number(watch, function):
                log.agree(number, function.name)
            yield pause
            log.tracing = False
        yield from self.compile(compiles)
        number = log.number if log.inside else 0
        communicates = any(kind != "compute" for kind, _ in part)
        self.mixed = self.mixed or (not number and communicates)
        yield from self._dispatch(watch, function.name, part, number, overlaps)
        if log.inside:
            log.end(True)
        log.tracing = False

    def plain(self, watch: Watch, parts: list[tuple[str, Any]], overlaps: bool) -> Steps:
        """Run a program of jax.jit, among workers of a world."""
        self.mixed = self.mixed or any(kind != "compute" for kind, _ in parts)
        yield from self._dispatch(watch, "", parts, 0, overlaps)

    def _dispatch(self, watch: Watch, name: str, parts: list[tuple[str, Any]], number: int, overlaps: bool) -> Steps:
        yield lambda: not self.busy
        self.busy = True
        program = self._execute(watch, name, parts, number)
        if overlaps:
            self.job.start(self, program)
        else:
            yield from program

    def _execute(self, watch: Watch, name: str, parts: list[tuple[str, Any]], number: int) -> Steps:
        self.runs += 1
        self.run = Run(self.runs, 0.0, 0, None, [], function=name, log=watch.calls, call=number)
        self._look_soon()
        for kind, value in parts:
            match kind:
                case "all":
                    yield self.job.join(watch, value)
                case "send":
                    yield self.job.send(watch, value)
                case "receive":
                    yield self.job.receive(watch, value)
                case "compute":
                    yield value
        self.run = None
        self.busy = False
        self.job.poke(self)
        self._look_soon()

    def leave(self, status: int = 0) -> Steps:
        yield lambda: not self.busy
        self.left = status
        for watch in self.watches.values():
            watch._left = status
        self._look_soon()


# --- agreements, as the control channel has them ---


def _has_read(watch: Watch, sources: Sequence[int]) -> bool:
    for source, label, calls in watch.arrived:
        watch.received[source] += 1
        watch.unread[source].append((label, calls))
    watch.arrived.clear()
    mine = watch.calls.summary()
    for source in sources:
        watch.unread[source] = [message for message in watch.unread[source] if not mine.has_passed(message[1])]
    return any(_next(watch, source) for source in sources)


def _next(watch: Watch, source: int) -> tuple[str, Calls] | None:
    mine, unread = watch.calls.summary(), watch.unread[source]
    return unread[0] if unread and not unread[0][1].has_passed(mine) else None
