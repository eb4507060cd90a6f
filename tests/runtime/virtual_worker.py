"""One worker of a job in virtual time: what its program does, and what its watch can see of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distdl_jax.programs.ir import Loop, Operation, Program
from distdl_jax.watchdog.calls import CallLog, Calls
from distdl_jax.watchdog.clock import LONGEST_TURN
from distdl_jax.watchdog.messages import CannotAgree, Detail
from distdl_jax.watchdog.reporter import Agreement, Facts, Reporter

if TYPE_CHECKING:
    from virtual_job import Job

FOREVER = 1e12

Steps = Generator[Any, None, None]


@dataclass(frozen=True)
class Function:
    """A checked function: each worker's program, the same in plain words, and whether only the data say how long it is.

    - `parts`: by worker, ("all", team), ("send", worker), ("receive", worker) or ("compute", seconds).
    """

    name: str
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
        """When it runs again."""
        for begin, end in self.spans:
            if begin <= time < end:
                time = end
        return time

    def awake(self, time: float) -> float:
        """For how long it has run, as the watch's clock has it."""
        lost = (max(0.0, min(time, end) - begin - LONGEST_TURN) for begin, end in self.spans if begin < time)
        return time - sum(lost)


class Worker:
    """One worker: what its watch can see, and what the program waits for."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.log = CallLog()
        self.reporter = Reporter(rank, job.limits.waiting)
        self.agreement: Agreement | None = None
        self.agreements = self.runs = self.run = self.program = 0
        self.compiling_since: float | None = None
        self.compiled = 0.0
        self.left: int | None = None
        self.dead_at = FOREVER
        self.done = 0
        self.busy = False
        self.arrived: list[tuple[int, str, Calls]] = []
        self.unread: dict[int, list[tuple[str, Calls]]] = defaultdict(list)
        self.sent: dict[int, int] = defaultdict(int)
        self.received: dict[int, int] = defaultdict(int)
        self.watch, self.whole = Still(), Still()
        self.turn_at = FOREVER
        self.blocked: list[tuple[Callable[[], bool], Steps]] = []

    # --- what the watch sees ---

    def facts(self) -> Facts:
        if not self.busy:
            self.done = max(self.done, self.log.passed)
        calls = self.log.told(self.done)
        passed = max(calls.passed, self.program)
        compiles = self.compiling_since is not None
        return Facts(replace(calls, passed=passed), self.agreement, self.run, self.program, "", compiles, "", self.left)

    def detail(self) -> Detail:
        now = self.whole.awake(self.job.now)
        compiled = self.compiled + (0.0 if self.compiling_since is None else now - self.compiling_since)
        return Detail(self.log.window(), dict(self.sent), dict(self.received), compiled)

    # --- what the program does; generators yield seconds, or what they wait for ---

    def compute(self, seconds: float) -> Steps:
        yield seconds

    def compile(self, seconds: float) -> Steps:
        self.compiling_since = self.whole.awake(self.job.now)
        yield seconds
        self.compiled += self.whole.awake(self.job.now) - self.compiling_since
        self.compiling_since = None
        self.job.look_soon(self)

    def agree(self, team: Sequence[int], purpose: str) -> Steps:
        if len(team) == 1 or self._is_replayed():
            return
        hub, others = team[0], list(team[1:])
        waits_for = tuple(others) if self.rank == hub else (hub,)
        self.agreements += 1
        self.agreement = Agreement(self.agreements, purpose, "", waits_for)
        self.job.look_soon(self)
        if self.rank == hub:
            while others:
                yield lambda: self._has_read(others) or self._is_replayed()
                if self._is_replayed():
                    break
                source = next(worker for worker in others if self._next(worker))
                if not self._take(source, purpose):
                    yield lambda: False  # all raise
                others.remove(source)
                self.agreement = replace(self.agreement, waits_for=tuple(others))
            else:
                for worker in team[1:]:
                    self.send(worker, purpose)
        else:
            self.send(hub, purpose)
            yield lambda: self._has_read([hub]) or self._is_replayed()
            if not self._is_replayed() and not self._take(hub, purpose):
                yield lambda: False
        self.agreement = None
        self.job.look_soon(self)

    def send(self, worker: int, purpose: str) -> None:
        self.sent[worker] += 1
        self.job.deliver_agreement(self.rank, worker, (purpose, self.log.told(0)))

    def _has_read(self, sources: Sequence[int]) -> bool:
        for source, purpose, calls in self.arrived:
            self.received[source] += 1
            self.unread[source].append((purpose, calls))
        self.arrived.clear()
        mine = self.log.told(0)
        for source in sources:  # as the control channel has it
            self.unread[source] = [told for told in self.unread[source] if not mine.has_passed(told[1])]
        return any(self._next(source) for source in sources)

    def _next(self, source: int) -> tuple[str, Calls] | None:
        mine, unread = self.log.told(0), self.unread[source]
        return unread[0] if unread and not unread[0][1].has_passed(mine) else None

    def _take(self, source: int, purpose: str) -> bool:
        theirs, _ = self.unread[source].pop(0)
        if theirs != purpose:
            text = f"worker {self.rank} is about to run {purpose}, but worker {source} {theirs}"
            self.job.to_coordinator(self, CannotAgree(0, text, (self.rank, source)))
        return theirs == purpose

    def _is_replayed(self) -> bool:
        log = self.log
        return log.inside and log.tracing and log.agreed_before and self.reporter.replay >= log.number

    def call(self, function: Function, traces: bool, known: bool, compiles: float, overlaps: bool) -> Steps:
        """Call a checked function, tracing it or not; `overlaps`: its program goes on beside what comes next."""
        if function.name in self.job.plans:
            self.log.begin(function.name)
        if traces and not (known and not self.log.inside):  # what counts nowhere is replayed without a question
            self.log.agreed_before, self.log.tracing = known, True
            teams = dict.fromkeys(value for kind, value in function.parts[self.rank] if kind == "all")
            for team in teams:
                yield from self.agree(team, f"a sum in {function.name}")
            yield from self.agree(tuple(range(self.job.size)), f"the plan of {function.name}")
            # The first worker has all of it, the others its answer: one number for all.
            if not self._is_replayed() and (number := self.job.agreed_number(self, function)):
                self.log.agree(number, function.name)
            self.log.tracing = False
        yield from self.compile(compiles)
        number = self.log.number if self.log.inside else 0
        self.log.mixed = self.log.mixed or (
            not number and any(kind != "compute" for kind, _ in function.parts[self.rank])
        )
        yield lambda: not self.busy
        self.busy = True
        program = self._execute(function.parts[self.rank], number)
        if overlaps:
            self.job.start(self, program)
        else:
            yield from program
        if self.log.inside:
            self.log.end(True)
        self.log.tracing = False

    def plain(self, parts: list[tuple[str, Any]], overlaps: bool) -> Steps:
        """A program of jax.jit."""
        self.log.mixed = self.log.mixed or any(kind != "compute" for kind, _ in parts)
        yield lambda: not self.busy
        self.busy = True
        if overlaps:
            self.job.start(self, self._execute(parts, 0))
        else:
            yield from self._execute(parts, 0)

    def _execute(self, parts: list[tuple[str, Any]], number: int) -> Steps:
        self.runs += 1
        self.run, self.program = self.runs, number
        self.job.look_soon(self)
        for kind, value in parts:
            match kind:
                case "all":
                    yield self.job.join(self, value)
                case "send":
                    yield self.job.send(self, value)
                case "receive":
                    yield self.job.receive(self, value)
                case "compute":
                    yield value
        self.run = self.program = 0
        self.busy = False
        self.job.poke(self)
        self.job.look_soon(self)

    def leave(self, status: int = 0) -> Steps:
        yield lambda: not self.busy
        self.left = status
        self.job.look_soon(self)
