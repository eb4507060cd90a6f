"""What moves between workers, drawn: boxes between two grids, halos as strips, or arrows from worker to worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distdl_jax.drawing.blocks import Blocks, label, named
from distdl_jax.drawing.drawing import Drawing
from distdl_jax.drawing.grids import draw_blocks, lay_out, titled
from distdl_jax.drawing.halos import Strip, draw_halos
from distdl_jax.drawing.matrix import message_matrix
from distdl_jax.drawing.svg import (
    GREY,
    INK,
    Part,
    Point,
    arrow,
    badge,
    below,
    beside,
    document,
    hatched,
    line,
    rect,
    text,
    tint,
    width_of,
    words,
    wrapped,
)
from distdl_jax.drawing.text import blocks_text
from distdl_jax.plans.decomposition import Box
from distdl_jax.plans.shape_dtype import shape_text

MOST_ARROWS = 40
"""How many arrows are drawn; more messages are drawn as a matrix."""

MOST_STEPS = 16
"""How many movements of one layer are drawn."""

MOST_PIECES = 400
"""How many boxes that move are drawn."""


class Message(NamedTuple):
    """A message, and its bytes."""

    source: int
    dest: int
    nbytes: int

    @property
    def pair(self) -> tuple[int, int]:
        return self.source, self.dest

    @property
    def about(self) -> str:
        return f"{self.source} to {self.dest}: {self.nbytes:,} bytes"


class TeamCall(NamedTuple):
    """A collective operation of a team, and the bytes that each worker hands to it."""

    kind: str
    team: tuple[int, ...]
    root: int | None
    nbytes: int


class Piece(NamedTuple):
    """A box of the whole tensor that a worker gives to another, or keeps."""

    source: int
    dest: int
    box: Box


@dataclass(frozen=True)
class Step:
    """A movement, as it is drawn.

    - `name`: of the movement, and what it moves.
    - `messages`, `calls`: in the order of the workers; `left_out`: how many messages are with workers not drawn.
    - `before`, `after`: the tensor; None where it is not known as a whole.
    - `strips`: the halos that are received; `pieces`: the boxes that go from block to block.
    - `shapes`: of blocks before and after, by worker.
    """

    name: str
    messages: tuple[Message, ...] = ()
    calls: tuple[TeamCall, ...] = ()
    left_out: int = 0
    before: Blocks | None = None
    after: Blocks | None = None
    strips: tuple[Strip, ...] = ()
    pieces: tuple[Piece, ...] = ()
    shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The movement in words."""
        found = []
        if self.messages:
            total = sum(message.nbytes for message in self.messages)
            found.append(f"{len(self.messages):,} message{'s' * (len(self.messages) > 1)}, {total:,} bytes")
        for kind in sorted({call.kind for call in self.calls}):
            some = [call for call in self.calls if call.kind == kind]
            found.append(f"{len(some)} {kind}{'s' * (len(some) > 1)} of {some[0].nbytes:,} bytes")
        more = f"; {self.left_out:,} messages with workers that are left out" if self.left_out else ""
        return f"{self.name}: {', '.join(found) or 'no message'}{more}"

    @property
    def lines(self) -> list[str]:
        """The messages in words, those of equal length together."""
        by_size: dict[int, list[str]] = {}
        for message in self.messages:
            by_size.setdefault(message.nbytes, []).append(f"{message.source} \N{RIGHTWARDS ARROW} {message.dest}")
        found = []
        for size, pairs in sorted(by_size.items(), reverse=True)[:6]:
            more = f", and {len(pairs) - 48} more" if len(pairs) > 48 else ""
            found += wrapped(f"{size:,} bytes{' each' * (len(pairs) > 1)}: {', '.join(pairs[:48])}{more}")
        if len(by_size) > 6:
            found.append(f"and messages of {len(by_size) - 6} other lengths")
        for call in self.calls[:8]:
            root = "" if call.root is None else f" with root {call.root}"
            found.append(f"{call.kind} of {call.nbytes:,} bytes among {named(sorted(call.team))}{root}")
        if len(self.calls) > 8:
            found.append(f"and {len(self.calls) - 8} more operations of teams")
        return found

    @property
    def arrows(self) -> int:
        """How many arrows it takes."""
        return len(self.messages) + sum(len(call.team) for call in self.calls)


