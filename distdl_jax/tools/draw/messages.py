"""Drawings of messages between workers: arrows in order, or a square for each pair."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from distdl_jax.plans.decomposition import Box
from distdl_jax.text import Drawing, bytes_text, tint
from distdl_jax.tools.draw import svg
from distdl_jax.tools.draw.grids import MOST, named
from distdl_jax.tools.draw.svg import Part
from distdl_jax.watchdog.programs.diagnosis import describe
from distdl_jax.watchdog.programs.ir import Operation, operations
from distdl_jax.watchdog.programs.matching import play_back
from distdl_jax.watchdog.programs.report import Report

Amounts = Mapping[tuple[int, int], tuple[int, int]]
"""The number of messages, and of bytes, from one worker to another."""

MOST_EVENTS = 160
"""The number of messages that are drawn in order."""

MOST_TITLES = 1024
"""The number of squares with text; more are drawn as shades only."""

TOP, ROW = 34, 24
"""Pixels above the first message in order, and between messages."""


class DrawnEvent(NamedTuple):
    """A message, or a team operation.

    - `kind`: "message", or MPI's name of the operation.
    - `team`: the sender and the receiver, or the workers of the operation.
    - `nbytes`: of the message, or passed by each worker to the operation.
    - `what`: the layer, and the number of repetitions.
    - `root`: for an operation that has one.
    - `box`: of the whole tensor, if in the message; `axis`: the dimension along which it is a halo.
    """

    kind: str
    team: tuple[int, ...]
    nbytes: int
    what: str = ""
    root: int | None = None
    box: Box = ()
    axis: int = -1

    @property
    def is_message(self) -> bool:
        return self.kind == "message"

    @property
    def about(self) -> str:
        """The tooltip."""
        return f"{'{} to {}'.format(*self.team) if self.is_message else self.kind}: {self.nbytes:,} bytes"

    def __str__(self) -> str:
        what = f"  {self.what}" if self.what else ""
        if self.is_message:
            return f"{self.team[0]} \N{RIGHTWARDS ARROW} {self.team[1]}  {self.nbytes:,} bytes{what}"
        return f"{self.kind} of {named(sorted(self.team))}  {self.nbytes:,} bytes{what}"


def amounts_of(messages: Iterable[DrawnEvent]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the number of messages and bytes from each worker to each other."""
    amounts: dict[tuple[int, int], tuple[int, int]] = {}
    for message in messages:
        source, dest = message.team
        count, size = amounts.get((source, dest), (0, 0))
        amounts[source, dest] = count + 1, size + message.nbytes
    return amounts


def message_squares(workers: Sequence[int], amounts: Amounts) -> Part:
    """Draw a square for every pair of workers: rows send, columns receive; darker for more bytes."""
    cell = max(2.5, min(36.0, 400 / max(len(workers), 1)))
    edge, side = 34, cell * len(workers)
    place = {worker: edge + cell * i for i, worker in enumerate(workers)}
    most = max((size for _, size in amounts.values()), default=1) or 1
    body = [
        svg.text(edge + side / 2, 10, "to", 11, fill=svg.GREY),
        svg.text(4, edge + side / 2, "from", 11, "start", svg.GREY),
        svg.rect((edge, edge, side, side), "none", svg.GREY),
    ]
    for worker in workers[:: math.ceil(22 / cell)]:  # so that labels don't overlap
        at = place[worker] + cell / 2
        body.append(svg.text(at, edge - 6, worker, 10, fill=svg.GREY))
        if abs(at - edge - side / 2) > 9:
            body.append(svg.text(edge - 6, at + 3.5, worker, 10, "end", svg.GREY))
    shades: dict[int, list[str]] = {}
    for (source, dest), (count, size) in sorted(amounts.items()):
        # On a logarithmic scale, since halos and whole blocks differ by orders of magnitude.
        shade = 1 + round(9 * math.log1p(size) / math.log1p(most))
        x, y = place[dest], place[source]
        if len(amounts) <= MOST_TITLES:
            about = f"{source} to {dest}: {count:,} messages, {size:,} bytes"
            body.append(svg.rect((x, y, cell, cell), svg.INK, "", about, fill_opacity=f"{shade * 0.085:.2f}"))
        else:
            shades.setdefault(shade, []).append(f"M{svg.number(x)} {svg.number(y)}h{cell:.2f}v{cell:.2f}h-{cell:.2f}z")
    for shade, squares in sorted(shades.items()):
        body.append(svg.element("path", d="".join(squares), fill=svg.INK, fill_opacity=f"{shade * 0.085:.2f}"))
    return Part(edge + side + 4, edge + side + 4, tuple(body))


