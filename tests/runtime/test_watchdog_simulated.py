"""The watchdog over thousands of random jobs in virtual time, with the real reporters and the real coordinator.

1. No healthy job is ever ended, whatever takes how long, as long as the clock that the user sets has not run out.
2. Every job with a fault that others wait for is ended, within the clock's limit.
3. Who is named is at fault.

A failure says its seed; `steps_left_out` says what could be left out with the same failure.
"""

from dataclasses import replace

import pytest
from launcher.settings import long_run
from random_jobs import Draw, drawn, job_of

RUNS = 50_000 if long_run() else 2_500  # of each kind
BATCHES = 50 if long_run() else 5
SLACK = 150.0  # seconds: those concerned are asked again after pauses of up to a minute


def failure(draw: Draw) -> str | None:
    """What is wrong with how the job ended; None where it did as it should."""
    job = job_of(draw)
    ended = job.run()
    stands = {worker.rank for worker in job.workers if worker.left is None}
    if draw.fault is None:
        return f"ended: {ended}, not through: {stands}" if ended or stands else None
    if ended is None:
        # A worker that nobody waits for may take as long as it likes.
        return f"never ended, not through: {stands}" if stands - {draw.faulty} else None
    if draw.faulty not in ended.about:
        return f"the wrong ones are named: {ended}"
    latest = job.progress + 1.3 * draw.limit + draw.compile_seconds + 20 * draw.slowest + SLACK
    return f"ended later than {latest}: {ended}" if ended.at > latest else None


def shrunk(draw: Draw) -> Draw:
    """The job without the steps that its failure does not need."""
    for number in reversed(range(len(draw.steps))):
        if number != draw.at or draw.fault is None:
            steps = draw.steps[:number] + draw.steps[number + 1 :]
            smaller = replace(draw, steps=steps, at=draw.at - (number < draw.at))
            if smaller.steps and _fails(smaller):
                draw = smaller
    return draw


def _fails(draw: Draw) -> bool:
    try:
        return failure(draw) is not None
    except Exception:
        return False


@pytest.mark.limit(1800)
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("faulty", [False, True], ids=["healthy", "faulty"])
def test_random_jobs(faulty: bool, batch: int) -> None:
    count = RUNS // BATCHES
    for seed in range(batch * count, (batch + 1) * count):
        draw = drawn(seed, faulty)
        wrong = failure(draw)
        assert wrong is None, f"{wrong}\n{draw}\nsmallest: {shrunk(draw)}"


def test_every_fault_is_found_and_every_rule_is_used() -> None:
    """A simulation in which nothing happens would prove nothing."""
    found: dict[str, set[str]] = {}
    for seed in range(400):
        draw = drawn(seed, True)
        if (ended := job_of(draw).run()) is not None:
            found.setdefault(str(draw.fault), set()).add(ended.text.split(" ", 2)[2][:12])
    assert len(found) >= 11, found
    said = " ".join(sorted(set.union(*found.values())))
    for part in ("has ended", "has waited", "traces f", "is about to", "call differ"):
        assert part in said, f"{part} was never said: {said}"
