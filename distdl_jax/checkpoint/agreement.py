"""Work of all workers that succeeds or fails on all of them, and that may take long: writing and reading.

A worker that is done with its part waits for the others, and a clock ends a job in which a worker has waited for too
long. So all meet from time to time, the busy ones between two pieces of their work: no worker waits for longer than for
a meeting and a piece. If a disk does not finish a piece, its worker does not come, and the clock ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from distdl_jax.errors import CheckpointError, DistDLError
from distdl_jax.partitions.formats.boxes_in_files import Pause
from distdl_jax.settings import current_settings
from distdl_jax.tracing.world import World
from distdl_jax.transports.agreement import agree

LONGEST = 45.0
"""Seconds between two meetings, at most: fewer than after which a line says that a worker waits."""

PART_OF_LIMIT = 1 / 8
"""The same, as a part of what the clock allows."""


def together(
    world: World,
    label: str,
    work: Callable[[Pause], Any],
    decide: Callable[[dict[int, Any]], Any] = lambda results: None,
) -> Any:
    """Return the first worker's decision on the results of all workers' `work`, by rank; collective in the world.

    `work` may take any time, and calls its argument between two pieces. If one worker fails, the others end their work
    at the next meeting.

    **Raises,** on all workers, if `work` raises on any of them, or `decide` on the first. An error that is none of the
    library's becomes a `CheckpointError` on the other workers, and an `OSError` on its own one, too.
    """
    limit = current_settings().timeout.waiting
    interval = min(LONGEST, PART_OF_LIMIT * limit) if limit else LONGEST
    last = time.monotonic()
    raised: Exception | None = None  # by this worker
    failed: DistDLError | None = None  # at a meeting, by any worker

    def decided(results: dict[int, tuple[Any, ...]]) -> tuple[Any, DistDLError | None] | None:
        """Return the decision, or the error in making it; None while some worker is busy, whose result is ()."""
        nonlocal raised
        if () in results.values():
            return None
        try:
            return decide({worker: result for worker, (result,) in results.items()}), None
        except Exception as error:
            raised = error
            return None, _library_error(error, f"On worker {min(results)}: " if len(results) > 1 else "")

    def meet(result: Callable[[], tuple[Any, ...]]) -> Any:
        nonlocal last, failed
        try:
            return agree(world, tuple(range(world.size)), label, result, decided)
        except DistDLError as error:
            failed = error
            raise
        finally:
            last = time.monotonic()

    def pause() -> None:
        if time.monotonic() - last > interval:
            meet(tuple)

    def result() -> tuple[Any, ...]:
        if raised is not None:
            raise _library_error(raised)
        return done

    done: tuple[Any, ...] = ()
    try:
        done = (work(pause),)
    except Exception as error:
        if failed is not None:
            raise failed from None
        raised = error
    try:
        while (decision := meet(result)) is None:
            pass
        value, error_of_decision = decision
        if error_of_decision is not None:
            raise error_of_decision
    except DistDLError:
        if raised is not None and not isinstance(raised, DistDLError | OSError):
            raise raised from None
        raise
    return value


def _library_error(error: Exception, where: str = "") -> DistDLError:
    """Return an exception as all workers raise it; `where`: the worker with the file system that it is of."""
    if isinstance(error, DistDLError):
        return error
    if isinstance(error, OSError) and error.strerror:
        file = error.filename if error.filename2 is None else f"{error.filename} to {error.filename2}"
        return CheckpointError(f"{where}{error.strerror} (errno {error.errno})" + (f": {file}" if file else ""))
    return CheckpointError(f"{where}{type(error).__name__}: {error}")
