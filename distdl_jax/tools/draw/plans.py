"""Drawings of what moves in a distributed function: a row for each movement of its plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from distdl_jax.distribute.movements import Moved
from distdl_jax.distribute.plan import Plan
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.text import Drawing, bytes_text, tint
from distdl_jax.tools.draw import svg
from distdl_jax.tools.draw.svg import Area, Part

MOST_ROWS = 40
"""The number of movements that are drawn."""

MOST_BLOCKS = 8
"""The number of blocks that are drawn along a dimension."""

ROW, FACE, LONGEST = 52, 34.0, 150.0
"""Pixels of a row, of an array's side, and of the longest bar."""

STRIP = 6.0
"""Pixels of the strip of received entries along a cut."""


def draw_plan(plan: Plan) -> Drawing:
    """Draw this worker's movements in order: the line, how the array is cut, what moves, and a bar of bytes sent.

    The text is the title and the plan's own table.
    """
    moving = [moved for moved in plan.moved if moved.operations]
    drawn = moving[:MOST_ROWS]
    title = f"This worker sends {plan.messages:,} messages, {bytes_text(plan.bytes)}, in order"
    notes = [f"Drawn are {len(drawn)} of {len(moving):,} movements."] if len(moving) > len(drawn) else []
    if not moving:
        title, notes = "Nothing moves", []
    about = ". ".join(_sentence(moved) for moved in drawn)
    picture = svg.below([svg.heading(title, 15), _rows(drawn), svg.words(notes)], 12)
    return Drawing(svg.document(title, about, picture), "\n".join([title, *([str(plan)] if moving else [])]))


def _rows(moving: Sequence[Moved]) -> Part:
    lines = [(moved.line or "-", moved.primitive) for moved in moving]
    arrays = [(moved.what, f"{moved.dtype} {shape_text(moved.shape) if moved.shape else 'number'}") for moved in moving]
    widths = [max((svg.width_of(each, 12) for pair in pairs for each in pair), default=0) for pairs in (lines, arrays)]
    pictures = widths[0] + 24
    second = pictures + 2 * (FACE + 24) + 36
    bars = second + widths[1] + 24
    most = max((_bytes(moved) for moved in moving), default=0) or 1
    body = []
    for place, moved in enumerate(moving):
        y = ROW * place
        body.append(svg.line((0, y), (bars + LONGEST + 130, y), svg.FAINT, 0.8))
        for x, (upper, lower) in ((0, lines[place]), (second, arrays[place])):
            body.append(svg.text(x, y + 23, upper, 12, "start"))
            body.append(svg.text(x, y + 39, lower, 11, "start", svg.GREY))
        body += _cuts(moved, pictures, y + 11)
        length = LONGEST * _bytes(moved) / most
        body.append(
            svg.rect((bars, y + 18, max(length, 1), 16), "#4878a8", svg.INK, _sentence(moved), stroke_width=0.5)
        )
        body.append(svg.text(bars + length + 8, y + 30, _amount(moved), 12, "start"))
    return Part(bars + LONGEST + 130, ROW * len(moving), tuple(body))


def _cuts(moved: Moved, x: float, y: float) -> Iterator[str]:
    """Yield how the array is cut, before and after; terms of a sum as sheets behind each other."""
    halo = "neighbours" in moved.what
    summed = "sum" in moved.what
    area = (x, y, FACE, FACE)
    if summed:
        yield from (svg.rect((x + off, y - off, FACE, FACE), svg.PAPER, stroke_width=0.8) for off in (8.0, 4.0))
    yield from _blocks(area, moved.before, moved, halo)
    if moved.before != moved.after or summed:
        start = x + FACE + 16
        yield svg.arrow((start, y + FACE / 2), (start + 24, y + FACE / 2), _sentence(moved))
        yield from _blocks((start + 32, y, FACE, FACE), moved.after, moved, False)


def _blocks(area: Area, numbers: Sequence[int], moved: Moved, halo: bool) -> Iterator[str]:
    """Yield an array's blocks in a square: of the first cut dimension below each other, of all further ones beside."""
    x, y, w, h = area
    along = [n for n in numbers if n > 1]
    rows, columns = (along[0] if along else 1), math.prod(along[1:])
    drawn_rows, drawn_columns = min(rows, MOST_BLOCKS), min(columns, MOST_BLOCKS)
    high, wide = h / drawn_rows, w / drawn_columns
    how = f" in {shape_text(tuple(numbers))} blocks" if along else ", whole"
    about = shape_text(moved.shape) + how
    for i in range(drawn_rows):
        for j in range(drawn_columns):
            fill = tint(i * columns + j) if along else svg.PAPER
            yield svg.rect((x + j * wide, y + i * high, wide, high), fill, svg.INK, about, stroke_width=0.8)
    if halo:
        for i in range(1, drawn_rows):
            yield svg.rect((x, y + i * high - STRIP / 2, w, STRIP), svg.HATCH, "none", about)
        for j in range(1, drawn_columns):
            yield svg.rect((x + j * wide - STRIP / 2, y, STRIP, h), svg.HATCH, "none", about)


def _bytes(moved: Moved) -> int:
    return Plan((moved,)).bytes


def _amount(moved: Moved) -> str:
    count = Plan((moved,)).messages
    return f"{bytes_text(_bytes(moved))} in {count:,} message{'s' * (count != 1)}"


def _sentence(moved: Moved) -> str:
    """Return a movement as a phrase, for tooltips and for readers who don't see the picture."""
    before, after = shape_text(moved.before), shape_text(moved.after)
    blocks = f"in {before} blocks" if before == after else f"from {before} to {after} blocks"
    at = f" at {moved.line}" if moved.line else ""
    shape = shape_text(moved.shape) if moved.shape else "a number"
    return f"{moved.what} for {moved.primitive}{at}, {shape} {blocks}: {_amount(moved)}"
