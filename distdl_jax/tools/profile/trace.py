"""A profile as a file of Chrome's trace event format, which Perfetto reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distdl_jax.tools.profile.activities import BACKWARD, MESSAGE, PACKING, Activities
from distdl_jax.tools.profile.waiting import meet

_STEPS, _ARITHMETIC, _MESSAGES = 0, 1, 1000


def write_trace(path: str | os.PathLike[str], recorded: Mapping[int, Activities]) -> None:
    """Write what all workers recorded; times count from the first step."""
    began = min(mine.steps[0][0] for mine in recorded.values())
    events = list(_arrows(recorded, began))
    for worker, mine in sorted(recorded.items()):
        events += _worker(worker, mine, began)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _worker(worker: int, mine: Activities, began: int) -> Iterator[dict[str, Any]]:
    """Yield a worker's events: its process, its rows, and all that ran."""
    yield {"ph": "M", "pid": worker, "name": "process_name", "args": {"name": f"worker {worker}"}}
    yield {"ph": "M", "pid": worker, "name": "process_sort_index", "args": {"sort_index": worker}}
    free: list[int] = []  # when each row of arithmetic is free: what runs at the same time needs one each
    for number, (start, end) in enumerate(mine.steps):
        yield _slice(worker, _STEPS, f"step {number}", start - began, end - start, {})
    for each, operation in zip(mine.activities, mine.operations, strict=True):
        row, thread = mine.rows[each.row], _MESSAGES
        if each.kind != MESSAGE:
            lane = next((lane for lane, at in enumerate(free) if at <= each.start), len(free))
            free[lane : lane + 1] = [each.end]
            thread = _ARITHMETIC + lane
        about = {"instruction": each.instruction, "pass": "backward" if row.direction == BACKWARD else "forward"}
        if each.kind == PACKING:
            about["for"] = "messages"
        if operation is not None:
            about |= {"operation": str(operation), "bytes": str(operation.bytes_sent)}
        title = f"{row.place} {row.name}".strip()
        yield _slice(worker, thread, title, each.start - began, each.end - each.start, about)
    names = {_STEPS: "steps", _MESSAGES: "messages"}
    names |= {_ARITHMETIC + lane: f"arithmetic{f' {lane + 1}' if lane else ''}" for lane in range(len(free))}
    for thread, name in names.items():
        yield {"ph": "M", "pid": worker, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": worker, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _arrows(recorded: Mapping[int, Activities], began: int) -> Iterator[dict[str, Any]]:
    """Yield an arrow for each message, from the beginning of its send to the end of its receive, inside of the two."""
    messages = {worker: mine.messages for worker, mine in recorded.items()}
    for number, arrow in enumerate(meet(messages).arrows):
        sent, received = messages[arrow.sender][arrow.sent], messages[arrow.receiver][arrow.received]
        common = {"cat": "message", "name": "message", "id": number, "tid": _MESSAGES}
        yield {"ph": "s", "pid": arrow.sender, "ts": (sent.start + 1 - began) / 1e3, **common}
        yield {"ph": "f", "bp": "e", "pid": arrow.receiver, "ts": (received.end - 1 - began) / 1e3, **common}


def _slice(worker: int, thread: int, name: str, start: int, took: int, about: dict[str, str]) -> dict[str, Any]:
    where = {"pid": worker, "tid": thread, "ts": start / 1e3, "dur": took / 1e3}
    return {"ph": "X", "name": name, **where, **({"args": about} if about else {})}
