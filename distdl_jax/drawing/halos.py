"""A halo exchange, drawn: blocks apart from each other, with strips around them that neighbours sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distdl_jax.drawing.blocks import Blocks
from distdl_jax.drawing.grids import Face, draw_face, lay_out, sides
from distdl_jax.drawing.svg import (
    GREY,
    HATCH,
    INK,
    Part,
    Point,
    arrow,
    below,
    bytes_text,
    hatched,
    rect,
    text,
    tint,
    words,
)


class Strip(NamedTuple):
    """A part of a halo: `length` entries along dimension `axis`, before the block (`is_low`) or after it, by a message.

    - `distance`: how far from the block they are.
    """

    source: int
    dest: int
    axis: int
    is_low: bool
    length: int
    distance: int
    nbytes: int

    @property
    def about(self) -> str:
        return f"{self.source} to {self.dest}: {self.nbytes:,} bytes, {self.length} along dimension {self.axis}"

    @property
    def pixels(self) -> float:
        return min(6.0 + 3 * self.length, 15.0)


BAND = 9.0
"""Pixels of depth of a halo in front of a block, or behind it."""


def draw_halos(blocks: Blocks, strips: Sequence[Strip]) -> Part:
    """Draw blocks with their halos, an arrow for each message on a face, and one for all those between two slabs."""
    face_dims = blocks.drawn[-2:]
    on_face = [strip for strip in strips if strip.axis in face_dims]
    others = [strip for strip in strips if strip.axis not in face_dims]
    stacks = Counter((strip.dest, strip.axis, strip.is_low) for strip in on_face)
    thick = max((strip.pixels for strip in on_face), default=0) * max(stacks.values(), default=0)
    is_deep = len(blocks.drawn) > 2
    far = not all(_touch(blocks, strip) for strip in on_face)
    gap = 2 * thick + 18 + (22 if is_deep else 0) + (14 if far else 0)
    around_all = thick + (30 if far else 6)
    laid = lay_out(blocks, gap, around_all, bands=2 * BAND if others else 0, under=_under(blocks, others))
    faces = {worker: face for face in laid.faces for worker in face.block.workers}
    around: dict[int, dict[tuple[int, bool], float]] = {worker: {} for worker in faces}
    for strip in on_face:
        side = around[strip.dest]
        side[strip.axis, strip.is_low] = side.get((strip.axis, strip.is_low), 0.0) + strip.pixels
    depth_dim = blocks.drawn[-3:][0]
    bands = {(strip.dest, strip.is_low): strip for strip in others if strip.axis == depth_dim}
    body = []
    for face in sorted(laid.faces, key=lambda face: (face.panel, -face.y, face.x)):
        worker = face.block.workers[0]
        if is_deep:
            body.append(_prism(blocks, face, laid.depth, around[worker], bands))
        body.append(draw_face(blocks, face, 0))
    placed = _placed(blocks, on_face, faces, around)
    for strip, (x, y, w, h) in placed:
        body.append(hatched(x, y, w, h, tint(strip.source), strip.about))
    ends = [_ends(blocks, strip, place, faces) for strip, place in placed]
    body += [rect(*taken, "none", INK, more=_DASHED) for _, _, taken in ends if taken is not None]
    for (strip, _), (start, stop, taken) in zip(placed, ends, strict=True):
        body.append(arrow(start, stop, strip.about, more=' data-messages="1"', bordered=len(placed) <= 64))
        if taken is None:
            across, away = strip.axis == blocks.drawn[-1], -8 if strip.is_low else 8
            x, y = (start[0] + away, start[1]) if across else (start[0], start[1] + away)
            body.append(text(x, y + 3.5, strip.source, 10, fill=GREY))
    body += _between_slabs(blocks, others, faces, around_all)
    picture = Part(laid.width, laid.height, (*body, *laid.captions), laid.anchors)
    legend = ["Hatched: entries of neighbours. Dashed: entries that are sent."]
    if others:
        legend[0] = "Hatched: entries of neighbours, also before and behind slabs. Dashed: entries that are sent."
    return below([picture, words(legend, 11)], 6)


def _under(blocks: Blocks, between_slabs: Sequence[Strip]) -> float:
    """Return how much room arrows between slabs need below them: twice as much where there may be rows of slabs."""
    return 0 if not between_slabs else 48 if len(blocks.panels) <= 2 else 92


_DASHED = ' stroke-dasharray="3 2.5" stroke-opacity=".55"'

Place = tuple[float, float, float, float]

Sides = Mapping[tuple[int, bool], float]
"""How thick a halo is along each dimension, before the block and after it."""


def _placed(
    blocks: Blocks,
    strips: Sequence[Strip],
    faces: Mapping[int, Face],
    around: Mapping[int, Mapping[tuple[int, bool], float]],
) -> list[tuple[Strip, Place]]:
    """Return where each strip on a face is. Strips along later dimensions are longer by those along earlier ones."""
    column = blocks.drawn[-1]
    filled: Counter[tuple[int, int, bool]] = Counter()
    found = []
    for strip in sorted(strips, key=lambda strip: (strip.axis, strip.distance)):
        face = faces[strip.dest]
        key = strip.dest, strip.axis, strip.is_low
        off = float(filled[key])
        filled[key] += strip.pixels  # type: ignore[assignment]
        if strip.axis == column:
            above, under = (
                around[strip.dest].get((blocks.drawn[-2], low), 0.0) if len(blocks.drawn) > 1 else 0.0
                for low in (True, False)
            )
            x = face.x - off - strip.pixels if strip.is_low else face.x + face.w + off
            found.append((strip, (x, face.y - above, strip.pixels, face.h + above + under)))
        else:
            y = face.y - off - strip.pixels if strip.is_low else face.y + face.h + off
            found.append((strip, (face.x, y, face.w, strip.pixels)))
    return found


def _ends(blocks: Blocks, strip: Strip, place: Place, faces: Mapping[int, Face]) -> tuple[Point, Point, Place | None]:
    """Return where an arrow starts and stops, and what is sent; None of the last where the sender is no neighbour."""
    x, y, w, h = place
    dest, source = faces[strip.dest], faces.get(strip.source)
    is_across = strip.axis == blocks.drawn[-1]
    part = 0.3 if strip.is_low else 0.7  # so that there and back don't overlap
    stop = (x + w / 2, dest.y + dest.h * part) if is_across else (dest.x + dest.w * part, y + h / 2)
    sign = -1 if strip.is_low else 1
    if source is None or not _touch(blocks, strip):
        away = sign * (strip.pixels / 2 + 17)
        start = (stop[0] + away, stop[1]) if is_across else (stop[0], stop[1] + away)
        return start, stop, None
    t = min(strip.pixels, (source.w if is_across else source.h) / 2 - 1)
    if is_across:
        at = source.x + source.w - t if strip.is_low else source.x
        return (at + t / 2, stop[1]), stop, (at, source.y, t, source.h)
    at = source.y + source.h - t if strip.is_low else source.y
    return (stop[0], at + t / 2), stop, (source.x, at, source.w, t)


def _touch(blocks: Blocks, strip: Strip) -> bool:
    """Say whether what a strip holds is from the next block on that side, not from further away or round the tensor."""
    boxes = {worker: block.box[strip.axis] for block in blocks.blocks for worker in block.workers}
    (a, b), (c, d) = boxes[strip.source], boxes[strip.dest]
    return a < b and (b == c if strip.is_low else a == d)


def _prism(
    blocks: Blocks,
    face: Face,
    depth: float,
    around: Sides,
    bands: Mapping[tuple[int, bool], Strip],
) -> str:
    """Return the sides of a block with its halo, from the far end on."""
    worker = face.block.workers[0]
    row, column = blocks.drawn[-2:]
    left, right, above, under = (
        around.get(side, 0.0) for side in ((column, True), (column, False), (row, True), (row, False))
    )
    box = face.x - left, face.y - above, face.w + left + right, face.h + above + under
    low, high = bands.get((worker, True)), bands.get((worker, False))
    near = BAND if low else 0.0
    found = []
    if high:
        far = near + depth
        found += [sides(*box, far, far + BAND, tint(high.source)), sides(*box, far, far + BAND, HATCH, shaded=False)]
    found.append(sides(*box, near, near + depth, tint(worker)))
    if low:
        found += [sides(*box, 0, near, tint(low.source)), sides(*box, 0, near, HATCH, shaded=False)]
    found.append(rect(*box, tint(worker), INK))
    return "".join(found)


def _between_slabs(blocks: Blocks, strips: Sequence[Strip], faces: Mapping[int, Face], around: float) -> list[str]:
    """Return an arrow from each slab to each other one that it sends to, with the number of messages and bytes."""
    bundles: dict[tuple[int, int], list[Strip]] = {}
    for strip in strips:
        if strip.source in faces:
            bundles.setdefault((faces[strip.source].panel, faces[strip.dest].panel), []).append(strip)
    of_panel: dict[int, list[Face]] = {}
    for face in faces.values():
        of_panel.setdefault(face.panel, []).append(face)
    bottoms = {panel: max(face.y + face.h for face in some) for panel, some in of_panel.items()}
    middles = {
        panel: (min(face.x for face in some) + max(face.x + face.w for face in some)) / 2
        for panel, some in of_panel.items()
    }
    captions = [blocks.caption(key) for key in blocks.panels]
    found = []
    for (one, other), some in sorted(bundles.items()):
        forth, upper = other > one, min(one, other)
        y, total = bottoms[upper] + around, sum(strip.nbytes for strip in some)
        count = f"{len(some)} message{'s' * (len(some) > 1)}"
        shown = f"{count}, {bytes_text(total)}"
        if bottoms[one] == bottoms[other]:
            y += 36 if forth else 56
            turn = 26 if middles[other] > middles[one] else -26
            ends = (middles[one] + turn, y), (middles[other] - turn, y)
            found.append(text((middles[one] + middles[other]) / 2, y - 5, shown, 10, fill=GREY))
        else:  # the other one is in the next row
            x = middles[upper] - (100 if forth else 88)
            ends = (x, y + (64 if forth else 92)), (x, y + (92 if forth else 64))
            shown = f"{captions[one]} to {captions[other]}: {shown}"
            found.append(text(middles[upper] - 80, y + (74 if forth else 88), shown, 10, "start", GREY))
        found.append(arrow(*ends, f"{count}, {total:,} bytes", more=f' data-messages="{len(some)}"'))
    return found
