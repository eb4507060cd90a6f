"""The movements of a layer, drawn: arrows on grids of blocks, with the boxes or halos that are sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from distdl_jax.plans.decomposition import Box, Range, intersect
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.text import Drawing, bytes_text
from distdl_jax.tools.draw import svg
from distdl_jax.tools.draw.grids import Blocks, Grid, lay_out, named, titled
from distdl_jax.tools.draw.messages import Event, message_lines, message_squares
from distdl_jax.tools.draw.svg import Area, Part, Point

MOST_ARROWS = 40
"""How many messages of a movement are drawn as arrows; more are drawn as squares."""

MOST_STEPS = 16
"""How many movements of one layer are drawn."""

LETTERS = 92
"""Of a line of text."""


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
        parts = [svg.beside(map(titled, ends)), message_lines(self.events, workers, {}), svg.words(self._shapes())]
        return svg.below(parts)

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
    panel_of = {w: i for i, panel in enumerate(blocks.panels) for block in panel.blocks for w in block.workers}
    near = {halo for halo in on_face if _is_near(halo, boxes) and len({panel_of[w] for w in halo.team}) == 1}
    reach, far = 0, len(near) < len(on_face)
    for halo in on_face:
        bounds, own = halo.box[halo.axis], boxes[halo.team[1]][halo.axis]
        reach = max(reach, own[0] - bounds[0], bounds[1] - own[1])
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
        if halo in near:
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
        arrows = [_arrow(message, here, there) for message in step.messages]
    # Numbers on top of the arrows that go over them.
    arrows += [_badge(at, worker) for places in (here, there) for worker, at in places.items()]
    left, right = titled(before, first.draw(sent)), titled(after, second.draw(arrived))
    on_top = Part(0, 0, tuple(arrows)).at(0, svg.heading("x").height + 8)
    return Part(across + right.width, max(left.height, right.height), (left.at(0, 0), right.at(across, 0), on_top))


def _arrow(message: Event, here: Mapping[int, Point], there: Mapping[int, Point]) -> str:
    """Return an arrow from a block before to a block after.

    A worker that passes on what it has got begins at its block after; one that adds to a sum for another ends before.
    """
    source, dest = message.team
    start, stop = here.get(source, there.get(source)), there.get(dest, here.get(dest))
    if start is None or stop is None:
        return ""
    length = max(math.dist(start, stop), 1)
    x, y = 12 * (stop[0] - start[0]) / length, 12 * (stop[1] - start[1]) / length
    is_aside = (source in here) != (dest in there)
    bend = (34 if (stop[1] > start[1]) == (source in here) else -34) * is_aside
    return svg.arrow((start[0] + x, start[1] + y), (stop[0] - x, stop[1] - y), message.about, bend)


def _badge(at: Point, worker: int) -> str:
    """Return a number on a disc of paper, in the middle of a block that other marks are on."""
    (x, y), width = at, max(19.0, 9 + svg.width_of(str(worker), 12))
    disc = svg.rect((x - width / 2, y - 9.5, width, 19), svg.PAPER, rx=9.5)
    return disc + svg.text(x, y + 4.2, worker, 12)


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
