"""`raise SystemExit(n)`, which Python tells nobody: not `sys.excepthook`, nor handlers of `atexit`.

From Python 3.12 on, `sys.monitoring` shows each exception that leaves a frame, at no cost to what raises none. Before,
only where the main program was when it ended is left to be seen, in its frame; with which status is lost by then.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_TOOLS = (3, 4)
"""The numbers that Python leaves to tools of no particular kind."""


class MainProgram:
    """The main program of this process, looked at from inside; nothing is known where that runs no file or module.

    - `found`: is called with what the `SystemExit` that ends it was given, where Python shows that.
    """

    def __init__(self, found: Callable[[Any], None]) -> None:
        self._frame: FrameType | None = None
        if threading.current_thread() is threading.main_thread():
            frames: list[FrameType] = []
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                frames.append(frame)
                frame = frame.f_back
            modules = (f for f in reversed(frames) if f.f_code.co_name == "<module>")
            self._frame = next((f for f in modules if f.f_globals.get("__name__") == "__main__"), None)
        self._found = found
        self._watch()

    def ended_at(self) -> str:
        """The line in which an exception has ended it, `train.py:31`; empty where none has."""
        frame, running = self._frame, sys._getframe(1)
        if frame is None:
            return ""
        while running is not frame and running.f_back is not None:
            running = running.f_back
        code = frame.f_code
        if running is frame or frame.f_lasti < 0 or dis.opname[code.co_code[frame.f_lasti]].startswith("RETURN_"):
            return ""
        return f"{Path(code.co_filename).name}:{frame.f_lineno}"

    def _watch(self) -> None:
        monitoring: Any = getattr(sys, "monitoring", None)
        if monitoring is None or self._frame is None:
            return
        for tool in _TOOLS:
            if monitoring.get_tool(tool) is None:
                monitoring.use_tool_id(tool, "distdl_jax")
                monitoring.register_callback(tool, monitoring.events.PY_UNWIND, self._unwinds)
                monitoring.set_events(tool, monitoring.events.PY_UNWIND)
                return

    def _unwinds(self, code: CodeType, offset: int, error: BaseException) -> None:
        if isinstance(error, SystemExit) and self._frame is not None and code is self._frame.f_code:
            self._found(error.code)
