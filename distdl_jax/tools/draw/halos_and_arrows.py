"""Arrows between blocks, with the boxes that are sent: halos on the grid of one tensor, or from one grid to another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from distdl_jax.plans.decomposition import Box, Range, intersect
from distdl_jax.text import bytes_text, tint
from distdl_jax.tools.draw import svg
from distdl_jax.tools.draw.grids import Blocks, Grid, lay_out, titled
from distdl_jax.tools.draw.messages import DrawnEvent
from distdl_jax.tools.draw.svg import Area, Part, Point


def _area_of(grid: Grid, worker: int, own: Box, box: Box) -> Area:
    """Return the area of a box in the block `own` of a worker, or next to the block if it is outside."""
    (x, y, w, h), drawn = grid.areas[worker], grid.blocks.drawn
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
    """Return the pixels for the entries of a halo, limited for wide ones."""
    return 9 * math.log2(1 + entries)


def _sent(area: Area) -> str:
    return svg.rect(area, "none", stroke_dasharray="3 2.5", stroke_opacity=".55")


def _arrived(area: Area, piece: DrawnEvent) -> str:
    fill = svg.rect(area, tint(piece.team[0]), "") + svg.rect(area, svg.HATCH, svg.INK, piece.about)
    return svg.element("g", "", fill, class_="strip")


def draw_halos(blocks: Blocks, halos: Sequence[DrawnEvent]) -> Part:
    """Draw blocks with their halos: an arrow for each message, and one for all messages between two panels."""
    boxes = _boxes(blocks)
    panel_of = {w: i for i, panel in enumerate(blocks.panels) for block in panel.blocks for w in block.workers}
    on_face = [halo for halo in halos if halo.axis in blocks.drawn[-2:]]
    near = {halo for halo in on_face if _is_near(halo, boxes) and len({panel_of[w] for w in halo.team}) == 1}
    reach, far = 0, len(near) < len(on_face)
    for halo in on_face:
        bounds, own = halo.box[halo.axis], boxes[halo.team[1]][halo.axis]
        reach = max(reach, own[0] - bounds[0], bounds[1] - own[1])
    grid = lay_out(blocks, 2 * _beyond(reach) + 18 + 14 * far, _beyond(reach) + (30 if far else 6))
    marks, arrows = list[str](), list[str]()
    for halo in sorted(on_face, key=lambda halo: (halo.axis, halo.team)):
        source, dest = halo.team
        strip, (x, y, w, h) = _area_of(grid, dest, boxes[dest], halo.box), grid.areas[dest]
        marks.append(_arrived(strip, halo))
        side = -1 if halo.box[halo.axis][0] < boxes[dest][halo.axis][0] else 1
        # Off-centre, so that opposite arrows don't overlap.
        middle = x + w * (0.5 + 0.2 * side), y + h * (0.5 + 0.2 * side)
        is_across = halo.axis == blocks.drawn[-1]
        stop = _middle(strip, middle, is_across)
        if halo in near:
            sent = _area_of(grid, source, boxes[source], intersect(halo.box, boxes[source]))
            marks.append(_sent(sent))
            start = _middle(sent, middle, is_across)
        else:  # from the sender's number
            away = (strip[2 if is_across else 3] / 2 + 16) * side
            start = (stop[0] + away, stop[1]) if is_across else (stop[0], stop[1] + away)
            at = (start[0] + 8 * side, start[1]) if is_across else (start[0], start[1] + 8 * side)
            arrows.append(svg.text(at[0], at[1] + 3.5, source, 10, fill=svg.GREY))
        arrows.append(svg.arrow(start, stop, halo.about))
    legend = svg.words(["Hatched: entries of neighbours. Dashed: entries that are sent."])
    between = [halo for halo in halos if halo.axis not in blocks.drawn[-2:]]
    return svg.below([grid.with_marks([*marks, *arrows]), _between_panels(grid, between), legend], 6)


def _boxes(blocks: Blocks) -> dict[int, Box]:
    return {worker: block.box for block in reversed(blocks.blocks) for worker in block.workers}


def _is_near(halo: DrawnEvent, boxes: Mapping[int, Box]) -> bool:
    """Say whether a halo is from the adjacent block, not from further away or across the periodic boundary."""
    (start, stop), (first, last) = (boxes[worker][halo.axis] for worker in halo.team)
    return start < stop and (stop == first if halo.box[halo.axis][0] < first else start == last)


def _middle(area: Area, other: Point, is_across: bool) -> Point:
    """Return the middle of an area in one direction, and the coordinate of a point in the other one."""
    x, y, w, h = area
    return (x + w / 2, other[1]) if is_across else (other[0], y + h / 2)


def _between_panels(grid: Grid, halos: Sequence[DrawnEvent]) -> Part:
    """Return a line for each pair of panels that communicate, with the number of messages and bytes."""
    bundles: dict[tuple[int, ...], list[int]] = {}
    for halo in halos:
        bundles.setdefault(tuple(grid.panels[worker] for worker in halo.team), []).append(halo.nbytes)
    captions = [grid.blocks.caption(panel) for panel in grid.blocks.panels]
    left, marks = max(map(svg.width_of, captions)) + 4, []
    for i, ((one, other), some) in enumerate(sorted(bundles.items())):
        count, total, y = f"{len(some)} message{'s' * (len(some) > 1)}", sum(some), 18 * i + 11
        marks.append(svg.text(0, y, captions[one], 11, "start"))
        marks.append(svg.arrow((left, y - 4), (left + 50, y - 4), f"{count}, {total:,} bytes"))
        marks.append(svg.text(left + 58, y, f"{captions[other]}: {count}, {bytes_text(total)}", 11, "start"))
    return Part(2 * left + 240, 18 * len(bundles), tuple(marks))


def draw_pieces(before: Blocks, after: Blocks, pieces: Sequence[DrawnEvent]) -> Part:
    """Draw the tensor before and after side by side, with arrows from box to box, or from block to block.

    A worker that forwards received data starts at its block after; one that adds to a sum ends at its block before.
    """
    first, second = lay_out(before), lay_out(after)
    across = max(first.part.width, svg.width_of(before.title, 13), 150) + 84
    here, there = ({worker: _centre(area) for worker, area in grid.areas.items()} for grid in (first, second))
    there = {worker: (x + across, y) for worker, (x, y) in there.items()}
    boxes, boxes_after = _boxes(before), _boxes(after)
    of_source, drawn = Counter(piece.team[0] for piece in pieces), Counter[int]()
    sent, arrived, arrows = list[str](), list[str](), list[str]()
    for piece in pieces:
        source, dest = piece.team
        if piece.box:
            x, y, w, h = _area_of(first, source, boxes[source], piece.box)
            to_x, to_y, to_w, to_h = _area_of(second, dest, boxes_after[dest], piece.box)
            sent.append(_sent((x, y, w, h)))
            arrived.append(_arrived((to_x, to_y, to_w, to_h), piece))
            drawn[source] += 1  # so that arrows from one block don't coincide
            part = drawn[source] / (1 + of_source[source])
            start, stop = (x + w / 2, y + h * part), (across + to_x + to_w / 2, to_y + to_h * part)
            arrows += [svg.circle(start, 2.5), svg.arrow(start, stop, piece.about)]
        elif {source, dest} <= here.keys() | there.keys():
            start, stop = here.get(source) or there[source], there.get(dest) or here[dest]
            length = max(math.dist(start, stop), 1)
            dx, dy = 12 * (stop[0] - start[0]) / length, 12 * (stop[1] - start[1]) / length
            is_aside = (source in here) != (dest in there)
            bend = (34 if (stop[1] > start[1]) == (source in here) else -34) * is_aside
            arrows.append(svg.arrow((start[0] + dx, start[1] + dy), (stop[0] - dx, stop[1] - dy), piece.about, bend))
    # Numbers on top of arrows that cross them.
    arrows += [_badge(at, worker) for centres in (here, there) for worker, at in centres.items()]
    left, right = titled(before, first.with_marks(sent)), titled(after, second.with_marks(arrived))
    on_top = Part(0, 0, tuple(arrows)).at(0, svg.heading("x").height + 8)
    return Part(across + right.width, max(left.height, right.height), (left.at(0, 0), right.at(across, 0), on_top))


def _centre(area: Area) -> Point:
    x, y, w, h = area
    return x + w / 2, y + h / 2


def _badge(at: Point, worker: int) -> str:
    """Return a number on a white disc, in the middle of a block with other marks."""
    (x, y), width = at, max(19.0, 9 + svg.width_of(str(worker), 12))
    disc = svg.rect((x - width / 2, y - 9.5, width, 19), svg.PAPER, rx=9.5)
    return disc + svg.text(x, y + 4.2, worker, 12)