def message_lines(events: Sequence[DrawnEvent], workers: Sequence[int], waiting: Mapping[int, str]) -> Part:
    """Draw messages in order: a vertical line for each worker, with an arrow for each message.

    `waiting` are blocked workers, and the operations in which they wait.
    """
    pitch = min(120.0, max(26.0, 760 / max(len(workers), 1)))
    x_of = {worker: pitch * (i + 0.5) for i, worker in enumerate(workers)}
    next_row, right = dict.fromkeys(workers, 0), pitch * len(workers) + 8
    taken: list[list[tuple[float, float]]] = []
    labels: list[dict[str, None]] = []
    marks: list[str] = []
    for event in events:
        team = [x_of[worker] for worker in event.team]
        first, last = min(team), max(team)
        row = max(next_row[worker] for worker in event.team)
        while row < len(taken) and any(first < stop and start < last for start, stop in taken[row]):
            row += 1
        while row >= len(taken):
            taken.append([])
            labels.append({})
        taken[row].append((first, last))
        next_row |= dict.fromkeys(event.team, row + 1)
        labels[row] |= {event.what: None} if event.what else {}
        marks.append(_on_lines(event, team, TOP + ROW * (row + 0.5)))
    bottom = TOP + ROW * (max(len(taken) - 1, 0) + 1.2)
    body = []
    for worker, x in x_of.items():
        body.append(svg.line((x, 22), (x, bottom), svg.FAINT, 1.5))
        body.append(svg.rect((x - 12, 0, 24, 22), tint(worker)) + svg.text(x, 15.5, worker, 12))
    texts = ["; ".join(names) for names in labels]
    shown = ""
    for row, what in enumerate(texts):
        if what and what != shown:
            body.append(svg.text(right, TOP + ROW * (row + 0.5) + 3.5, what, 11, "start", svg.GREY))
            shown = what
    for worker, what in waiting.items():
        x, y = x_of[worker], TOP + ROW * (next_row[worker] + 0.5)
        marks.append(svg.circle((x, y), 8, what, fill=svg.PAPER, stroke=svg.STRONG, stroke_width="2"))
        marks.append(svg.text(x, y + 4.5, "?", 13, fill=svg.STRONG))
    width = right + max((svg.width_of(what, 11) for what in texts), default=0)
    lines = [f"? worker {worker} waits: {what}" for worker, what in waiting.items()]
    return svg.below([Part(width, bottom, (*body, *marks)), svg.words(lines[:12], 11, svg.STRONG)], 10)


def _on_lines(event: DrawnEvent, team: Sequence[float], y: float) -> str:
    """Return an arrow between the lines of two workers, or dots on those of a team, and the bytes if they fit."""
    ends = sorted(team)
    first, last = ends[0], ends[-1]
    size, middle = bytes_text(event.nbytes), (first + last) / 2
    if event.is_message:
        mark = svg.arrow((team[0], y), (team[1], y), event.about)
    else:
        mark = svg.line((first, y), (last, y), svg.INK, 1.5, stroke_dasharray="5 3")
        mark += "".join(svg.circle((x, y), 4, event.about) for x in ends)
        size, middle = f"{event.kind} {size}", sum(ends[(len(ends) - 1) // 2 :][:2]) / 2
    width = svg.width_of(size, 10)
    if last - first <= width + 22:
        return mark
    paper = svg.rect((middle - width / 2 - 2, y - 15, width + 4, 10.5), svg.PAPER, "")
    return mark + paper + svg.text(middle, y - 6, size, 10, fill=svg.GREY)


def draw_messages(
    title: str, workers: Sequence[int], events: Sequence[DrawnEvent], waiting: Mapping[int, str], notes: Sequence[str]
) -> Drawing:
    """Draw messages in order, and the workers that wait for ever."""
    lanes = workers[:MOST]
    drawn = [event for event in events if {*event.team} <= {*lanes}][:MOST_EVENTS]
    waiting = {worker: what for worker, what in waiting.items() if worker in lanes}
    notes = list(notes)
    if len(workers) > len(lanes):
        notes.append(f"Omitted: {len(workers) - len(lanes):,} more workers, and their messages.")
    if len(events) > len(drawn):
        notes.append(f"Drawn are {len(drawn):,} of {len(events):,} messages and team operations.")
    plain = [title, *(f"{i:4}. {event}" for i, event in enumerate(drawn, 1))]
    plain += [f"worker {worker} waits: {what}" for worker, what in waiting.items()]
    about = f"{len(workers):,} workers. " + ". ".join(map(str, drawn[:64]))
    picture = svg.below([svg.heading(title, 15), message_lines(drawn, lanes, waiting), svg.words(notes)], 14)
    return Drawing(svg.document(title, about, picture), "\n".join([*plain, *notes]))


def draw_totals(report: Report) -> Drawing:
    """Draw the messages and bytes of a report between each pair of workers; the text is its matrix."""
    amounts = report.messages()
    count, size = (sum(each[place] for each in amounts.values()) for place in (0, 1))
    total = svg.words([f"{count:,} messages, {size:,} bytes; darker for more bytes"])
    head = svg.heading(f"{report.name}: bytes sent, rows to columns")
    picture = svg.below([head, message_squares(sorted(report.programs), amounts), total], 10)
    about = "A square for each pair of workers: rows send, columns receive."
    plain = f"{report.name}: bytes sent\n{report.matrix()}"
    return Drawing(svg.document(f"{report.name}: messages between workers", about, picture), plain)


def draw_report(report: Report) -> Drawing:
    """Draw a report's messages in order: a line for each worker, and an arrow for each message, with its bytes.

    If the programs don't complete, it shows how far they get, and in which operations workers wait.
    """
    happened, waiting = play_back(report.programs)
    listed = {rank: list(operations(program, first_branch=True)) for rank, program in report.programs.items()}
    events = [
        DrawnEvent(
            "message" if op.is_message else op.kind, tuple(team), op.bytes_sent, _what(*listed[team[0]][place - 1])
        )
        for op, team, place in happened
    ]
    amounts = report.messages().values()
    total, count = sum(size for _, size in amounts), sum(count for count, _ in amounts)
    title = f"{report.name}: {count:,} messages, {total:,} bytes, in order"
    waits = {worker: describe(op) for worker, op in waiting.items()}
    return draw_messages(title, sorted(report.programs), events, waits, [report.problem] if report.problem else [])


def _what(op: Operation, times: int | None) -> str:
    """Return the layer that an operation is part of, whether backward, and how often."""
    parts = [op.place.layer.rsplit("/", 1)[-1], "backward" * op.place.backward]
    often = "" if times == 1 else "as often as the data decide" if times is None else f"{times} times"
    return ", ".join(part for part in (*parts, often) if part)
