"""Random jobs for the watchdog's simulation: healthy by construction, or with one fault, whose worker is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from virtual_job import FOREVER, Job, Network
from virtual_worker import Function, Steps, Worker

FAULTS = (
    "hangs",
    "hangs in a program",
    "is killed",
    "is stopped",
    "leaves",
    "fails",
    "skips a call",
    "calls another function",
    "traces alone",
    "agrees on something else",
    "loops less often",
)


@dataclass
class Step:
    """One step of a program: of what kind, for whom, and how long each takes before it (by worker)."""

    kind: str
    team: tuple[int, ...]
    before: dict[int, float]
    function: Function | None = None
    traces: frozenset[int] = frozenset()
    known: bool = False
    overlaps: bool = False
    compiles: dict[int, float] = field(default_factory=dict)


@dataclass
class Draw:
    """Everything that a job does: drawn from a seed, with the fault and the worker that has it, if any."""

    seed: int
    size: int
    limit: float
    steps: list[Step]
    fault: str | None = None
    faulty: int = 0
    at: int = 0
    compile_seconds: float = 0.0
    still_seconds: float = 0.0
    slowest: float = 0.0

    def __str__(self) -> str:
        what = f"worker {self.faulty} {self.fault} at step {self.at}" if self.fault else "healthy"
        lines = [f"seed {self.seed}: {self.size} workers, limit {self.limit:g} s, {what}"]
        for number, step in enumerate(self.steps):
            name = step.function.name if step.function else ""
            lines.append(f"  {number} {step.kind} {name} {step.team} traced by {sorted(step.traces)}")
        return "\n".join(lines)


def duration(random: Random, longest: float) -> float:
    """Most are short, from microseconds; some as long as is allowed."""
    return longest * 10 ** (-10 * random.random() ** 0.3) if random.random() < 0.5 else 1e-3 * random.random()


def team_of(random: Random, size: int) -> tuple[int, ...]:
    """Two workers or more, in any order."""
    return tuple(random.sample(range(size), random.choice((2, 2, size, random.randint(2, size)))))


def function_of(random: Random, size: int, name: str, longest: float) -> Function:
    """Some collectives and messages, the same for all workers."""
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
    return Function(name, parts, random.random() < 0.2)


def drawn(seed: int, faulty: bool) -> Draw:
    """The job of this seed."""
    random = Random(seed)
    size = random.choice(
        (2, 2, 3, 3, 4, 5, random.randint(2, 9), random.randint(2, 64 if random.random() < 0.1 else 6))
    )
    longest = 10 ** random.uniform(-3, 4)
    functions = [function_of(random, size, f"f{n}", longest) for n in range(random.randint(1, 3))]
    traced: set[str] = set()
    some_skip = random.random() < 0.3  # calls in which they have no part: then nothing is said of cleared caches
    steps: list[Step] = []
    for _ in range(random.randint(2, 8)):
        before = {worker: duration(random, longest) for worker in random.sample(range(size), min(size, 3))}
        kind = random.choice(("agree", "call", "call", "call", "plain", "local"))
        everyone = tuple(range(size))
        if kind != "call":
            step = Step(kind, team_of(random, size), before, overlaps=random.random() < 0.3)
            if kind == "plain":
                step.function = function_of(random, size, "plain", longest)
                step.team = everyone
        else:
            function = random.choice(functions)
            first = function.name not in traced
            traced.add(function.name)
            step = Step("call", everyone, before, function, overlaps=random.random() < 0.5)
            if first or random.random() < 0.1:
                step.traces = frozenset(everyone)
            elif not some_skip and random.random() < 0.2:  # a cache is cleared on some workers
                step.traces = frozenset(random.sample(range(size), random.randint(1, size)))
                step.known = True
            elif some_skip and random.random() < 0.4:  # nobody calls it who has no part in it
                step.team = tuple(
                    worker for worker in everyone if any(k != "compute" for k, _ in function.parts[worker])
                )
            step.compiles = {worker: duration(random, 3 * longest) for worker in step.traces}
        steps.append(step)
    draw = Draw(seed, size, 0.0, steps)
    parts = [seconds for f in functions for part in f.parts.values() for kind, seconds in part if kind == "compute"]
    parts += [
        seconds
        for step in steps
        if step.function is not None and step.function.name == "plain"
        for part in step.function.parts.values()
        for kind, seconds in part
        if kind == "compute"
    ]
    waits = sum(sum(step.before.values()) for step in steps) + len(steps) * sum(parts)
    draw.slowest = random.choice((1e-4, 1e-2, 1.0, longest))
    draw.compile_seconds = sum(sum(step.compiles.values()) for step in steps)
    # No wait of a healthy job is longer than all it computes, sends and stands still for; compilation doesn't count.
    waits += 6 * size * len(steps) * draw.slowest
    if faulty:
        draw.faulty, draw.at = random.randrange(size), random.randrange(len(steps))
        draw.fault = random.choice(FAULTS)
        # Where it can happen.
        kinds = {"calls another function": "call", "traces alone": "call", "agrees on something else": "agree"}
        for number, step in enumerate(steps):
            if step.kind == kinds.get(draw.fault, step.kind) and (step.kind != "agree" or draw.faulty in step.team):
                draw.at = number
                if random.random() < 0.3:
                    break
        draw.limit = max(10 + 2 * waits, draw.compile_seconds * size / 100)
    elif random.random() < 0.5:
        draw.still_seconds = random.choice((0.0, longest))
        draw.limit = max(10 + 1.1 * (waits + 3 * draw.still_seconds), draw.compile_seconds / 50)
    return draw


def job_of(draw: Draw) -> Job:
    """The job, about to begin."""
    random = Random(draw.seed + 1)
    network = Network(lambda: duration(random, draw.slowest), random.random() < 0.7)
    job = Job(draw.size, draw.limit, network, random)
    if draw.fault is None:
        stand_still(job, draw, random)
    for worker in job.workers:
        job.start(worker, program_of(worker, draw))
    return job


def stand_still(job: Job, draw: Draw, random: Random) -> None:
    """Watches without the interpreter's lock, stopped workers, and the whole job suspended."""
    soon = draw.limit / 20 if draw.limit else 10 ** random.uniform(-2, 4)
    if random.random() < 0.3:
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
    """What the worker does, its fault included."""
    rank, job = worker.rank, worker.job
    for number, step in enumerate(draw.steps):
        yield from worker.compute(step.before.get(rank, 0.0))
        fault = draw.fault if (number, rank) == (draw.at, draw.faulty) else None
        if fault is not None:
            handled = yield from faulty_step(worker, draw, step, fault)
            if handled:
                continue
        if rank in step.team:
            yield from healthy_step(worker, step)
    if draw.fault is not None and rank == draw.faulty and draw.at >= len(draw.steps):
        yield lambda: False
    yield from worker.leave()
    job.poke(worker)


