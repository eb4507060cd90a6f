"""Who owns which block of a tensor, or who stands where on a grid of workers, drawn.

One dimension is a strip, two are a rectangle; of three the last two are the face of a slab, and slabs stand beside each
other. Dimensions that are split beyond these have a row of slabs for each range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from distdl_jax.drawing.blocks import Block, Blocks, label, named
from distdl_jax.drawing.drawing import Drawing
from distdl_jax.drawing.svg import (
    GREY,
    INK,
    PAPER,
    Part,
    Point,
    below,
    document,
    polygon,
    rect,
    text,
    tint,
    width_of,
    words,
)
from distdl_jax.drawing.text import blocks_text
from distdl_jax.plans.decomposition import Range

FACE, STRIP, A_LINE, WIDEST = 230, 40, 16, 1240
"""Pixels of the longer side of a face, and of a strip's height; blocks of a strip on one line; pixels of all."""

TILT = (0.75, -0.5)
"""Where depth goes, to the right and up."""


class Axis:
    """From entries along one dimension to pixels: blocks are as long as they are, but wide enough for a number."""

    def __init__(self, ranges: Iterable[Range], pixels: float, least: float, gap: float) -> None:
        self.cuts = sorted({cut for bounds in ranges for cut in bounds}) or [0, 1]
        self.gap = gap
        scale = pixels / max(self.cuts[-1] - self.cuts[0], 1)
        self.sizes = [max(least, scale * (b - a)) for a, b in pairwise(self.cuts)]

    def span(self, bounds: Range) -> tuple[float, float]:
        """Return where a range of whole segments starts, and how long it is."""
        first, last = self.cuts.index(bounds[0]), self.cuts.index(bounds[1])
        inner = sum(self.sizes[first:last]) + self.gap * (last - first - 1)
        return sum(self.sizes[:first]) + self.gap * first, inner

    @property
    def length(self) -> float:
        return sum(self.sizes) + self.gap * (len(self.sizes) - 1)

    def lines(self, most: int) -> list[tuple[float, float]]:
        """Return where lines of at most `most` segments start and stop."""
        steps = [self.span(bounds) for bounds in pairwise(self.cuts)]
        some = [steps[i : i + most] for i in range(0, len(steps), most)]
        return [(line[0][0], sum(line[-1])) for line in some]


class Face(NamedTuple):
    """The front of a block in a picture: where it is, and of which panel."""

    block: Block
    x: float
    y: float
    w: float
    h: float
    panel: int

    @property
    def middle(self) -> Point:
        return self.x + self.w / 2, self.y + self.h / 2


@dataclass(frozen=True)
class Layout:
    """The fronts of all blocks; how deep blocks are, in pixels; texts around them; the size of it all."""

    faces: tuple[Face, ...]
    depth: float
    captions: tuple[str, ...]
    width: float
    height: float

    @property
    def anchors(self) -> Mapping[int, Point]:
        return {worker: face.middle for face in reversed(self.faces) for worker in face.block.workers}


def lay_out(
    blocks: Blocks, gap: float = 0, around: float = 0, bands: float = 0, under: float = 0, size: float = 0
) -> Layout:
    """Lay out the blocks of a tensor: `gap` pixels between them, `around` them all, and `under` each row of faces.

    `bands` are pixels of further depth; `size` is the length of a face's longer side, by default a good one.
    """
    filled = [block for panel in blocks.panels.values() for block in panel]
    is_deep = len(blocks.drawn) > 2
    down, across, depth = _axes(blocks, filled, gap or (7 if is_deep else 3), size)
    right, up = (abs(side) * (depth + bands) for side in TILT)
    rows, columns = (blocks.drawn[place] if len(blocks.drawn) >= -place else None for place in (-2, -1))
    lines = across.lines(A_LINE if rows is None else len(across.sizes))
    pitch = down.length + 20
    left = 0.0 if rows is None else 8 + 6.2 * max(len(str(cut)) for cut in down.cuts)
    one = max(stop - start for start, stop in lines) + right + 2 * around, pitch * len(lines) + up + 2 * around
    faces: list[Face] = []
    captions: list[str] = []
    x, y, width = left, 0.0, 0.0
    row: tuple[object, ...] = ()
    for i, (key, panel) in enumerate(blocks.panels.items()):
        if i and (x + one[0] > WIDEST or key[0] != row[0] or (is_deep and row != key[:2])):
            x, y = left, y + one[1] + 40 + under
        row = key[:2]
        caption = blocks.caption(key)
        captions += [text(x + around, y + 11, caption, 11, "start", GREY)] if caption else []
        top, start_x = y + 18 * bool(caption) + around + up, x + around
        mine = []
        for block in panel:
            at, w = across.span(block.box[columns] if columns is not None else (0, 1))
            high, h = down.span(block.box[rows] if rows is not None else (0, 1))
            line = next(n for n, (start, stop) in enumerate(lines) if start - 0.1 < at < stop)
            mine.append(Face(block, start_x + at - lines[line][0], top + high + line * pitch, w, h, i))
        faces += mine
        for line in range(len(lines)):
            of_line = [face for face in mine if rows is not None or abs(face.y - top - line * pitch) < 1]
            captions += _ticks(blocks, of_line, columns, top + line * pitch + down.length + around + 13, across=True)
        captions += _ticks(blocks, mine, rows, x + max(around - 26, 0) - 5, across=False) if x == left else []
        width = max(width, x + one[0])
        x += one[0] + (16 if is_deep else 26)
    captioned = any(map(blocks.caption, blocks.panels))
    return Layout(tuple(faces), depth, tuple(captions), width, y + one[1] + 18 * captioned + under)