def draw_movements(title: str, tensors: Sequence[Blocks], steps: Sequence[Step], notes: Sequence[str] = ()) -> Drawing:
    """Draw a layer: the tensors before and after, then its movements in order."""
    moving = [step for step in steps if step.arrows or step.left_out]
    shown, rest = moving[:MOST_STEPS], moving[MOST_STEPS:]
    notes = list(notes)
    if rest:
        total = sum(message.nbytes for step in rest for message in step.messages)
        count = sum(len(step.messages) for step in rest)
        notes.append(f"Left out: {len(rest)} more movements, of {count:,} messages and {total:,} bytes.")
    if not moving:
        notes.append("No message is sent.")
    parts = [words(wrapped(title), 15, INK, ' font-weight="bold"')]
    drawn = [blocks for blocks in tensors if not any(blocks in (step.before, step.after) for step in shown)]
    if drawn:
        parts.append(_in_rows([titled(blocks) for blocks in drawn]))
    for i, step in enumerate(shown, 1):
        heading = words(wrapped(f"{f'{i}. ' * (len(shown) > 1)}{step.title}"), 13, INK, ' font-weight="bold"')
        lines = [words(step.lines, 11)] if step.lines and len(step.messages) <= 96 else []
        parts.append(below([heading, _picture(step), *lines], 10))
    if notes:
        parts.append(words([each for note in notes for each in wrapped(note)], 11))
    plain = [title, *(blocks_text(blocks) for blocks in drawn)]
    for i, step in enumerate(shown, 1):
        ends = [blocks_text(blocks) for blocks in (step.before, step.after) if blocks is not None]
        step_title = f"{f'{i}. ' * (len(shown) > 1)}{step.title}"
        plain.append("\n".join([*ends, step_title, *(f"  {each}" for each in step.lines)]))
    about = " ".join([*(f"{blocks.title}." for blocks in tensors), *(f"{step.title}." for step in shown)])
    return Drawing(document(title, about, below(parts)), "\n\n".join([*plain, *(["\n".join(notes)] if notes else [])]))


def _in_rows(parts: Sequence[Part], width: float = 900) -> Part:
    rows: list[list[Part]] = [[]]
    for part in parts:
        if rows[-1] and sum(each.width + 36 for each in rows[-1]) + part.width > width:
            rows.append([])
        rows[-1].append(part)
    return below([beside(row, 36) for row in rows])


def _picture(step: Step) -> Part:
    if step.strips and step.before is not None:
        return titled(step.before, draw_halos(step.before, step.strips))
    ends = [titled(blocks) for blocks in (step.before, step.after) if blocks is not None]
    if step.arrows > MOST_ARROWS:
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for source, dest, size in step.messages:
            count, total = found.get((source, dest), (0, 0))
            found[source, dest] = count + 1, total + size
        workers = sorted({worker for pair in found for worker in pair})
        return _in_rows([*ends, message_matrix(workers, found)] if workers else ends)
    if step.before is not None and step.after is not None:
        if all(len(block.workers) == 1 for blocks in (step.before, step.after) for block in blocks.blocks):
            return _between(step, step.before, step.after)
        return below([_in_rows(ends), _lanes(step)])
    return below([*ends, _lanes(step)])


