"""Random jobs for the watchdog's simulation: healthy by construction, or with one fault, whose worker is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from virtual_job import Job, Network
from virtual_watch import FOREVER
from virtual_worker import Function, Steps, Worker

from distdl_jax.settings import TimeLimits

ANYWHERE = ("hangs", "hangs in a program", "is killed", "is stopped", "leaves", "fails")
FAULTS = (
    *ANYWHERE,
    "skips a call",
    "calls another function",
    "traces alone",
    "agrees on something else",
    "loops less often",
)

STOPS = ("hangs", "is killed", "is stopped", "fails")
"""Those with which a worker just does nothing more."""


@dataclass
class Step:
    """One step of a program: of what kind, in which world, for whom of it, and how long each takes before it.

    - `before`, `pauses`, `compiles`: seconds before it, in the middle of it, and of compilation, by number in the job.
    - `traces`, `retries`: who traces the function, and who has an error in it that it catches, by the same.
    - `overlaps`: whether its program goes on beside the next steps.
    """

    kind: str
    world: int
    team: tuple[int, ...]
    before: dict[int, float]
    function: Function | None = None
    traces: frozenset[int] = frozenset()
    overlaps: bool = False
    compiles: dict[int, float] = field(default_factory=dict)
    pauses: dict[int, float] = field(default_factory=dict)
    retries: frozenset[int] = frozenset()

    def workers(self, worlds: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the workers that take part, by number in the job."""
        return self.team if self.kind == "open" else tuple(worlds[self.world][rank] for rank in self.team)

    def computes(self) -> float:
        """Return the seconds in its program, of all workers."""
        parts = () if self.function is None else self.function.parts.values()
        return sum(seconds for part in parts for kind, seconds in part if kind == "compute")


@dataclass
class Draw:
    """Everything that a job does: drawn from a seed, with the fault and the worker that has it, if any.

    - `worlds`: who has which communicator, all workers the first; but in a job that is `apart`, none has all.
    - `longer`: how many times as long as the clock's limit workers may be in programs together.
    - `still_seconds`: for how long a watch or a worker stands still, at most; `slowest`: how long a message takes.
    """

    seed: int
    size: int
    limit: float
    steps: list[Step]
    worlds: list[tuple[int, ...]]
    apart: bool = False
    fault: str | None = None
    faulty: int = 0
    at: int = 0
    fault_seconds: float = 0.0
    longer: float = 1.0
    compile_seconds: float = 0.0
    still_seconds: float = 0.0
    slowest: float = 0.0

    def __str__(self) -> str:
        what = f"worker {self.faulty} {self.fault} at step {self.at}" if self.fault else "healthy"
        lines = [f"seed {self.seed}: {self.size} workers, worlds {self.worlds[1:]}, limit {self.limit:g} s, {what}"]
        for number, step in enumerate(self.steps):
            name = step.function.name if step.function else ""
            lines.append(f"  {number} {step.kind} {name} {step.world}: {step.team} traced by {sorted(step.traces)}")
        return "\n".join(lines)


def duration(random: Random, longest: float) -> float:
    """Draw a duration: mostly short, from microseconds; sometimes as long as is allowed."""
    return longest * 10 ** (-10 * random.random() ** 0.3) if random.random() < 0.5 else 1e-3 * random.random()


def some(random: Random, size: int, most: int) -> list[int]:
    """Draw some workers, now and then all."""
    return random.sample(range(size), size if random.random() < 0.1 else min(size, most))


def team_of(random: Random, size: int) -> tuple[int, ...]:
    """Draw two workers or more, in any order."""
    return tuple(random.sample(range(size), random.choice((2, 2, size, random.randint(2, size)))))


