"""The cost of a step as text, as JSON, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from distdl_jax.drawing.svg import INK, Part, document, rect, text, tint, width_of
from distdl_jax.tools.cost.amounts import Amounts

if TYPE_CHECKING:
    from distdl_jax.tools.cost.cost import Cost

VERSION = 2
"""Of the form of the JSON."""

ESTIMATE = "estimated ms"


def table(cost: Cost) -> str:
    """Return a row for each layer, with the amounts of the worker that has most."""
    rows = [["layer", *COLUMNS]]
    rows += ([title, *map(number, amounts)] for title, amounts in layer_amounts(cost))
    rows.append(["all layers", *map(number, _amounts(cost.workers, cost._most_live.max()))])
    if cost.seconds is not None:
        seconds = [layer.seconds.max() for layer in cost.layers if layer.seconds is not None]
        for row, cell in zip(rows, (ESTIMATE, *(number(1e3 * each) for each in (*seconds, cost.seconds))), strict=True):
            row.append(cell)
    lines = aligned(rows)
    lines.insert(1, "-" * max(map(len, lines)))
    lines.insert(-1, lines[1])
    if cost.seconds is not None:
        lines += ["", "The estimate is a third off, more or less: not for ranking partitions."]
    return "\n".join(line.rstrip() for line in lines)


COLUMNS = ("Mflop", "messages", "MB sent", "MB stored")
"""Of the table: what the worker that has most computes, sends and stores."""


def layer_amounts(cost: Cost) -> list[tuple[str, list[float]]]:
    """Return each layer's title with its amounts, those of `COLUMNS`."""
    found = []
    activations = cost.activations
    for layer in cost.layers:
        stored = layer.amounts.parameters + layer.amounts.gradients + layer.amounts.optimiser
        found.append((layer.title, _amounts(layer.amounts, (stored + activations[layer.place]).max())))
    return found


def _amounts(amounts: Amounts, stored: int) -> list[float]:
    return [amounts.flops.max() / 1e6, amounts.operations.max(), amounts.bytes.max() / 1e6, stored / 1e6]


def number(value: float) -> str:
    """Return a number to three digits, without an exponent; a whole one as it is."""
    if value == int(value):
        return str(int(value))
    if value < 0.0005:
        return "0.000"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(pairs))
        for pairs in ([*zip(row, widths, strict=True)] for row in rows)
    ]


def to_json(cost: Cost) -> str:
    """Return all numbers, by the names of the attributes; arrays are lists with an entry for each worker."""
    activations = cost.activations
    return json.dumps(
        {
            "version": VERSION,
            "workers": _lists(cost.workers),
            "seconds": cost.seconds,
            "layers": [
                {
                    "place": layer.place,
                    "name": layer.name,
                    "amounts": _lists(layer.amounts),
                    "activations": activations[layer.place].tolist(),
                    "seconds": None if layer.seconds is None else layer.seconds.tolist(),
                }
                for layer in cost.layers
            ],
        }
    )


def _lists(amounts: Amounts) -> dict[str, list[int]]:
    return {field.name: getattr(amounts, field.name).tolist() for field in fields(amounts)}


WIDTH, BAR, GAP = 150, 14, 8
"""Pixels: of the longest bar of a column; of a bar's height; between bars."""


def picture(cost: Cost) -> str:
    """Return an SVG with a row for each layer and a column of bars for each amount, of the worker that has most."""
    rows = layer_amounts(cost)
    names, numbers = zip(*rows, strict=True)
    left = max(map(width_of, names)) + 2 * GAP
    body = [text(left - GAP, (k + 2) * (BAR + GAP) - GAP - 3, name, anchor="end") for k, name in enumerate(names)]
    for column, (title, values) in enumerate(zip(COLUMNS, zip(*numbers, strict=True), strict=True)):
        x = left + column * (WIDTH + 70)
        body.append(text(x, BAR - 3, title, anchor="start"))
        for k, (name, value) in enumerate(zip(names, values, strict=True)):
            y, length = (k + 1) * (BAR + GAP), WIDTH * value / (max(values) or 1)
            if value:
                body.append(rect(x, y, length, BAR, tint(column), INK, f"{name}: {title} {number(value)}"))
            body.append(text(x + length + 4, y + BAR - 3, number(value), anchor="start"))
    part = Part(left + len(COLUMNS) * (WIDTH + 70), (len(rows) + 1) * (BAR + GAP), tuple(body))
    about = f"{len(rows)} layers: what the worker that has most computes, sends and stores"
    return document("What a training step costs", about, part)
