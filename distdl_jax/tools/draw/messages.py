"""What goes from worker to worker, drawn: arrows on grids of blocks, arrows in order, or squares for each pair."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import NamedTuple

from distdl_jax.plans.decomposition import Box, Range, intersect
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.text import Drawing, bytes_text
from distdl_jax.tools.draw import svg
from distdl_jax.tools.draw.grids import MOST, Blocks, Grid, lay_out, named, titled
from distdl_jax.tools.draw.svg import Area, Part, Point

Amounts = Mapping[tuple[int, int], tuple[int, int]]
"""The number of messages, and of bytes, from one worker to another."""

MOST_ARROWS = 40
"""How many messages of a movement are drawn as arrows; more are drawn as squares."""

MOST_STEPS = 16
"""How many movements of one layer are drawn."""

MOST_EVENTS = 160
"""How many messages are drawn in order."""

MOST_TITLES = 1024
"""How many squares have a text of their own; more are drawn shade by shade."""


class Event(NamedTuple):
    """A message, or an operation of a team.

    - `kind`: "message", or MPI's name of the operation.
    - `team`: the sender and the receiver, or the workers of the operation.
    - `nbytes`: of the message, or that each worker hands to the operation.
    - `what`: the layer, and how often it is done.
    - `root`: of an operation that has one.
    - `box`: of the whole tensor, that is in the message; `axis`: the dimension that it is a halo along.
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
        """What a pointer over it shows."""
        return f"{'{} to {}'.format(*self.team) if self.is_message else self.kind}: {self.nbytes:,} bytes"

    def __str__(self) -> str:
        what = f"  {self.what}" if self.what else ""
        if self.is_message:
            return f"{self.team[0]} \N{RIGHTWARDS ARROW} {self.team[1]}  {self.nbytes:,} bytes{what}"
        return f"{self.kind} of {named(sorted(self.team))}  {self.nbytes:,} bytes{what}"