def healthy_step(worker: Worker, step: Step) -> Steps:
    match step.kind:
        case "agree":
            yield from worker.agree(step.team, f"something in {step.team}")
        case "call":
            assert step.function is not None
            traces = worker.rank in step.traces
            seconds = step.compiles.get(worker.rank, 0.0)
            yield from worker.call(step.function, traces, step.known, seconds, step.overlaps)
        case "plain":
            assert step.function is not None
            yield from worker.plain(step.function.parts[worker.rank], step.overlaps)
        case "local":
            yield from worker.compile(step.before.get(worker.rank, 0.0))


def faulty_step(worker: Worker, draw: Draw, step: Step, fault: str) -> Iterator[Any]:
    """The fault, in place of the step or before it; whether the step is done with."""
    match fault:
        case "hangs":
            yield lambda: False
        case "hangs in a program":
            yield from worker.plain([("compute", FOREVER)], False)
        case "is killed":
            worker.dead_at = worker.job.now
            yield lambda: False
        case "is stopped":
            worker.whole.spans.append((worker.job.now, FOREVER))
            yield 1e-6
        case "leaves":
            yield from worker.leave()
            yield lambda: False
        case "fails":
            yield from worker.leave(3)
            yield lambda: False
        case "skips a call":
            return True
        case "calls another function" if step.kind == "call":
            others = [
                s for s in draw.steps[: draw.at] if s.function and s.kind == "call" and s.function != step.function
            ]
            if others:
                yield from worker.call(others[0].function, False, False, 0.0, step.overlaps)
                return True
        case "traces alone" if step.kind == "call" and step.function is not None and worker.job.plans:
            yield from worker.call(step.function, True, False, 0.0, step.overlaps)
            return True
        case "agrees on something else" if step.kind == "agree" and worker.rank in step.team:
            yield from worker.agree(step.team, "something else")
            return True
        case "loops less often" if step.function is not None and step.kind == "plain":
            parts = step.function.parts[worker.rank]
            yield from worker.plain(parts[:-1], step.overlaps)
            return True
    return False
