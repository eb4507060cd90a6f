"""Which source line of the user's program something happens at: the innermost outside libraries."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

_LIBRARIES = (
    *(
        str(Path(spec.origin).parent) + os.sep
        for name in ("distdl_jax", "jax", "mpi4jax", "mpi4py")
        if (spec := find_spec(name)) and spec.origin
    ),
    *(str(module.__file__) for module in (functools, contextlib, threading)),
)


def user_line() -> str:
    """The line of the user's program that this thread is at, `train.py:31 in loss`."""
    return line_of(sys._getframe(1))


def line_of(innermost: FrameType) -> str:
    """The same of another thread, which must stand still, from the innermost of its frames."""
    frame: FrameType | None = innermost
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def is_library(file_name: str) -> bool:
    """Whether a source file belongs to this library, to those that it is built on, or to Python."""
    return file_name.startswith(_LIBRARIES) or file_name.startswith("<")