@dataclass(frozen=True)
class Step:
    """A movement, as it is drawn.

    - `name`: of the movement, and what it moves.
    - `events`: its messages and operations of teams; `left_out`: how many messages are with workers not drawn.
    - `before`, `after`: the tensor; None where it is not known as a whole.
    - `pieces`: the messages with their boxes, or the halos of `before` that are received.
    - `shapes`: of blocks before and after, by worker.
    """

    name: str
    events: tuple[Event, ...] = ()
    left_out: int = 0
    before: Blocks | None = None
    after: Blocks | None = None
    pieces: tuple[Event, ...] = ()
    shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def messages(self) -> list[Event]:
        return [event for event in self.events if event.is_message]

    @property
    def calls(self) -> list[Event]:
        """The operations of teams."""
        return [event for event in self.events if not event.is_message]

    @property
    def has_halos(self) -> bool:
        return any(piece.axis >= 0 for piece in self.pieces)

    @property
    def title(self) -> str:
        """The movement in words."""
        parts = []
        if self.messages:
            total = sum(message.nbytes for message in self.messages)
            parts.append(f"{len(self.messages):,} message{'s' * (len(self.messages) > 1)}, {total:,} bytes")
        for kind, count in sorted(Counter(call.kind for call in self.calls).items()):
            nbytes = next(call.nbytes for call in self.calls if call.kind == kind)
            parts.append(f"{count} {kind}{'s' * (count > 1)} of {nbytes:,} bytes")
        more = f"; {self.left_out:,} messages with workers that are left out" if self.left_out else ""
        return f"{self.name}: {', '.join(parts) or 'no message'}{more}"

    @property
    def lines(self) -> list[str]:
        """The messages in words, those of equal length together."""
        by_size: dict[int, list[str]] = {}
        for message in sorted(self.messages, key=lambda message: message.team[0]):
            by_size.setdefault(message.nbytes, []).append("{} \N{RIGHTWARDS ARROW} {}".format(*message.team))
        lines = []
        for size, pairs in sorted(by_size.items(), reverse=True)[:6]:
            more = f", and {len(pairs) - 48} more" if len(pairs) > 48 else ""
            lines += wrap(f"{size:,} bytes{' each' * (len(pairs) > 1)}: {', '.join(pairs[:48])}{more}", LETTERS)
        if len(by_size) > 6:
            lines.append(f"and messages of {len(by_size) - 6} other lengths")
        for call in self.calls[:8]:
            root = "" if call.root is None else f" with root {call.root}"
            lines.append(f"{call.kind} of {call.nbytes:,} bytes among {named(sorted(call.team))}{root}")
        if len(self.calls) > 8:
            lines.append(f"and {len(self.calls) - 8} more operations of teams")
        return lines

    def draw(self) -> Part:
        """Return the picture: halos, arrows from block to block, squares for many messages, or workers in a row."""
        if self.before is not None and self.has_halos:
            return titled(self.before, draw_halos(self.before, self.pieces))
        ends = [blocks for blocks in (self.before, self.after) if blocks is not None]
        if len(self.messages) + sum(len(call.team) for call in self.calls) > MOST_ARROWS:
            amounts: dict[tuple[int, int], tuple[int, int]] = {}
            for message in self.messages:
                source, dest = message.team
                count, size = amounts.get((source, dest), (0, 0))
                amounts[source, dest] = count + 1, size + message.nbytes
            squares = [message_squares(sorted({w for pair in amounts for w in pair}), amounts)] if amounts else []
            return svg.beside([*map(titled, ends), *squares])
        is_single = all(len(block.workers) == 1 for blocks in ends for block in blocks.blocks)
        if len(ends) == 2 and is_single and not self.calls:
            return _between(self, *ends)
        workers = sorted({worker for event in self.events for worker in event.team})
        return svg.below(
            [svg.beside(map(titled, ends)), message_lines(self.events, workers, {}), svg.words(self._shapes())]
        )

    def _shapes(self) -> list[str]:
        """Return the shapes of blocks before and after, workers with the same ones together."""
        same: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for worker in sorted({worker for event in self.events for worker in event.team} & {*self.shapes}):
            same.setdefault(self.shapes[worker], []).append(worker)
        return [
            f"{named(workers)}: {shape_text(before)} before, {shape_text(after)} after"
            for (before, after), workers in same.items()
        ]


def _area_of(grid: Grid, worker: int, box: Box) -> Area:
    """Return where a box is in the block of a worker, or beside the block where it is outside of it."""
    (x, y, w, h), drawn, own = grid.face_of[worker].area, grid.blocks.drawn, grid.face_of[worker].block.box
    if drawn:
        x, w = _span(x, w, own[drawn[-1]], box[drawn[-1]])
    if len(drawn) > 1:
        y, h = _span(y, h, own[drawn[-2]], box[drawn[-2]])
    return x, y, w, h


def _span(at: float, length: float, own: Range, bounds: Range) -> tuple[float, float]:
    def pixel(i: int) -> float:
        if i < own[0]:
            return at - _beyond(own[0] - i)
        return at + length + _beyond(i - own[1]) if i > own[1] else at + length * (i - own[0]) / (own[1] - own[0])

    return pixel(bounds[0]), pixel(bounds[1]) - pixel(bounds[0])


def _beyond(entries: int) -> float:
    """Return how many pixels so many entries of a halo take: wide ones must not take all of the paper."""
    return 9 * math.log2(1 + entries)


