"""What the main thread is doing, seen from another one: whether it stands in a compiled program, or compiles one."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

from jax._src.dispatch import runtime_tokens

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
    """Looks at the main thread from time to time; made in the main thread."""

    def __init__(self) -> None:
        # What JAX has dispatched in this thread and not waited for; the attributes are its own in each thread.
        self._dispatched: dict[str, Any] = vars(runtime_tokens)
        self._pending: dict[int, tuple[Any, float]] = {}
        self._kind: str | None = None
        self._since = 0.0
        self._mark: Any = None

    def look(self) -> Sample:
        """What the main thread does now, and since which of the looks before."""
        innermost = main_stack()
        kind, frame = _classified(innermost)
        dispatched_for = self._oldest_pending()
        if kind is None or frame is None:
            self._kind = None
            return Sample(executing_for=dispatched_for, where=_where(innermost))
        if kind != self._kind or not self._is_marked(frame):
            self._kind, self._since = kind, monotonic()
            self._put_mark(frame)
        seconds = monotonic() - self._since
        if kind == "compiling":
            return Sample(compiling_for=seconds, where=_where(innermost))
        return Sample(executing_for=max(seconds, dispatched_for), where=_where(innermost))

    def _oldest_pending(self) -> float:
        """Seconds for which a program that communicates has been under way beside the main thread."""
        now = monotonic()
        tokens = list(self._dispatched.get("current_tokens", {}).values())
        for token in tokens:
            if (buffer := getattr(token, "_buf", None)) is not None:
                self._pending.setdefault(id(buffer), (buffer, now))
        self._pending = {
            key: (buffer, since)
            for key, (buffer, since) in self._pending.items()
            if not buffer.is_deleted() and not buffer.is_ready()
        }
        return max((now - since for _, since in self._pending.values()), default=0.0)

    def _put_mark(self, frame: FrameType) -> None:
        # To hold the frame itself would hold the arrays of its call; its address says little, for it is used again.
        if frame.f_trace is None or isinstance(frame.f_trace, _Mark):
            self._mark = frame.f_trace = _Mark()
        else:
            self._mark = id(frame)  # a debugger has it

    def _is_marked(self, frame: FrameType) -> bool:
        return frame.f_trace is self._mark or self._mark == id(frame)


def _classified(innermost: FrameType | None) -> tuple[str | None, FrameType | None]:
    if innermost is None:
        return None, None
    code = innermost.f_code
    if code.co_filename.endswith("jax/_src/interpreters/pxla.py") and code.co_name == "__call__":
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
