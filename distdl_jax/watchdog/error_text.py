"""Errors as users see them: the lines of their program, without those of the library and of JAX."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from distdl_jax.errors import DistDLError
from distdl_jax.settings import traceback_filtering
from distdl_jax.source_lines import is_library

F = TypeVar("F", bound=Callable[..., Any])

_GENERATED = "<string>"
"""The file of code without one: `python -c`, a user's `exec`, or methods of a dataclass of the library's."""

_OF_LIBRARIES = ("distdl_jax", "jax")


def error_text(error: BaseException) -> str:
    """Return the text that Python prints of an error, with the lines of the user's program only.

    A frame takes two lines, without markers below them. An error inside libraries alone keeps its frames.
    `JAX_TRACEBACK_FILTERING=off` keeps all.
    """
    shown = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    if _shows_all():
        return "".join(shown.format())
    _shorten(shown, error)
    return "".join(shown.format()) + _hint(error)


def comparable(text: str) -> str:
    """Return the text of an error for comparison with other workers': without addresses of objects."""
    return re.sub(r"\b0x[0-9a-f]+", "0x", text)


def show_own_lines(error: BaseException) -> None:
    """Remove the frames of libraries from an error that is about to be raised again, for whoever prints it."""
    if _shows_all():
        return
    kept = None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_users(frame):
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    error.__traceback__ = kept
    if notes := getattr(error, "__notes__", None):
        error.__notes__ = _own_notes(notes)


def hiding_own_lines(fun: F) -> F:
    """Return `fun`; its errors come without frames of libraries.

    Functions that JAX transforms need `jax_compat.hiding_frames`, which costs an error a hundred times as much.
    """

    @wraps(fun)
    def shown(*args: Any, **options: Any) -> Any:
        try:
            return fun(*args, **options)
        except Exception as error:
            show_own_lines(error)
            raise

    return cast(F, shown)


def _shows_all() -> bool:
    """Return whether the user wants to see all frames, by JAX's setting; this imports no JAX."""
    config: Any = getattr(sys.modules.get("jax"), "config", None)
    return str(getattr(config, "jax_traceback_filtering", traceback_filtering())).lower() == "off"


def _shorten(shown: traceback.TracebackException, error: BaseException) -> None:
    """Omit the frames of libraries, in the errors before this one and in those of a group, too."""
    # Without columns: markers below a line would make three lines of two.
    users = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
    if users:
        shown.stack = traceback.StackSummary.extract(iter(users))
    elif isinstance(error, SyntaxError):  # of the program itself; its line is in the message
        shown.stack = None  # type: ignore[assignment]
    if notes := getattr(shown, "__notes__", None):
        shown.__notes__ = _own_notes(notes)
    if shown.__cause__ is not None and error.__cause__ is not None:
        _shorten(shown.__cause__, error.__cause__)
    if shown.__context__ is not None and error.__context__ is not None:
        if _has_lines(error.__context__):
            _shorten(shown.__context__, error.__context__)
        else:  # what the library has caught, and says better
            shown.__context__ = None
    for part, own in zip(getattr(shown, "exceptions", None) or (), getattr(error, "exceptions", ()), strict=False):
        _shorten(part, own)


def _hint(error: BaseException) -> str:
    """Return a line about an error that comes from inside a library, and isn't about an argument."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, DistDLError | TypeError) or not frames or _is_users(frames[-1]):
        return ""
    return "(Raised inside a library: JAX_TRACEBACK_FILTERING=off shows where.)\n"


def _has_lines(error: BaseException) -> bool:
    return any(_is_users(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if frame.f_globals.get("__name__") == "IPython.core.interactiveshell":  # runs a cell
        return False
    if file == _GENERATED:
        return str(frame.f_globals.get("__name__")).partition(".")[0] not in _OF_LIBRARIES
    return not is_library(file)


def _own_notes(notes: list[Any]) -> list[Any]:
    """Return the notes without JAX's, that it has removed frames."""
    return [note for note in notes if not (isinstance(note, str) and "JAX_TRACEBACK_FILTERING" in note)]