def draw_halos(blocks: Blocks, halos: Sequence[Event]) -> Part:
    """Draw blocks with the halos that arrive: an arrow for each message, and one for all those between two panels."""
    boxes = {worker: block.box for block in blocks.blocks for worker in block.workers}
    on_face = [halo for halo in halos if halo.axis in blocks.drawn[-2:]]
    reach, far = 0, False
    for halo in on_face:
        bounds, own = halo.box[halo.axis], boxes[halo.team[1]][halo.axis]
        reach, far = max(reach, own[0] - bounds[0], bounds[1] - own[1]), far or not _is_near(halo, boxes)
    grid = lay_out(blocks, 2 * _beyond(reach) + 18 + 14 * far, _beyond(reach) + (30 if far else 6))
    marks: list[str] = []
    arrows: list[str] = []
    for halo in sorted(on_face, key=lambda halo: (halo.axis, halo.team)):
        source, dest = halo.team
        strip, (x, y, w, h) = _area_of(grid, dest, halo.box), grid.face_of[dest].area
        marks.append(svg.hatched(strip, svg.tint(source), halo.about))
        side = -1 if halo.box[halo.axis][0] < boxes[dest][halo.axis][0] else 1
        # Beside the middle, so that there and back don't overlap.
        beside = x + w * (0.5 + 0.2 * side), y + h * (0.5 + 0.2 * side)
        is_across = halo.axis == blocks.drawn[-1]
        stop = _middle(strip, beside, is_across)
        if _is_near(halo, boxes):
            sent = _area_of(grid, source, intersect(halo.box, boxes[source]))
            marks.append(svg.dashed(sent))
            start = _middle(sent, beside, is_across)
        else:  # from the sender's number
            away = (strip[2 if is_across else 3] / 2 + 16) * side
            start = (stop[0] + away, stop[1]) if is_across else (stop[0], stop[1] + away)
            at = (start[0] + 8 * side, start[1]) if is_across else (start[0], start[1] + 8 * side)
            arrows.append(svg.text(at[0], at[1] + 3.5, source, 10, fill=svg.GREY))
        arrows.append(svg.arrow(start, stop, halo.about))
    legend = svg.words(["Hatched: entries of neighbours. Dashed: entries that are sent."])
    between = [halo for halo in halos if halo.axis not in blocks.drawn[-2:]]
    return svg.below([grid.draw([*marks, *arrows]), _between_panels(grid, between), legend], 6)


def _is_near(halo: Event, boxes: Mapping[int, Box]) -> bool:
    """Say whether a halo is from the next block on its side, not from further away or round the tensor."""
    (start, stop), (first, last) = (boxes[worker][halo.axis] for worker in halo.team)
    return start < stop and (stop == first if halo.box[halo.axis][0] < first else start == last)


def _middle(area: Area, beside: Point, is_across: bool) -> Point:
    """Return the middle of an area in one direction, and the coordinate of a point in the other one."""
    x, y, w, h = area
    return (x + w / 2, beside[1]) if is_across else (beside[0], y + h / 2)


def _between_panels(grid: Grid, halos: Sequence[Event]) -> Part:
    """Return a line for each panel and each other one that it sends to, with the number of messages and bytes."""
    bundles: dict[tuple[int, ...], list[int]] = {}
    for halo in halos:
        bundles.setdefault(tuple(grid.face_of[worker].panel for worker in halo.team), []).append(halo.nbytes)
    captions = [grid.blocks.caption(panel) for panel in grid.blocks.panels]
    left, marks = max(map(svg.width_of, captions)) + 4, []
    for i, ((one, other), some) in enumerate(sorted(bundles.items())):
        count, total, y = f"{len(some)} message{'s' * (len(some) > 1)}", sum(some), 18 * i + 11
        marks.append(svg.text(0, y, captions[one], 11, "start"))
        marks.append(svg.arrow((left, y - 4), (left + 50, y - 4), f"{count}, {total:,} bytes"))
        marks.append(svg.text(left + 58, y, f"{captions[other]}: {count}, {bytes_text(total)}", 11, "start"))
    return Part(2 * left + 240, 18 * len(bundles), tuple(marks))