def _between(step: Step, before: Blocks, after: Blocks) -> Part:
    """Draw the tensor before and after beside each other, with arrows from block to block."""
    first, second = _with_pieces(before, step.pieces, arriving=False), _with_pieces(after, step.pieces, arriving=True)
    one, two = titled(before, first[0]), titled(after, second[0])
    height, gap = max(first[0].height, second[0].height), 84
    width = max(one.width, 150)
    places = (0.0, 26 + (height - first[0].height) / 2), (width + gap, 26 + (height - second[0].height) / 2)
    body = [first[0].at(*places[0]), second[0].at(*places[1])]
    titles = [words([blocks.title], 13, INK, ' font-weight="bold"') for blocks in (before, after)]
    body += [title.at(x, 0) for title, (x, _) in zip(titles, places, strict=True)]
    notes = [words(blocks.notes, 11) for blocks in (before, after)]
    body += [note.at(x, height + 34) for note, (x, _) in zip(notes, places, strict=True)]
    here = {worker: _moved(at, places[0]) for worker, at in first[0].anchors.items()}
    there = {worker: _moved(at, places[1]) for worker, at in second[0].anchors.items()}
    middle = width + gap / 2 - 8, 26.0, height
    of_boxes = [message for message in step.messages if message.pair in first[1] and message.pair in second[1]]
    body += _piece_arrows(of_boxes, first[1], second[1], places)
    others = tuple(message for message in step.messages if message not in of_boxes)
    body += _arrows(replace(step, messages=others), here, there, middle, apart=12)
    # Numbers on top of the arrows that go over them.
    owners: dict[Point, list[int]] = {}
    for ends in (here, there):
        for worker, at in ends.items():
            owners.setdefault(at, []).append(worker)
    body += [badge(*at, label(workers)) for at, workers in sorted(owners.items())]
    return Part(
        width + gap + max(two.width, titles[1].width), height + 34 + max(note.height for note in notes), tuple(body)
    )


def _moved(point: Point, by: Point) -> Point:
    return point[0] + by[0], point[1] + by[1]


Pair = tuple[int, int]
Area = tuple[float, float, float, float]


def _with_pieces(blocks: Blocks, pieces: Sequence[Piece], *, arriving: bool) -> tuple[Part, dict[Pair, Area]]:
    """Draw a tensor with the boxes that leave, or that arrive; and return where the boxes are, by who gives whom."""
    part = draw_blocks(blocks)
    if len(blocks.drawn) > 2 or not blocks.drawn or len(pieces) > MOST_PIECES:
        return part, {}
    faces = {worker: face for face in lay_out(blocks).faces for worker in face.block.workers}
    found, body, seen = {}, [], set()
    for source, dest, box in pieces:
        face = faces.get(dest if arriving else source)
        if source == dest or face is None:
            continue
        sides = []
        for place, (at, length) in ((-2, (face.y, face.h)), (-1, (face.x, face.w))):
            if len(blocks.drawn) < -place:
                sides.append((at, length))
                continue
            d = blocks.drawn[place]
            (start, stop), (low, high) = face.block.box[d], box[d]
            scale = length / (stop - start)
            sides.append((at + (low - start) * scale, (high - low) * scale))
        (y, h), (x, w) = sides
        found[source, dest] = x, y, w, h
        if arriving:
            seen.add(dest)
            body.append(hatched(x, y, w, h, tint(source), f"{source} to {dest}"))
        else:
            body.append(rect(x, y, w, h, "none", INK, more=' stroke-dasharray="3 2.5" stroke-opacity=".6"'))
    for worker in sorted(seen):
        face = faces[worker]
        body.append(rect(face.x, face.y, face.w, face.h, "none", INK, more=' stroke-width="2"'))
    return Part(part.width, part.height, (*part.body, *body), part.anchors), found


def _piece_arrows(
    of_boxes: Sequence[Message],
    leaving: Mapping[Pair, Area],
    arriving: Mapping[Pair, Area],
    places: tuple[Point, Point],
) -> list[str]:
    """Return arrows from box to box; those from one block don't run on one line."""
    found = []
    some: dict[int, list[Message]] = {}
    for message in of_boxes:
        some.setdefault(message.source, []).append(message)
    for messages in some.values():
        for i, message in enumerate(messages, 1):
            ends = []
            for areas, (left, top) in zip((leaving, arriving), places, strict=True):
                x, y, w, h = areas[message.pair]
                ends.append((left + x + w / 2, top + y + h * i / (len(messages) + 1)))
            dot = f'<circle cx="{ends[0][0]:.1f}" cy="{ends[0][1]:.1f}" r="2.5" fill="{INK}"/>'
            found.append(dot + arrow(ends[0], ends[1], message.about))
    return found