def overlapping_worlds(random: Random, size: int) -> list[tuple[int, ...]]:
    """Draw communicators none of which has all workers: most share workers, some don't, some lie within another."""
    worlds: list[tuple[int, ...]] = []
    longest, least = random.choice((2, 3, size)), random.choice((0, 1, 1, 1))  # a chain, say
    while set().union(*worlds) != set(range(size)):
        others = [w for w in range(size) if not any(w in world for world in worlds)]
        known = [w for w in range(size) if w not in others]
        common = min(len(known), random.randint(least, 2))
        team = random.sample(others, random.randint(1, min(longest, len(others)))) + random.sample(known, common)
        if 1 < len(team) < size:
            worlds.append(tuple(random.sample(team, len(team))))
        elif len(others) < 2:
            worlds.append((*others, random.choice(known)))
    while random.random() < 0.2:
        world = random.choice(worlds)
        worlds.append(tuple(random.sample(world, random.randint(2, len(world)))))
    return random.sample(worlds, len(worlds))


def team_across(random: Random, worlds: list[tuple[int, ...]], first: int) -> tuple[int, ...]:
    """Draw two workers or more of a communicator, and of another one that has some of its workers."""
    common = [world for world in worlds if set(world) & set(worlds[first])]
    known = sorted({*worlds[first], *random.choice(common)})
    return tuple(random.sample(known, random.randint(2, len(known))))


def function_of(random: Random, world: int, size: int, name: str, longest: float) -> Function:
    """Draw some collectives and messages, the same for all workers."""
    parts: dict[int, list[tuple[str, Any]]] = {worker: [] for worker in range(size)}
    for _ in range(random.randint(1, 3)):
        for worker in random.sample(range(size), min(size, 2)):
            parts[worker].append(("compute", duration(random, longest)))
        team = tuple(sorted(team_of(random, size)))
        if random.random() < 0.5:
            team = random.choice((team, tuple(range(size))))
            for worker in team:
                parts[worker].append(("all", team))
        else:
            for source, dest in pairwise(team):
                parts[source].append(("send", dest))
                parts[dest].append(("receive", source))
    return Function(name, world, parts, random.random() < 0.2)


def drawn(seed: int, faulty: bool) -> Draw:
    """Return the job of this seed."""
    random, other, apart = Random(seed), Random(seed + 0.5), False
    size = random.choice((2, 2, 3, 3, 4, 5, random.randint(2, 9), random.randint(2, 9)))
    if random.random() < 0.08:
        size = random.choice((random.randint(10, 16), random.randint(10, 24), random.randint(25, 64)))
    longest = 10 ** random.uniform(-3, 4)
    worlds = [tuple(range(size))]
    while random.random() < 0.2:
        worlds.append(team_of(random, size))
    if overlapping := size > 2 and random.random() < 0.15:
        worlds = overlapping_worlds(random, size)
    if overlapping and not (apart := other.random() < 0.3):
        worlds.insert(0, tuple(range(size)))
    functions = [
        function_of(random, world := random.randrange(len(worlds)), len(worlds[world]), f"f{n}", longest)
        for n in range(random.randint(1, 3))
    ]
    traced: set[str] = set()
    compiles = random.choice((3, 200)) * longest if overlapping else 3 * longest
    some_skip = random.random() < 0.3  # calls in which they have no part: then no caches are cleared
    steps: list[Step] = []
    for _ in range(random.randint(2, 8)):
        before = {worker: duration(random, longest) for worker in some(random, size, 3)}
        kind = random.choice(("agree", "call", "call", "call", "plain", "local"))
        if kind == "call":
            steps.append(
                call_of(random, worlds, random.choice(functions), before, longest, compiles, traced, some_skip)
            )
            continue
        world = random.randrange(len(worlds)) if kind == "agree" or overlapping else 0
        step = Step(kind, world, team_of(random, len(worlds[world])), before, overlaps=random.random() < 0.3)
        if kind == "plain":
            step.function = function_of(random, world, len(worlds[world]), "plain", longest)
            step.team = tuple(range(len(worlds[world])))
        elif kind == "agree" and overlapping and other.random() < 0.4:
            step.kind, step.team = "open", team_across(other, worlds, world)
        steps.append(step)
    draw = Draw(seed, size, 0.0, steps, worlds, apart, longer=random.choice((1.0, 1.0, 8.0)))
    draw.slowest = random.choice((1e-4, 1e-2, 1.0, longest))
    draw.compile_seconds = sum(sum(step.compiles.values()) for step in steps)
    draw.still_seconds = random.choice((0.0, longest))
    waits = sum(sum(step.before.values()) + 8 * sum(step.pauses.values()) for step in steps)
    # Before a program waits that goes on beside others.
    waits += len(steps) * sum(step.computes() for step in steps)
    # No wait of a healthy job is longer than all it computes, sends and stands still for. Compilation counts only where
    # no communicator has all workers.
    waits += 6 * size * len(steps) * draw.slowest + 3 * draw.still_seconds + draw.compile_seconds * apart
    if faulty:
        choose_fault(random, draw)
        draw.limit = max(10 + 2 * waits, draw.compile_seconds * size / 100)
    elif random.random() < 0.5:
        draw.limit = max(10 + 1.1 * waits, draw.compile_seconds / 7)
    return draw


