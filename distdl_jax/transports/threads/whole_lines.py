"""Whole lines of workers that are threads: `print` writes each argument alone, and others would write in between."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("stdout", "stderr", "stdin")
"""The streams of `sys` that are replaced while workers run."""


class WholeLines:
    """Stands for a stream, and forwards what each thread writes in whole lines.

    The rest of a line waits for its end, in spite of `flush`; with two exceptions. A line that is drawn again and again
    (a carriage return in it, as in progress bars) is forwarded when it is flushed, and a prompt when the thread reads.
    If another thread writes then, it begins a new line. There is no lock: a worker may be interrupted anywhere, and the
    stream below takes each text in one piece.

    - `newline`, `again`: the ends of lines; bytes for binary streams.
    """

    def __init__(self, usual: Any, newline: Any = "\n", again: Any = "\r") -> None:
        self._usual = usual
        self._newline, self._again = newline, again
        self._own = threading.local()
        self._binary: WholeLines | None = None
        self._rests: dict[object, Any] = {}  # of threads, by a key of each: an identifier may be another thread's later
        self._open: object = None  # whose line the stream is in
        self._is_on = True
        if isinstance(newline, str) and hasattr(usual, "buffer"):
            self._binary = WholeLines(_Flushed(usual), b"\n", b"\r")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def write(self, text: Any) -> int:
        key, nothing = self._key(), self._newline[:0]
        if not isinstance(text, str):
            text = bytes(text)
        if type(text) is not type(nothing):
            return int(self._usual.write(text))  # raises, as for any program
        whole = self._rests.pop(key, nothing) + text
        cut = len(whole) if whole.endswith(self._again) or not self._is_on else whole.rfind(self._newline) + 1
        if whole[cut:]:
            self._rests[key] = whole[cut:]
        if whole[:cut]:
            self._forward(key, whole[:cut])
        return len(text)

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._again in self._rests.get(self._key(), self._newline[:0]):
            self.forward_rest()
        self._usual.flush()

    def forward_rest(self) -> None:
        """Forward what this thread has written of a line."""
        if rest := self._rests.pop(self._key(), None):
            self._forward(self._key(), rest)
        self._usual.flush()

    def end(self) -> None:
        """Forward all rests, and from now on everything at once."""
        self._is_on = False
        for key in list(self._rests):
            if rest := self._rests.pop(key, None):
                self._forward(key, rest)
        if self._binary is not None:
            self._binary.end()

    def forget(self) -> None:
        """Leave out all rests, in a process that a worker has forked."""
        self._is_on = False
        self._rests.clear()
        if self._binary is not None:
            self._binary.forget()

    @property
    def buffer(self) -> Any:
        """The binary stream below; each thread's lines are whole in it, too."""
        if self._binary is None:
            return self._usual.buffer  # raises
        self.forward_rest()
        return self._binary

    def _key(self) -> object:
        if (key := getattr(self._own, "key", None)) is None:
            key = self._own.key = object()
        return key

    def _forward(self, key: object, text: Any) -> None:
        begins = self._open not in (None, key) and not text.startswith((self._newline, self._again))
        self._open = None if text.endswith((self._newline, self._again)) else key
        self._usual.write(self._newline + text if begins else text)


class _Flushed:
    """The binary stream of a text stream, whose own text comes first."""

    def __init__(self, text: Any) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text.buffer, name)

    def write(self, piece: Any) -> int:
        self._text.flush()
        return int(self._text.buffer.write(piece))


class ShowsPrompts:
    """Stands for `sys.stdin`: before a thread waits for input, what it has written is shown."""

    def __init__(self, usual: Any, shown: list[WholeLines]) -> None:
        self._usual, self._shown = usual, shown

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "readline", "readlines", "fileno"):  # `input` asks for the last one
            self._show()
        return getattr(self._usual, name)

    def __iter__(self) -> Iterator[str]:
        self._show()
        return iter(self._usual)

    def _show(self) -> None:
        for stream in self._shown:
            stream.forward_rest()


_lock = threading.Lock()
_running = 0
_usual: dict[str, Any] = {}
_replaced: dict[str, Any] = {}


@contextmanager
def whole_lines() -> Iterator[None]:
    """Inside, all threads of the process write whole lines; several may be inside at a time."""
    global _running
    with _lock:
        _running += 1
        if _running == 1:
            _replace()
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                _put_back()


def _replace() -> None:
    _usual.update({name: stream for name in NAMES if (stream := getattr(sys, name)) is not None})
    lines = {name: WholeLines(stream) for name, stream in _usual.items() if name != "stdin"}
    _replaced.update(lines)
    if "stdin" in _usual:
        _replaced["stdin"] = ShowsPrompts(_usual["stdin"], list(lines.values()))
    for name, stream in _replaced.items():
        setattr(sys, name, stream)


def _put_back() -> None:
    for name, stream in _replaced.items():
        if getattr(sys, name) is stream:  # and not a program's own
            setattr(sys, name, _usual[name])
        if isinstance(stream, WholeLines):
            stream.end()
    _usual.clear()
    _replaced.clear()


def _forget() -> None:
    for stream in _replaced.values():
        if isinstance(stream, WholeLines):
            stream.forget()


os.register_at_fork(after_in_child=_forget)