def _between(step: Step, before: Blocks, after: Blocks) -> Part:
    """Draw the tensor before and after beside each other, with arrows from box to box, or from block to block."""
    first, second = lay_out(before), lay_out(after)
    across = max(first.width, svg.width_of(before.title, 13), 150) + 84
    sent, arrived, arrows, of_source = list[str](), list[str](), list[str](), Counter[int]()
    for piece in step.pieces:
        source, dest = piece.team
        (x, y, w, h), (to_x, to_y, to_w, to_h) = _area_of(first, source, piece.box), _area_of(second, dest, piece.box)
        sent.append(svg.dashed((x, y, w, h)))
        arrived.append(svg.hatched((to_x, to_y, to_w, to_h), svg.tint(source), piece.about))
        of_source[source] += 1  # so that arrows from one block don't run on one line
        part = of_source[source] / (1 + sum(other.team[0] == source for other in step.pieces))
        start, stop = (x + w / 2, y + h * part), (across + to_x + to_w / 2, to_y + to_h * part)
        arrows += [svg.dot(start, 2.5), svg.arrow(start, stop, piece.about)]
    here = {worker: face.middle for worker, face in first.face_of.items()}
    there = {worker: (x + across, y) for worker, face in second.face_of.items() for x, y in [face.middle]}
    if not step.pieces:
        arrows = [arrow for message in step.messages for arrow in _arrow(message, here, there)]
    # Numbers on top of the arrows that go over them.
    arrows += [_badge(at, worker) for places in (here, there) for worker, at in places.items()]
    left, right = titled(before, first.draw(sent)), titled(after, second.draw(arrived))
    on_top = Part(0, 0, tuple(arrows)).at(0, svg.heading("x").height + 8)
    return Part(across + right.width, max(left.height, right.height), (left.at(0, 0), right.at(across, 0), on_top))


def _arrow(message: Event, here: Mapping[int, Point], there: Mapping[int, Point]) -> list[str]:
    """Return an arrow from a block before to a block after.

    A worker that passes on what it has got begins at its block after; one that adds to a sum for another ends before.
    """
    source, dest = message.team
    start, stop = here.get(source, there.get(source)), there.get(dest, here.get(dest))
    if start is None or stop is None:
        return []
    length = max(math.dist(start, stop), 1)
    x, y = 12 * (stop[0] - start[0]) / length, 12 * (stop[1] - start[1]) / length
    is_aside = (source in here) != (dest in there)
    bend = (34 if (stop[1] > start[1]) == (source in here) else -34) * is_aside
    return [svg.arrow((start[0] + x, start[1] + y), (stop[0] - x, stop[1] - y), message.about, bend)]


def _badge(at: Point, worker: int) -> str:
    """Return a number on a disc of paper, in the middle of a block that other marks are on."""
    width = max(19.0, 9 + svg.width_of(str(worker), 12))
    return svg.rect((at[0] - width / 2, at[1] - 9.5, width, 19), svg.PAPER, rx=9.5) + svg.text(
        at[0], at[1] + 4.2, worker, 12
    )


def message_squares(workers: Sequence[int], amounts: Amounts) -> Part:
    """Draw a square for every pair of workers: rows send, columns receive; darker where more bytes go."""
    cell = max(2.5, min(36.0, 400 / max(len(workers), 1)))
    edge, side = 34, cell * len(workers)
    place = {worker: i for i, worker in enumerate(workers)}
    most = max((size for _, size in amounts.values()), default=1) or 1
    body = [
        svg.text(edge + side / 2, 10, "to", 11, fill=svg.GREY),
        svg.text(4, edge + side / 2, "from", 11, "start", svg.GREY),
    ]
    for worker in workers[:: math.ceil(22 / cell)]:  # so that labels don't overlap
        at = edge + cell * (place[worker] + 0.5)
        body.append(svg.text(at, edge - 6, worker, 10, fill=svg.GREY))
        if abs(at - edge - side / 2) > 9:
            body.append(svg.text(edge - 6, at + 3.5, worker, 10, "end", svg.GREY))
    body.append(svg.rect((edge, edge, side, side), "none", svg.GREY))
    shades: dict[int, list[str]] = {}
    for (source, dest), (count, size) in sorted(amounts.items()):
        # By the logarithm, since halos and whole blocks differ by orders of magnitude.
        shade = 1 + round(9 * math.log1p(size) / math.log1p(most))
        x, y = edge + cell * place[dest], edge + cell * place[source]
        if len(amounts) <= MOST_TITLES:
            about = f"{source} to {dest}: {count:,} messages, {size:,} bytes"
            body.append(svg.rect((x, y, cell, cell), svg.INK, "", about, fill_opacity=f"{shade * 0.085:.2f}"))
        else:
            shades.setdefault(shade, []).append(f"M{svg.number(x)} {svg.number(y)}h{cell:.2f}v{cell:.2f}h-{cell:.2f}z")
    for shade, squares in sorted(shades.items()):
        body.append(svg.element("path", d="".join(squares), fill=svg.INK, fill_opacity=f"{shade * 0.085:.2f}"))
    return Part(edge + side + 4, edge + side + 4, tuple(body))