def _axes(blocks: Blocks, filled: Sequence[Block], gap: float, size: float) -> tuple[Axis, Axis, float]:
    """Return the rows and the columns of a face, and the depth of a slab."""
    drawn = blocks.drawn
    ranges = [[block.box[d] for block in filled] or [(0, 1)] for d in drawn[-3:]]
    lengths = [max(stop for _, stop in each) for each in ranges]
    faces = len(blocks.panels)
    part = 0.3 if faces > 16 else 0.5 if faces > 4 or len(filled) == 1 else 0.6 if blocks.copies > 1 else 1
    scale = (size or part * FACE) / max([*lengths[-2:], 1])
    letters = max((len(label(block.workers)) for block in filled), default=1)
    least = max(22, 8 + 6.4 * letters)
    narrow, low = (24, 24) if size else (60, 48)
    across = Axis(ranges[-1] if drawn else [(0, 1)], max(narrow, scale * lengths[-1]) if drawn else 60, least, gap)
    if len(drawn) < 2:
        return Axis([(0, 1)], STRIP, STRIP, gap), across, 0.0
    down = Axis(ranges[-2], max(low, scale * lengths[-2]), 20, gap)
    if len(drawn) < 3:
        return down, across, 0.0
    deepest = max(stop - start for start, stop in ranges[0])
    return down, across, min(max(0.4 * scale * deepest, 12), 44)


def _ticks(blocks: Blocks, faces: Sequence[Face], d: int | None, at: float, *, across: bool) -> list[str]:
    """Return the ends of ranges along one dimension, as far as there is room for them; of a grid, the indices."""
    if d is None:
        return []
    places: dict[int, float] = {}
    for face in faces:
        start, length = (face.x, face.w) if across else (face.y, face.h)
        first, last = face.block.box[d]
        if blocks.are_cells:
            places[first] = start + length / 2
        else:
            places.setdefault(first, start)
            places[last] = start + length
    found, free = [], -1e9
    for cut, place in sorted(places.items()):
        needed = (width_of(str(cut), 10) + 6) if across else 11
        if place - free >= needed:
            at_x, at_y, anchor = (place, at, "middle") if across else (at, place + 3.5, "end")
            found.append(text(at_x, at_y, cut, 10, anchor, GREY))
            free = place
    return found


def draw_face(blocks: Blocks, face: Face, depth: float) -> str:
    """Return a block: its face, its top and its right side, and the number of the worker that owns it."""
    x, y, w, h = face.x, face.y, face.w, face.h
    fill = tint(face.block.workers[0])
    about = f"{named(face.block.workers)}: {blocks.box_text(face.block)}"
    shown = label(face.block.workers)
    size = min(13.0, max(8.0, (w - 4) / (0.58 * len(shown))))
    front = rect(x, y, w, h, fill, about=about) + text(x + w / 2, y + h / 2 + size * 0.36, shown, size)
    return f'<g class="block">{sides(x, y, w, h, 0, depth, fill) if depth else ""}{front}</g>'


def sides(x: float, y: float, w: float, h: float, near: float, far: float, fill: str, shaded: bool = True) -> str:
    """Return the top and the right side, from one depth to another, of what has its front at (x, y)."""
    (right, up), (farther, higher) = ((TILT[0] * depth, TILT[1] * depth) for depth in (near, far))
    top = [(x + right, y + up), (x + farther, y + higher), (x + w + farther, y + higher), (x + w + right, y + up)]
    side = [top[3], top[2], (x + w + farther, y + h + higher), (x + w + right, y + h + up)]
    found = polygon(top, fill) + polygon(side, fill)
    if shaded:
        found += polygon(top, PAPER, "none", more=' fill-opacity=".4"')
        found += polygon(side, INK, "none", more=' fill-opacity=".14"')
    return found


def draw_blocks(blocks: Blocks, size: float = 0) -> Part:
    """Return the picture of a tensor, without its title; `size` as of `lay_out`."""
    layout = lay_out(blocks, size=size)
    # What is in front comes last: blocks to the right, and above, hide the depth of those before.
    ordered = sorted(layout.faces, key=lambda face: (face.panel, -face.y, face.x))
    body = [draw_face(blocks, face, layout.depth) for face in ordered]
    return Part(layout.width, layout.height, (*body, *layout.captions), layout.anchors)


def titled(blocks: Blocks, part: Part | None = None) -> Part:
    """Return the picture of a tensor under its title, and below it what it doesn't show."""
    part = part or draw_blocks(blocks)
    heading = words([blocks.title], 13, INK, ' font-weight="bold"')
    notes = [words(blocks.notes, 11)] if blocks.notes else []
    return below([heading, part, *notes], 8)


def draw_tensor(blocks: Blocks) -> Drawing:
    """Return the picture of one tensor, or of a grid of workers."""
    about = " ".join([f"{named(block.workers)}: {blocks.box_text(block)}." for block in blocks.blocks[:64]])
    svg = document(blocks.title, " ".join([about, *blocks.notes]), titled(blocks))
    return Drawing(svg, blocks_text(blocks))
