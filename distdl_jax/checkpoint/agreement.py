"""Work of all workers that succeeds or fails on all of them, and that may take long: writing and reading.

A worker that is done with its part waits for the others, and a clock ends a job in which somebody has waited for too
long. So all meet from time to time, the busy ones between two pieces of their work: nobody waits for longer than for a
meeting and a piece. Where a disk does not finish a piece, its worker does not come, and the clock ends the job.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from distdl_jax.errors import CheckpointError, DistDLError, InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.partitions.formats.hyperslabs import Pause
from distdl_jax.settings import current_settings
from distdl_jax.tracing.world import World

LONGEST = 45.0
"""Seconds between two meetings, at most: fewer than after which a line says that a worker waits."""

PART_OF_LIMIT = 1 / 8
"""The same, as a part of what the clock allows."""


class Failure(NamedTuple):
    """An error on a worker: its type, if that is one of the library's, and its text."""

    kind: type[DistDLError]
    text: str


class _Unfinished(NamedTuple):
    """The contribution of a worker that is not done, and the decision as long as there is one."""


class _Done(NamedTuple):
    """The contribution of a worker that is done, and the decision when all are."""

    value: Any


class _FailedElsewhere(BaseException):
    """Ends this worker's work, since the work of another one has failed. It is no error of a file that is read."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def together(
    world: World,
    label: str,
    work: Callable[[Pause], Any],
    decide: Callable[[dict[int, Any]], Any] = lambda contributions: None,
) -> Any:
    """Return the first worker's decision on the results of all workers' `work`, by rank; collective in the world.

    `work` may take any time, and calls what it gets between two pieces. Where one worker fails, the others end their
    work at the next meeting.

    **Raises,** on all workers, where `work` raises on any of them, or `decide` on the first. An error that is none of
    the library's becomes a `CheckpointError` elsewhere; where it was raised it goes on as it is, but for `OSError`.
    """
    raised: Exception | None = None
    limit = current_settings().timeout.waiting
    interval = min(LONGEST, PART_OF_LIMIT * limit) if limit else LONGEST
    last = time.monotonic()

    def decided(contributions: dict[int, Any]) -> Any:
        nonlocal raised
        if (found := _failed_on_any(contributions)) is not None:
            return found
        if any(isinstance(each, _Unfinished) for each in contributions.values()):
            return _Unfinished()
        try:
            return _Done(decide({worker: each.value for worker, each in contributions.items()}))
        except Exception as error:
            raised, found = error, _failure(error)
            is_clear = len(contributions) == 1 or isinstance(error, DistDLError)
            # A failure of the first worker's file system names the worker.
            return found if is_clear else found._replace(text=f"On worker {min(contributions)}: {found.text}")

    def meet(contribution: _Unfinished | _Done | Failure) -> Any:
        nonlocal last
        decision = world.agree(tuple(range(world.size)), label, contribution, decided)
        last = time.monotonic()
        return decision

    def pause() -> None:
        if time.monotonic() - last > interval:
            decision = meet(_Unfinished())
            if isinstance(decision, Failure):
                raise _FailedElsewhere(decision)

    contribution: _Done | Failure
    try:
        contribution = _Done(work(pause))
    except _FailedElsewhere as ended:
        raise ended.failure.kind(ended.failure.text) from None
    except Exception as error:
        contribution, raised = _failure(error), error
    while isinstance(decision := meet(contribution), _Unfinished):
        pass
    if isinstance(decision, Failure):
        if raised is not None and not isinstance(raised, DistDLError | OSError):
            raise raised
        raise decision.kind(decision.text)
    return decision.value


def _failure(error: Exception) -> Failure:
    """Return what an exception is for the other workers."""
    if isinstance(error, DistDLError):
        return Failure(type(error), str(error))
    if isinstance(error, OSError) and error.strerror:
        file = error.filename if error.filename2 is None else f"{error.filename} to {error.filename2}"
        return Failure(CheckpointError, f"{error.strerror} (errno {error.errno})" + (f": {file}" if file else ""))
    return Failure(CheckpointError, f"{type(error).__name__}: {error}")


def _failed_on_any(contributions: dict[int, Any]) -> Failure | None:
    """Return the one failure among contributions that all workers raise."""
    failed = {worker: each for worker, each in contributions.items() if isinstance(each, Failure)}
    if not failed:
        return None
    worker, first = min(failed.items())
    if len(contributions) == 1 or (len(failed) == len(contributions) and len(set(failed.values())) == 1):
        return first
    return Failure(first.kind, f"On worker {worker}: {first.text}")


def check_same(arguments: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse arguments, by name, that are not the same on all workers.

    **Raises:** `PlanError`.
    """
    (first, expected), *others = sorted(arguments.items())
    for worker, given in others:
        for name, value in given.items():
            if value != expected[name]:
                raise PlanError(
                    f"`{name}` must be the same on all workers, but is {expected[name]!r} on worker {first} and "
                    f"{value!r} on worker {worker}."
                )


def this_host() -> str:
    """Return the name of this machine, for messages."""
    with suppress(OSError):
        return socket.gethostname()
    return "unknown host"


def checked_path(path: Any) -> str:
    """Return the argument `path`, absolute.

    **Raises:** `InvalidTypeError`, `InvalidArgumentError` for what is no path; `CheckpointError` where it is relative,
    and the folder that the program works in is gone.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise InvalidTypeError(f"`path` (={path!r}) must be the path of a folder: a text or a pathlib.Path.") from None
    if not text:
        raise InvalidArgumentError("`path` (='') must name a folder; '.' is the one that the program works in.")
    try:
        has_nul = b"\0" in os.fsencode(text)
    except UnicodeEncodeError:
        has_nul = True
    if has_nul:
        raise InvalidArgumentError(f"`path` (={text!r}) must be a path, without NUL and without halves of letters.")
    try:
        return os.path.abspath(text)
    except FileNotFoundError:
        raise CheckpointError(
            f"`path` (={text!r}) is relative to the folder that the program works in, which has been removed."
        ) from None