ROW, LETTERS = 24, 92
"""Pixels from one message in order to the next; letters of a line of text."""


def message_lines(events: Sequence[Event], workers: Sequence[int], waiting: Mapping[int, str]) -> Part:
    """Draw messages in order: a line for each worker goes down, with an arrow for each message.

    `waiting` are workers that can't go on, and the operations that they wait in.
    """
    pitch = min(120.0, max(26.0, 760 / max(len(workers), 1)))
    x_of = {worker: pitch * (i + 0.5) for i, worker in enumerate(workers)}
    next_row, right = dict.fromkeys(workers, 0), pitch * len(workers) + 8
    taken: list[list[tuple[float, float]]] = []
    marks: list[str] = []
    labels: dict[int, list[str]] = {}
    for event in events:
        ends = sorted(x_of[worker] for worker in event.team)
        row = max(next_row[worker] for worker in event.team)
        while row < len(taken) and any(ends[0] < last and first < ends[-1] for first, last in taken[row]):
            row += 1
        taken += [[] for _ in range(row - len(taken) + 1)]
        taken[row].append((ends[0], ends[-1]))
        next_row |= dict.fromkeys(event.team, row + 1)
        y = 34 + ROW * (row + 0.5)
        if event.is_message:
            source, dest = (x_of[worker] for worker in event.team)
            marks.append(svg.arrow((source, y), (dest, y), event.about))
            size, middle = bytes_text(event.nbytes), (source + dest) / 2
        else:
            marks.append(svg.line((ends[0], y), (ends[-1], y), svg.INK, 1.5, stroke_dasharray="5 3"))
            marks += [svg.dot((end, y), 4, event.about) for end in ends]
            size, middle = f"{event.kind} {bytes_text(event.nbytes)}", sum(ends[:2]) / 2
        width = svg.width_of(size, 10)
        if ends[-1] - ends[0] > width + 22:
            marks.append(svg.rect((middle - width / 2 - 2, y - 13.5, width + 4, 11), svg.PAPER, ""))
            marks.append(svg.text(middle, y - 5, size, 10, fill=svg.GREY))
        if event.what and event.what not in labels.setdefault(row, []):
            labels[row].append(event.what)
    bottom = 34 + ROW * (max(len(taken) - 1, 0) + 1.2)
    body = []
    for worker, x in x_of.items():
        body.append(svg.line((x, 22), (x, bottom), svg.FAINT, 1.5))
        body.append(svg.rect((x - 12, 0, 24, 22), svg.tint(worker)) + svg.text(x, 15.5, worker, 12))
    shown = ""
    for row, names in sorted(labels.items()):
        what = "; ".join(names)
        if what and what != shown:
            body.append(svg.text(right, 34 + ROW * (row + 0.5) + 3.5, what, 11, "start", svg.GREY))
        shown = what
    for worker, what in waiting.items():
        at = x_of[worker], 34 + ROW * (next_row[worker] + 0.5)
        disc = svg.element("circle", what, cx=at[0], cy=at[1], r=8, fill=svg.PAPER, stroke=svg.STRONG, stroke_width="2")
        marks.append(disc + svg.text(at[0], at[1] + 4.5, "?", 13, fill=svg.STRONG))
    width = right + max((svg.width_of("; ".join(names), 11) for names in labels.values()), default=0)
    lines = [f"? worker {worker} waits: {what}" for worker, what in waiting.items()]
    return svg.below([Part(width, bottom, (*body, *marks)), svg.words(lines[:12], 11, svg.STRONG)], 10)