def call_of(
    random: Random,
    worlds: list[tuple[int, ...]],
    function: Function,
    before: dict[int, float],
    longest: float,
    compiles: float,
    traced: set[str],
    some_skip: bool,
) -> Step:
    """Draw a call of a function, which is traced the first time."""
    members = worlds[function.world]
    everyone = tuple(range(len(members)))
    first = function.name not in traced
    traced.add(function.name)
    step = Step("call", function.world, everyone, before, function, overlaps=random.random() < 0.5)
    if first or random.random() < 0.1:
        step.traces = frozenset(members)
    elif not some_skip and random.random() < 0.2:  # caches are cleared
        random.sample(members, random.randint(1, len(members)))
        step.traces = frozenset(members)
    elif some_skip and random.random() < 0.4:  # nobody calls it who has no part in it
        step.team = tuple(rank for rank in everyone if any(kind != "compute" for kind, _ in function.parts[rank]))
    step.compiles = {worker: duration(random, compiles) for worker in sorted(step.traces)}
    if random.random() < 0.3:
        step.pauses = {worker: duration(random, longest) for worker in random.sample(members, 2)}
    if random.random() < 0.1:
        step.retries = frozenset(random.sample(members, random.randint(1, len(members))))
    return step


def choose_fault(random: Random, draw: Draw) -> None:
    """Draw a fault that can happen, and where."""
    draw.faulty = random.randrange(draw.size)
    places = {fault: [*range(len(draw.steps))] if fault in ANYWHERE else [] for fault in FAULTS}
    called: set[str] = set()
    for number, step in enumerate(draw.steps):
        is_in = draw.faulty in step.workers(draw.worlds)
        name = step.function.name if step.function is not None and step.kind == "call" else ""
        for fault, can_be in {
            "skips a call": is_in and step.kind != "local",
            "calls another function": is_in and step.kind == "call" and bool(called - {name}),
            "traces alone": is_in and step.kind == "call" and name in called and not step.traces,
            "agrees on something else": is_in and step.kind == "agree",
            "loops less often": is_in and step.kind == "plain",
        }.items():
            if can_be:
                places[fault].append(number)
        if name and is_in:
            called.add(name)
    draw.fault = random.choice([fault for fault in FAULTS if places[fault]])
    draw.at = random.choice(places[draw.fault])
    # A worker that is killed or stopped is so at any moment.
    draw.fault_seconds = random.choice((0.0, duration(random, 1e3)))


def job_of(draw: Draw) -> Job:
    """Return the job, about to begin."""
    random = Random(draw.seed + 1)
    network = Network(lambda: duration(random, draw.slowest), random.random() < 0.7)
    job = Job(draw.size, TimeLimits(draw.limit, draw.longer * draw.limit), network, random, draw.worlds)
    stand_still(job, draw, random)
    for worker in job.workers:
        job.start(worker, program_of(worker, draw))
    return job