def _arrows(
    step: Step,
    here: Mapping[int, Point],
    there: Mapping[int, Point],
    middle: tuple[float, float, float],
    apart: float = 0,
) -> list[str]:
    """Return an arrow for each message, and for each worker of a collective operation.

    A worker that passes on what it has got begins on the right; one that adds to a sum for another ends on the left.

    - `middle`: where, between left and right, the operations of teams are: x, and the first and the last y.
    - `apart`: how far from a block's middle arrows begin and end.
    """
    found: list[str] = []
    for message in step.messages:
        source, dest = message.source, message.dest
        start, stop = here.get(source, there.get(source)), there.get(dest, here.get(dest))
        if start is None or stop is None:
            continue
        on_one_side = (source in here) != (dest in there)
        length = max(((stop[0] - start[0]) ** 2 + (stop[1] - start[1]) ** 2) ** 0.5, 1)
        step_x, step_y = apart * (stop[0] - start[0]) / length, apart * (stop[1] - start[1]) / length
        bend = (34 if (stop[1] > start[1]) == (source in here) else -34) if on_one_side else 0
        if apart and not bend and _passes(start, stop, {*here.values(), *there.values()} - {start, stop}):
            bend = 36 if len(found) % 2 else -36
        ends = (start[0] + step_x, start[1] + step_y), (stop[0] - step_x, stop[1] - step_y)
        found.append(arrow(*ends, message.about, bend))
    x, top, height = middle
    for i, call in enumerate(step.calls):
        at = x, top + height * (i + 0.5) / len(step.calls)
        about = f"{call.kind}: {call.nbytes:,} bytes"
        gives = [worker for worker in call.team if call.kind != "bcast" or worker == call.root]
        gets = [worker for worker in call.team if "all" in call.kind or call.kind == "bcast" or worker == call.root]
        found += [line(here[worker], at, INK, ' stroke-width="1.3"') for worker in gives if worker in here]
        for worker in gets:
            if worker in there:
                found.append(arrow(at, (there[worker][0] - apart, there[worker][1]), about))
        found.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="5" fill="{INK}"><title>{about}</title></circle>')
    return found


def _passes(start: Point, stop: Point, others: Set[Point]) -> bool:
    """Say whether a straight arrow would go over the number of a block that it has nothing to do with."""
    (x1, y1), (x2, y2) = start, stop
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1)
    along = [((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) / length for x, y in others]
    across = [abs((x - x1) * (y2 - y1) - (y - y1) * (x2 - x1)) / length for x, y in others]
    return any(0 < at < length and off < 12 for at, off in zip(along, across, strict=True))


def _lanes(step: Step) -> Part:
    """Draw workers below each other: blocks before at the left, after at the right, and arrows between."""
    workers = sorted({w for message in step.messages for w in message[:2]} | {w for c in step.calls for w in c.team})
    pitch, gap = 27, 210
    texts = {w: tuple(shape_text(shape) if shape else "" for shape in step.shapes.get(w, ((), ()))) for w in workers}
    widths = [max((40 + width_of(pair[side], 11) for pair in texts.values()), default=40) for side in (0, 1)]
    body = [text(widths[0] / 2, 10, "before", 11, fill=GREY)]
    body.append(text(widths[0] + gap + widths[1] / 2, 10, "after", 11, fill=GREY))
    here: dict[int, Point] = {}
    there: dict[int, Point] = {}
    for i, worker in enumerate(workers):
        y = 18 + pitch * i
        for x, w, shape in ((0.0, widths[0], texts[worker][0]), (widths[0] + gap, widths[1], texts[worker][1])):
            body.append(f'<g class="lane">{rect(x, y, w, 21, tint(worker))}{text(x + 14, y + 15, worker, 12)}</g>')
            body.append(text(x + 30, y + 14.5, shape, 11, "start"))
        before, after = step.shapes.get(worker, ((), ()))
        if 0 not in before:
            here[worker] = widths[0], y + 10.5
        if 0 not in after:
            there[worker] = widths[0] + gap, y + 10.5
    height = 18 + pitch * len(workers)
    body += _arrows(step, here, there, (widths[0] + gap / 2, 18, height - 18))
    return Part(widths[0] + gap + widths[1], height, tuple(body))