def draw_steps(title: str, tensors: Sequence[Blocks], steps: Sequence[Step], notes: Sequence[str] = ()) -> Drawing:
    """Draw a layer: the tensors before and after, then its movements in order."""
    moving = [step for step in steps if step.events or step.left_out]
    shown, rest = moving[:MOST_STEPS], moving[MOST_STEPS:]
    notes = list(notes)
    if rest:
        left_out = [message for step in rest for message in step.messages]
        total = sum(message.nbytes for message in left_out)
        notes.append(f"Left out: {len(rest)} more movements, of {len(left_out):,} messages and {total:,} bytes.")
    if not moving:
        notes.append("No message is sent.")
    in_steps = [blocks for step in shown for blocks in (step.before, step.after)]
    alone = [blocks for blocks in tensors if blocks not in in_steps]
    parts = [svg.heading(title, 15), svg.beside(map(titled, alone), 36)]
    plain = [title, *(blocks.text for blocks in alone)]
    for i, step in enumerate(shown, 1):
        step_title = f"{i}. " * (len(shown) > 1) + step.title
        lines = svg.words(step.lines if len(step.messages) <= 96 else [])
        parts.append(svg.below([svg.heading(step_title), step.draw(), lines], 10))
        ends = [blocks.text for blocks in (step.before, step.after) if blocks is not None]
        plain.append("\n".join([*ends, step_title, *(f"  {each}" for each in step.lines)]))
    about = ". ".join([*(blocks.title for blocks in tensors), *(step.title for step in shown)])
    text = "\n\n".join([*plain, *(["\n".join(notes)] if notes else [])])
    return Drawing(svg.document(title, about, svg.below([*parts, svg.words(notes)])), text)


def draw_messages(
    title: str, workers: Sequence[int], events: Sequence[Event], waiting: Mapping[int, str], notes: Sequence[str]
) -> Drawing:
    """Draw messages in order, and who waits for ever."""
    lanes = workers[:MOST]
    drawn = [event for event in events if {*event.team} <= {*lanes}][:MOST_EVENTS]
    waiting = {worker: what for worker, what in waiting.items() if worker in lanes}
    notes = list(notes)
    if len(workers) > len(lanes):
        notes.append(f"Left out: {len(workers) - len(lanes):,} more workers, and their messages.")
    if len(events) > len(drawn):
        notes.append(f"Drawn are {len(drawn):,} of {len(events):,} messages and operations of teams.")
    plain = [title, *(f"{i:4}. {event}" for i, event in enumerate(drawn, 1))]
    plain += [f"worker {worker} waits: {what}" for worker, what in waiting.items()]
    about = f"{len(workers):,} workers. " + ". ".join(map(str, drawn[:64]))
    picture = svg.below([svg.heading(title, 15), message_lines(drawn, lanes, waiting), svg.words(notes)], 14)
    return Drawing(svg.document(title, about, picture), "\n".join([*plain, *notes]))


def draw_amounts(title: str, workers: Sequence[int], amounts: Amounts, plain: str) -> Drawing:
    """Draw who sends how much to whom."""
    count, size = (sum(each[place] for each in amounts.values()) for place in (0, 1))
    total = svg.words([f"{count:,} messages, {size:,} bytes; darker where more bytes go"])
    head = svg.heading(f"{title}: bytes sent, rows to columns")
    picture = svg.below([head, message_squares(workers, amounts), total], 10)
    about = "A square for each pair of workers: rows send, columns receive."
    return Drawing(svg.document(f"{title}: messages between workers", about, picture), plain)