def stand_still(job: Job, draw: Draw, random: Random) -> None:
    """Draw watches without the interpreter's lock, stopped workers, and a suspension of the whole job."""
    soon = draw.limit / 20 if draw.limit else 10 ** random.uniform(-2, 4)
    if draw.fault is None and random.random() < 0.3:
        begin = random.uniform(0, soon)
        span = (begin, begin + 10 ** random.uniform(-1, 6))
        for worker in job.workers:
            worker.whole.spans.append(span)
        return
    longest = draw.still_seconds if draw.limit else 1e4
    for worker in random.sample(job.workers, min(2, draw.size)):
        begin = random.uniform(0, soon)
        random.choice((worker.watch, worker.whole)).spans.append((begin, begin + random.uniform(0, 1) * longest))


def program_of(worker: Worker, draw: Draw) -> Steps:
    """Return the worker's program, with its fault."""
    for number, step in enumerate(draw.steps):
        yield from worker.compute(step.before.get(worker.rank, 0.0))
        is_faulty = draw.fault is not None and (number, worker.rank) == (draw.at, draw.faulty)
        if is_faulty and (yield from faulty_step(worker, draw, step)):
            continue
        if worker.rank in step.workers(draw.worlds):
            yield from healthy_step(worker, step)
    yield from worker.leave()
    worker.job.poke(worker)


def healthy_step(worker: Worker, step: Step) -> Steps:
    if step.kind == "open":
        yield from worker.open(step.team)
        return
    watch = worker.watches[worker.job.worlds[step.world]]
    match step.kind:
        case "agree":
            yield from worker.agree(watch, step.team, f"something in {step.team}")
        case "call":
            assert step.function is not None
            traces, retries = worker.rank in step.traces, worker.rank in step.retries
            compiles, pause = step.compiles.get(worker.rank, 0.0), step.pauses.get(worker.rank, 0.0)
            yield from worker.call(step.function, traces, compiles, step.overlaps, retries, pause)
        case "plain":
            assert step.function is not None
            yield from worker.plain(watch, step.function.parts[watch.rank], step.overlaps)
        case "local":
            yield from worker.compile(step.before.get(worker.rank, 0.0))


def faulty_step(worker: Worker, draw: Draw, step: Step) -> Iterator[Any]:
    """Run the fault, in place of the step or before it; return whether the step is done with."""
    job, function = worker.job, step.function
    match draw.fault:
        case "hangs":
            yield lambda: False
        case "hangs in a program":
            yield from worker.plain(next(iter(worker.watches.values())), [("compute", FOREVER)], False)
        case "is killed":
            worker.dead_at = job.now + draw.fault_seconds
            if not draw.fault_seconds:
                yield lambda: False
        case "is stopped":
            worker.whole.spans.append((job.now + draw.fault_seconds, FOREVER))
            yield 1e-6
        case "leaves":
            yield from worker.leave()
            yield lambda: False
        case "fails":
            yield from worker.leave(3)
            yield lambda: False
        case "skips a call":
            return True
        case "calls another function":
            others = [s.function for s in draw.steps[: draw.at] if s.function and s.kind == "call"]
            mine = [f for f in others if f != function and worker.rank in draw.worlds[f.world]]
            if mine:
                yield from worker.call(mine[0], False, 0.0, step.overlaps)
                return True
        case "traces alone":
            assert function is not None
            yield from worker.call(function, True, 0.0, step.overlaps)
            return True
        case "agrees on something else":
            yield from worker.agree(worker.watches[job.worlds[step.world]], step.team, "something else")
            return True
        case "loops less often":
            assert function is not None
            watch = worker.watches[job.worlds[step.world]]
            yield from worker.plain(watch, function.parts[watch.rank][:-1], step.overlaps)
            return True
    return False
