"""Work of which each worker has its own part, and that may take long: writing and reading.

A worker that is done with its part waits for the others, and a clock ends a job in which somebody has waited for too
long. So all meet from time to time, the busy ones between two pieces of their work: nobody waits for longer than for a
meeting and a piece. Where a disk does not finish a piece, its worker does not come, and the clock ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from distdl_jax.checkpoint.agreement import Failure, failed_on_any, failure, failure_to_decide, raised_as
from distdl_jax.settings import current_settings
from distdl_jax.world import World

LONGEST = 60.0
"""Seconds between two meetings, at most."""

PART_OF_LIMIT = 1 / 8
"""The same, as a part of what the clock allows."""

Pause = Callable[[], None]
"""What work calls between two of its pieces; what it raises ends the work."""


class _GoesOn(NamedTuple):
    """What a worker says that is not done, and what is decided as long as there is one."""


class _Done(NamedTuple):
    """What a worker says that is done, and what is decided when all are."""

    value: Any


class _FailedElsewhere(Exception):
    """Ends this worker's work, since that of another one has failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def together_for_long(
    world: World,
    purpose: str,
    work: Callable[[Pause], Any],
    decide: Callable[[dict[int, Any]], Any] = lambda told: None,
) -> Any:
    """What the first worker decides on what each worker's `work` returns, by rank; collective in the world.

    As `together`, but that work may take any time, and calls what it gets between two pieces of it. Where one worker
    fails, the others end their work at the next meeting.
    """
    raised: Exception | None = None
    limit = current_settings().timeout.waiting
    interval = min(LONGEST, PART_OF_LIMIT * limit) if limit else LONGEST
    last = time.monotonic()

    def decided(told: dict[int, Any]) -> Any:
        nonlocal raised
        if (found := failed_on_any(told)) is not None:
            return found
        if any(isinstance(its, _GoesOn) for its in told.values()):
            return _GoesOn()
        try:
            return _Done(decide({worker: its.value for worker, its in told.items()}))
        except Exception as error:
            raised = error
            return failure_to_decide(error, told)

    def meet(mine: _GoesOn | _Done | Failure) -> Any:
        nonlocal last
        decision = world.agree(tuple(range(world.size)), purpose, mine, decided)
        last = time.monotonic()
        return decision

    def pause() -> None:
        if time.monotonic() - last > interval:
            decision = meet(_GoesOn())
            if isinstance(decision, Failure):
                raise _FailedElsewhere(decision)

    mine: _Done | Failure
    try:
        mine = _Done(work(pause))
    except _FailedElsewhere as ended:
        raise ended.failure.error() from None
    except Exception as error:
        mine, raised = failure(error), error
    while isinstance(decision := meet(mine), _GoesOn):
        pass
    if isinstance(decision, Failure):
        raise raised_as(decision, raised)
    return decision.value
