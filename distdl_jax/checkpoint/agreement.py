"""Possibly long work of all workers that succeeds or fails on all of them: writing and reading.

A worker that is done with its part waits for the others, and a clock ends a job in which a worker has waited for too
long. So all meet from time to time, busy ones between two pieces of their work: no worker waits for longer than for a
meeting and a piece. If a disk does not finish a piece, its worker does not arrive, and the clock ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from distdl_jax.errors import CheckpointError, DistDLError
from distdl_jax.partitions.formats.boxes_in_files import Pause
from distdl_jax.settings import current_settings
from distdl_jax.text import brief
from distdl_jax.transports.agreement import agree
from distdl_jax.transports.world import World

LONGEST = 45.0
"""Maximum seconds between two meetings: fewer than the seconds after which a wait is reported."""

PART_OF_LIMIT = 1 / 8
"""The same, as a fraction of the clock's limit."""


class _Failure(NamedTuple):
    """The contribution of a worker whose work has raised."""

    error: DistDLError


def together(
    world: World,
    label: str,
    work: Callable[[Pause], Any],
    decide: Callable[[dict[int, Any]], Any] = lambda results: None,
) -> Any:
    """Return the first worker's decision on the results of all workers' `work`, by rank; collective in the world.

    `work` may take any time, and calls its argument between two pieces. If one worker fails, the others end their work
    at the next meeting.

    **Raises,** the same on all workers, if `work` raises on any of them, or `decide` on the first. An error of another
    library becomes a `CheckpointError` on the other workers, and an `OSError` does on its own one, too.
    """
    limit = current_settings().timeout.waiting
    interval = min(LONGEST, PART_OF_LIMIT * limit) if limit else LONGEST
    last = time.monotonic()
    raised: Exception | None = None  # by this worker
    failed: DistDLError | None = None  # at a meeting, by any worker

    def decided(results: dict[int, Any]) -> tuple[Any, DistDLError | None] | None:
        """Return the decision, or the common error; None while some worker is busy, whose result is ()."""
        nonlocal raised
        if errors := {worker: result.error for worker, result in results.items() if isinstance(result, _Failure)}:
            return None, _error_of_all(errors, len(results))
        if () in results.values():
            return None
        try:
            return decide({worker: result for worker, (result,) in results.items()}), None
        except Exception as error:
            raised = error
            return None, _library_error(error, f"On worker {min(results)}: " if len(results) > 1 else "")

    def meet(result: tuple[Any, ...]) -> tuple[Any, DistDLError | None] | None:
        nonlocal last, failed
        try:
            decision = agree(world, tuple(range(world.size)), label, lambda: result, decided)
            if decision is not None and (error := decision[1]) is not None:
                raise type(error)(str(error))  # a separate one: workers may be threads
        except DistDLError as error:
            failed = error
            raise
        finally:
            last = time.monotonic()
        return decision

    def pause() -> None:
        if time.monotonic() - last > interval:
            meet(())

    result: tuple[Any, ...]
    try:
        result = (work(pause),)
    except Exception as error:
        raised, result = error, _Failure(_library_error(error))
    if failed is not None:  # the others don't wait any more, whatever the work has made of the error
        raise failed from None
    try:
        while (decision := meet(result)) is None:
            pass
    except DistDLError:
        if raised is not None and not isinstance(raised, DistDLError | OSError):
            raise raised from None
        raise
    return decision[0]


def _error_of_all(errors: dict[int, DistDLError], workers: int) -> DistDLError:
    """Return the error that all workers raise: the first one's, with its worker, unless all are equal."""
    worker, first = min(errors.items())
    if len(errors) == workers and len({(type(error), str(error)) for error in errors.values()}) == 1:
        return first
    return type(first)(f"On worker {worker}: {first}")


def _library_error(error: Exception, where: str = "") -> DistDLError:
    """Return an exception in the form that all workers raise; `where`: the worker whose file system it is about."""
    if isinstance(error, DistDLError):
        return error
    if isinstance(error, OSError) and error.strerror:
        file = error.filename if error.filename2 is None else f"{error.filename} to {error.filename2}"
        return CheckpointError(
            f"{where}{error.strerror} (errno {error.errno})" + (f": {brief(str(file), 1000)}" if file else "")
        )
    return CheckpointError(f"{where}{type(error).__name__}: {brief(str(error), 1000)}")
