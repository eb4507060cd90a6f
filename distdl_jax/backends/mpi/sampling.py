"""What the main thread is doing, seen from another one: whether it stands in a compiled program, or compiles one."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

from distdl_jax.backends.mpi.board import line_of, main_stack, user_frame


@dataclass(frozen=True)
class Sample:
    """Seconds for which the main thread has been in one run of a program, or in one compilation; and its line."""

    executing_for: float = 0.0
    compiling_for: float = 0.0
    where: str = ""


class _Mark:
    """What marks a frame as seen: as its trace function, which nothing calls unless the frame is being traced."""

    def __call__(self, *event: Any) -> None:
        return None


class Sampler:
    """Looks at the main thread from time to time."""

    def __init__(self) -> None:
        self._kind: str | None = None
        self._since = 0.0
        self._mark: Any = None

    def look(self) -> Sample:
        """What the main thread does now, and since which of the looks before."""
        innermost = main_stack()
        kind, frame = _classified(innermost)
        if kind is None or frame is None:
            self._kind = None
            return Sample(where=_where(innermost))
        if kind != self._kind or not self._is_marked(frame):
            self._kind, self._since = kind, monotonic()
            self._put_mark(frame)
        seconds = monotonic() - self._since
        return Sample(**{f"{kind}_for": seconds}, where=_where(innermost))

    def _put_mark(self, frame: FrameType) -> None:
        # To hold the frame itself would hold the arrays of its call; its address says little, for it is used again.
        if frame.f_trace is None or isinstance(frame.f_trace, _Mark):
            self._mark = frame.f_trace = _Mark()
        else:
            self._mark = id(frame)  # a debugger has it

    def _is_marked(self, frame: FrameType) -> bool:
        return frame.f_trace is self._mark or self._mark == id(frame)


_RUNS = (("interpreters/pxla.py", "__call__"), ("_src/array.py", "_value"), ("_src/api.py", "block_until_ready"))


def _classified(innermost: FrameType | None) -> tuple[str | None, FrameType | None]:
    if innermost is None:
        return None, None
    code = innermost.f_code
    if any(code.co_filename.endswith(file) and code.co_name == name for file, name in _RUNS):
        return "executing", innermost
    frame: FrameType | None = innermost
    while frame is not None:
        if frame.f_code.co_filename.endswith("jax/_src/compiler.py"):
            return "compiling", frame
        frame = frame.f_back
    return None, None


def _where(innermost: FrameType | None) -> str:
    frame = user_frame(innermost)
    return "" if frame is None else line_of(frame)
