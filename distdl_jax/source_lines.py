"""Lines and functions of the user's program, as named in messages: the innermost line outside libraries."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

_LIBRARIES = (
    *(
        str(Path(spec.origin).parent) + os.sep
        for name in ("distdl_jax", "jax", "mpi4jax", "mpi4py")
        if (spec := find_spec(name)) and spec.origin
    ),
    *(str(module.__file__) for module in (functools, contextlib, threading)),
)


_PYTHON = sysconfig.get_path("stdlib") + os.sep
_GENERATED = ("<frozen ", "<string>", "<__array_function__")
"""Names of code without a file: Python's own, dataclasses', numpy's. A notebook's cell is user code."""


def user_line() -> str:
    """Return the line of the user's program at which this thread is, `train.py:31 in loss`."""
    return line_of(sys._getframe(1))


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the line of the user's program at which this thread is: once, unless configured otherwise."""
    user_warning(category)(text)


def user_warning(category: type[Warning]) -> Callable[[str], None]:
    """Return a function of a text that warns, also later, at the line at which this thread is now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    assert frame is not None
    registry, file, line = (
        frame.f_globals.setdefault("__warningregistry__", {}),
        frame.f_code.co_filename,
        frame.f_lineno,
    )
    return lambda text: warnings.warn_explicit(text, category, file, line, registry=registry)


def line_of(innermost: FrameType) -> str:
    """Return the line of another thread, which must be stopped, from its innermost frame."""
    frame: FrameType | None = innermost
    without_file = None
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename == "<string>" and frame.f_globals.get("__name__") == "__main__":
            without_file = without_file or frame  # python -c
        frame = frame.f_back
    if (frame := frame or without_file) is None:
        return "an unknown line"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


@functools.cache
def is_library(file_name: str) -> bool:
    """Return whether a source file belongs to this library, to its dependencies, or to Python."""
    return file_name.startswith(_LIBRARIES) or file_name.startswith(_GENERATED)


def is_of_python(file_name: str) -> bool:
    """Return whether a source file belongs to Python's own library."""
    return file_name.startswith(_PYTHON) and "-packages" not in file_name


def function_name(fun: Callable[..., Any]) -> str:
    """Return a function's name for messages, the same on all workers: its name, and where it is defined."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, functools.partial):
        fun = inspect.unwrap(fun.func)
    code = getattr(fun, "__code__", None)
    name = getattr(fun, "__qualname__", type(fun).__name__).replace("<locals>.", "")
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
