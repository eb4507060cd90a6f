"""What all workers do together, and succeed in or fail in together."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from distdl_jax.errors import CheckpointError, DistDLError, InvalidArgumentError, InvalidTypeError
from distdl_jax.world import World


class Failure(NamedTuple):
    """What went wrong on a worker: the error's type, where that is one of the library's, and its text."""

    kind: type[DistDLError]
    text: str

    def error(self) -> DistDLError:
        """The error that is raised."""
        return self.kind(self.text)


def failure(error: Exception) -> Failure:
    """What an exception is for the other workers."""
    if isinstance(error, DistDLError):
        return Failure(type(error), str(error))
    if isinstance(error, OSError) and error.strerror:
        file = error.filename if error.filename2 is None else f"{error.filename} to {error.filename2}"
        return Failure(CheckpointError, f"{error.strerror} (errno {error.errno})" + (f": {file}" if file else ""))
    return Failure(CheckpointError, f"{type(error).__name__}: {error}")


def together(
    world: World,
    purpose: str,
    contribute: Callable[[], Any],
    decide: Callable[[dict[int, Any]], Any] = lambda told: None,
) -> Any:
    """What the first worker decides on all contributions, by rank; collective in the world.

    **Raises,** on all workers, where `contribute` raises on any of them, or `decide` on the first. What is no error of
    the library's becomes a `CheckpointError` elsewhere; where it was raised it goes on as it is, if it is no `OSError`.
    """
    mine: Any
    raised: Exception | None = None
    try:
        mine = contribute()
    except Exception as error:
        mine, raised = failure(error), error

    def decided(told: dict[int, Any]) -> Any:
        nonlocal raised
        if (found := failed_on_any(told)) is not None:
            return found
        try:
            return decide(told)
        except Exception as error:
            raised = error
            return failure_to_decide(error, told)

    decision = world.agree(tuple(range(world.size)), purpose, mine, decided)
    if isinstance(decision, Failure):
        raise raised_as(decision, raised)
    return decision


def raised_as(decision: Failure, raised: Exception | None) -> Exception:
    """What a worker raises where all have failed because of `decision`; `raised` is what was raised on itself."""
    return raised if raised is not None and not isinstance(raised, DistDLError | OSError) else decision.error()


def failed_on_any(told: dict[int, Any]) -> Failure | None:
    """The one failure of them that all workers raise."""
    failed = {worker: theirs for worker, theirs in told.items() if isinstance(theirs, Failure)}
    if not failed:
        return None
    worker, first = min(failed.items())
    if len(told) == 1 or (len(failed) == len(told) and len(set(failed.values())) == 1):
        return first
    return Failure(first.kind, f"On worker {worker}: {first.text}")


def failure_to_decide(error: Exception, told: dict[int, Any]) -> Failure:
    """Return the failure of the first worker to decide: it is named where it is its file system that has failed."""
    found = failure(error)
    if len(told) == 1 or isinstance(error, DistDLError):
        return found
    return Failure(found.kind, f"On worker {min(told)}: {found.text}")


def this_host() -> str:
    """The name of this machine, for messages."""
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
