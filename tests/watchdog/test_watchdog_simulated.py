"""The watchdog over many random jobs in virtual time (in a long run tens of thousands): real agents and coordinators.

1. No healthy job is ever ended, whatever takes how long, as long as the timeout that the user sets has not run out.
2. Every job with a fault that others wait for is ended, within the timeout.
3. Before the clock ends a job a line says who waits.
4. Who is named is at fault: see `misnamed` for what that can mean. (Not where no communicator has all workers: the
   coordinator of one knows nothing of waits in another.)

A failure says the job that was drawn, with its seed.
"""

from collections import deque
from functools import cache

import pytest
from launcher.settings import long_run
from random_jobs import STOPS, Draw, drawn, job_of
from virtual_job import Ended, Job

from distdl_jax.watchdog.watch import agent, thread

FOUND = {51158, 55474}  # in which a worker was misnamed, or nobody ended the job
RUNS = 50_000 if long_run() else 600  # of each kind
TAKES_LONG = frozenset() if long_run() else {6}  # half of the seconds of all 600: twenty workers wait for 80 days
BATCHES = 50 if long_run() else 5
SLACK = 150.0  # seconds: those concerned are asked again after pauses of up to a minute


@pytest.fixture(autouse=True)
def played_workers_have_no_stacks_and_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "main_line", str)
    monkeypatch.setattr(thread, "say_elsewhere", deque(maxlen=0))


def play(draw: Draw) -> tuple[str | None, Ended | None]:
    """Run the job; return what is wrong with how it ended, and how it did."""
    job = job_of(draw)
    ended = job.run()
    return failure(draw, job, ended), ended


@cache
def played(seed: int, faulty: bool) -> tuple[str | None, Ended | None]:
    """Run the job that is drawn."""
    return play(drawn(seed, faulty))


def failure(draw: Draw, job: Job, ended: Ended | None) -> str | None:
    """Return what is wrong with how the job ended; None where it did as it should."""
    # Who is not through.
    stands = {worker.rank for worker in job.workers if worker.left is None}
    if (wrong := untold(job, ended)) is not None:
        return wrong
    if draw.fault is None:
        return f"ended: {ended}, not through: {stands}" if ended or stands else None
    if ended is None:
        # A worker that nobody waits for may take as long as it likes.
        return f"never ended, not through: {stands}" if stands - {draw.faulty} else None
    if not draw.apart and (wrong := misnamed(draw, job, ended)) is not None:
        return f"{wrong}: {ended}"
    latest = job.progress + 1.3 * draw.longer * draw.limit + draw.compile_seconds + 20 * draw.slowest + SLACK
    return f"ended later than {latest}: {ended}" if ended.at > latest else None


def untold(job: Job, ended: Ended | None) -> str | None:
    """Return what is wrong with the lines about waits: the clock ended the job without one, or there are many:
    more than a few, and one an hour."""
    lines = [text for _, text in job.said if "The job goes on" in text or "not heard from" in text]
    by_the_clock = ended is not None and "has waited for" in ended.text and "was not heard from" not in ended.text
    if by_the_clock and not lines:
        return "ended by the clock without a line before"
    is_too_much = len(lines) > 20 * len(job.worlds) + job.now / 3600
    return f"{len(lines)} lines: {lines[:20]}" if is_too_much else None


def misnamed(draw: Draw, job: Job, ended: Ended) -> str | None:
    """Return what is wrong with the workers that the end names; None where nothing is.

    The faulty worker always is. Two workers that differ are both named, for nobody can tell which of them was meant;
    so are all workers of a cycle. By the clock, nobody is named who is at work. And where a worker has just stopped, it
    is named alone, unless somebody waits for it in a program that one of the communicators doesn't know, which may be
    stuck itself.
    """
    others = [job.workers[worker] for worker in ended.about if worker != draw.faulty]
    if len(others) == len(ended.about):
        return "the faulty worker is not named"
    is_by_the_clock = "has waited for" in ended.text
    if not is_by_the_clock and len(others) > 1 and "in a cycle" not in ended.text and "did not:" not in ended.text:
        return "more than two are named"
    if is_by_the_clock and any(worker.is_at_work() for worker in others):
        return "a worker that is at work is named"
    if draw.fault in STOPS and others and not any(worker.is_in_an_unknown_program() for worker in others):
        return "a worker is named besides the one that stopped"
    return None


@pytest.mark.limit(1800)
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("faulty", [False, True], ids=["healthy", "faulty"])
def test_random_jobs(faulty: bool, batch: int) -> None:
    count = RUNS // BATCHES
    for seed in sorted({*range(batch * count, (batch + 1) * count)} - TAKES_LONG):
        wrong, _ = played(seed, faulty)
        assert wrong is None, f"{wrong}\n{drawn(seed, faulty)}"


@pytest.mark.parametrize("seed", sorted(FOUND))
def test_jobs_that_went_wrong_once(seed: int) -> None:
    assert play(drawn(seed, True))[0] is None


def test_every_fault_is_found_and_every_rule_is_used() -> None:
    """A simulation in which nothing happens would prove nothing."""
    found: dict[str, set[str]] = {}
    for seed in sorted({*range(520)} - TAKES_LONG):
        _, ended = played(seed, True)
        if ended is not None:
            found.setdefault(str(drawn(seed, True).fault), set()).add(ended.text.split(" ", 2)[2][:12])
    assert len(found) >= 11, found
    texts = " ".join(sorted(set.union(*found.values())))
    for part in ("has ended", "has waited", "traces f", "is about to", "call differ"):
        assert part in texts, f"{part} was never said: {texts}"
