"""Messages in order, drawn: a line for each worker, from above to below, and an arrow for each message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distdl_jax.drawing.blocks import MOST, named
from distdl_jax.drawing.drawing import Drawing
from distdl_jax.drawing.svg import (
    FAINT,
    GREY,
    INK,
    PAPER,
    STRONG,
    Part,
    arrow,
    below,
    bytes_text,
    document,
    line,
    rect,
    text,
    tint,
    width_of,
    words,
    wrapped,
)

MOST_EVENTS = 160
"""How many messages are drawn."""


class Event(NamedTuple):
    """A message, or an operation of a team.

    - `kind`: "message", or MPI's name of the operation.
    - `team`: the sender and the receiver, or the workers of the operation.
    - `nbytes`: of the message, or that each worker hands to the operation.
    - `what`: the layer, and how often it is done.
    """

    kind: str
    team: tuple[int, ...]
    nbytes: int
    what: str

    def __str__(self) -> str:
        what = f"  {self.what}" if self.what else ""
        if self.kind == "message":
            source, dest = self.team
            return f"{source} \N{RIGHTWARDS ARROW} {dest}  {self.nbytes:,} bytes{what}"
        return f"{self.kind} of {named(sorted(self.team))}  {self.nbytes:,} bytes{what}"


class Waits(NamedTuple):
    """A worker that can't go on, and the operation that it waits in."""

    worker: int
    what: str


ROW = 24


def draw_timeline(
    title: str, workers: Sequence[int], events: Sequence[Event], waiting: Sequence[Waits], notes: Sequence[str]
) -> Drawing:
    """Draw events in order; those of workers apart from each other are side by side."""
    lanes = {worker: place for place, worker in enumerate(workers[:MOST])}
    drawn = [event for event in events if all(worker in lanes for worker in event.team)][:MOST_EVENTS]
    notes = list(notes)
    if len(workers) > len(lanes):
        notes.append(f"Left out: {len(workers) - len(lanes):,} more workers, and their messages.")
    if len(events) > len(drawn):
        notes.append(f"Drawn are {len(drawn):,} of {len(events):,} messages and operations of teams.")
    stuck = [each for each in waiting if each.worker in lanes]
    heading = words(wrapped(title), 15, INK, ' font-weight="bold"')
    parts = [heading, _picture(lanes, drawn, stuck)]
    parts += [words([each for note in notes for each in wrapped(note)], 11)] if notes else []
    plain = [title, *(f"{i:4}. {event}" for i, event in enumerate(drawn, 1))]
    plain += [f"worker {each.worker} waits: {each.what}" for each in stuck]
    about = f"{len(workers):,} workers. " + ". ".join(map(str, drawn[:64]))
    return Drawing(document(title, about, below(parts, 14)), "\n".join([*plain, *notes]))


def _picture(lanes: dict[int, int], events: Sequence[Event], waiting: Sequence[Waits]) -> Part:
    pitch = min(120.0, max(26.0, 760 / max(len(lanes), 1)))
    rows, level = _rows(lanes, events)
    top, last = 34, max([*rows, *(level[each.worker] for each in waiting)], default=0)
    bottom = top + ROW * (last + 1.2)

    def x(worker: int) -> float:
        return pitch * (lanes[worker] + 0.5)

    body = []
    for worker in lanes:
        body.append(line((x(worker), 22), (x(worker), bottom), FAINT, ' stroke-width="1.5"'))
        body.append(rect(x(worker) - 12, 0, 24, 22, tint(worker)) + text(x(worker), 15.5, worker, 12))
    labels: dict[int, str] = {}
    for event, row in zip(events, rows, strict=True):
        y = top + ROW * (row + 0.5)
        ends = sorted(x(worker) for worker in event.team)
        if event.kind == "message":
            source, dest = (x(worker) for worker in event.team)
            body.append(arrow((source, y), (dest, y), str(event)))
        else:
            body.append(line((ends[0], y), (ends[-1], y), INK, ' stroke-width="1.5" stroke-dasharray="5 3"'))
            for end in ends:
                body.append(f'<circle cx="{end:.1f}" cy="{y:.1f}" r="4" fill="{INK}"><title>{event}</title></circle>')
        size = bytes_text(event.nbytes) if event.kind == "message" else f"{event.kind} {bytes_text(event.nbytes)}"
        if ends[-1] - ends[0] > width_of(size, 10) + 22:
            middle = (x(event.team[0]) + x(event.team[1])) / 2 if event.kind == "message" else (ends[0] + ends[1]) / 2
            body.append(rect(middle - width_of(size, 10) / 2 - 2, y - 13.5, width_of(size, 10) + 4, 11, PAPER, ""))
            body.append(text(middle, y - 5, size, 10, fill=GREY))
        if event.what and event.what not in labels.get(row, ""):
            labels[row] = f"{labels[row]}; {event.what}" if row in labels else event.what
    right = pitch * len(lanes) + 8
    shown = ""
    for row, what in sorted(labels.items()):
        if what != shown:
            body.append(text(right, top + ROW * (row + 0.5) + 3.5, what, 11, "start", GREY))
        shown = what
    for each in waiting:
        at, y = x(each.worker), top + ROW * (level[each.worker] + 0.5)
        body.append(
            f'<circle cx="{at:.1f}" cy="{y:.1f}" r="8" fill="{PAPER}" stroke="{STRONG}" stroke-width="2">'
            f"<title>{each.what}</title></circle>" + text(at, y + 4.5, "?", 13, fill=STRONG)
        )
    width = right + max((width_of(what, 11) for what in labels.values()), default=0)
    lines = [f"? worker {each.worker} waits: {each.what}" for each in waiting[:12]]
    return below([Part(width, bottom, tuple(body)), *([words(lines, 11, STRONG)] if lines else [])], 10)


def _rows(lanes: dict[int, int], events: Sequence[Event]) -> tuple[list[int], dict[int, int]]:
    """Return the row of each event, after those before it, and where nothing else is; and each worker's next row."""
    level = dict.fromkeys(lanes, 0)
    taken: dict[int, list[tuple[int, int]]] = {}
    found = []
    for event in events:
        places = sorted(lanes[worker] for worker in event.team)
        row = max(level[worker] for worker in event.team)
        while any(places[0] < last and first < places[-1] for first, last in taken.get(row, ())):
            row += 1
        taken.setdefault(row, []).append((places[0], places[-1]))
        for worker in event.team:
            level[worker] = row + 1
        found.append(row)
    return found, level
