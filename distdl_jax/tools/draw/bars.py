"""A table with a horizontal bar in each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distdl_jax.text import Drawing, aligned, number
from distdl_jax.tools.cost.cost import COLUMNS, Cost
from distdl_jax.tools.draw import svg
from distdl_jax.tools.draw.svg import Part

FILLS = ("#4878a8", "#a5cbe8", "#e08a3c", "#f3d9b1", "#8c2f39", "#c9ced4")
"""For the parts of a bar, from the left: adjacent ones differ in lightness, too."""

LONGEST, ROW, LETTERS = 360, 24, 30
"""Pixels of the longest bar, and of a row; characters of the longest bar in text."""


def bars(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Sequence[float]]],
    parts: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Drawing:
    """Draw a table with a horizontal bar at the end of each row.

    - `columns`: the heads of the columns of text, the rows' names first.
    - `rows`: for each row its cells and the lengths of its bar's parts, from the left, in one unit for all rows:
      `(["0 Conv2d", "4", "1.2 MB"], [1.2e6])`. A row without lengths has no bar.
    - `parts`: the names of a bar's parts, up to six, for a legend. `notes`: sentences below the table.

    Bars share one scale; in text they consist of characters, a different one for each part.

    >>> print(bars("Bytes sent", ["layer", "bytes"], [(["conv", "200"], [150, 50]), (["relu", "0"], [])]).text)
    Bytes sent
    layer  bytes
    conv     200  ######################========
    relu       0
    """
    longest = max((sum(lengths) for _, lengths in rows), default=0) or 1
    cells = [tuple(columns), *(tuple(texts) for texts, _ in rows)]
    widths = [max(svg.width_of(each) for each in column) + 20 for column in zip(*cells, strict=True)]
    ends = [sum(widths[: i + 1]) - 20 for i in range(len(widths))]
    body = [svg.line((0, ROW), (sum(widths) + LONGEST, ROW), svg.FAINT)]
    for i, (row, lengths) in enumerate(zip(cells, [(), *(lengths for _, lengths in rows)], strict=True)):
        y = ROW * i + 16
        fill = svg.INK if i else svg.GREY
        body.append(svg.text(0, y, row[0], 12, "start", fill))
        body += [svg.text(end, y, cell, 12, "end", fill) for end, cell in zip(ends[1:], row[1:], strict=True)]
        x = sum(widths)
        for place, length in enumerate(lengths):
            about = f"{row[0]}: {parts[place]}" if parts else row[0]
            if pixels := LONGEST * length / longest:
                body.append(svg.rect((x, y - 12, pixels, 16), FILLS[place], svg.INK, about, stroke_width=".5"))
            x += pixels
    table = Part(sum(widths) + LONGEST, ROW * len(cells), tuple(body))
    picture = svg.below([svg.heading(title), _legend(parts), table, svg.words(notes)], 10)
    signs = ["", *(_signs(lengths, longest) for _, lengths in rows)]
    lines = [f"{line}  {bar}".rstrip() for line, bar in zip(aligned(cells), signs, strict=True)]
    about = "; ".join(", ".join(texts) for texts, _ in rows)
    return Drawing(svg.document(title, about, picture), "\n".join([title, *lines, *notes]))


def draw_cost(cost: Cost) -> Drawing:
    """Draw for each layer a bar of its computation, messages and storage; the table is the text."""
    activations = cost.activations
    numbers = np.array([layer.numbers(activations[layer.place]) for layer in cost.layers])
    shares = numbers / np.maximum(numbers.sum(0), 1e-30)
    rows = [
        ([layer.title, *map(number, entries)], [share[0], share[2], share[3]])
        for layer, entries, share in zip(cost.layers, numbers, shares, strict=True)
    ]
    parts = ("share of flops", "of bytes sent", "of bytes stored")
    return Drawing(bars("A training step", ["layer", *COLUMNS], rows, parts).svg, cost.table())


def _legend(parts: Sequence[str]) -> Part:
    x, body = 0.0, []
    for fill, part in zip(FILLS, parts, strict=False):
        body += [svg.rect((x, 0, 16, 16), fill, stroke_width=".5"), svg.text(x + 22, 12, part, 12, "start")]
        x += svg.width_of(part) + 44
    return Part(x, 16 * bool(parts), tuple(body))


def _signs(lengths: Sequence[float], longest: float) -> str:
    """Return a bar in characters, a different one for each part; the ends of parts are rounded, so that they add up."""
    ends = [round(LETTERS * sum(lengths[:i]) / longest) for i in range(len(lengths) + 1)]
    return "".join(sign * (stop - start) for sign, start, stop in zip("#=+-*.", ends, ends[1:], strict=False))
