"""An advice as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distdl_jax.advice.elimination import Choice
from distdl_jax.advice.grids_and_cost import Placement, memory_text, seconds_text
from distdl_jax.advice.search import Search
from distdl_jax.plans.shape_dtype import shape_text

SHOWN = 3
"""How many runners-up the table has."""

_TITLES = ("", "layer", "output", "grid", "workers", "layer, ms", "to it, ms", "memory")


def advice_table(
    search: Search, choice: Choice, placement: Placement, runners_up: Sequence[Placement], gap: float
) -> str:
    """Return a line for each described layer, with the functions behind it; then the sums and the runners-up."""
    rows: list[Sequence[str]] = [_TITLES]
    for number, (node, state) in enumerate(zip(search.graph.nodes, choice, strict=True)):
        price, grid = search.prices[number][state], search.grids[number][state]
        if price is None or not node.pieces:
            continue
        moved = sum(
            search.move(link, choice[link.source], choice[link.target])
            for link in search.graph.links
            if link.target == number
        )
        names, place = " ".join(piece.name for piece in node.pieces), node.pieces[0].place
        cells = shape_text(node.pieces[-1].y_shape), shape_text(grid), f"{math.prod(grid)}"
        rows.append((place, names, *cells, _ms(price.seconds), _ms(moved) if moved else "", memory_text(price.stored)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([*lines, "", *_summary(search, placement, runners_up, gap)])


def _summary(search: Search, placement: Placement, runners_up: Sequence[Placement], gap: float) -> list[str]:
    compared = math.prod(sum(price is not None for price in prices) for prices in search.prices)
    limit = "" if search.limit is None else f" of {memory_text(search.limit)}"
    lines = [
        f"A step takes {seconds_text(placement.seconds)} on {search.costs.clock.machine.name}, as foreseen; the worker "
        f"that stores most has {memory_text(placement.memory)}{limit}.",
        f"No other of the {compared:.3g} placements that were compared is faster by more than {100 * gap:.2g} %."
        if gap
        else f"None of the {compared:.3g} placements that were compared is faster.",
    ]
    for other in runners_up[:SHOWN]:
        changed = [
            f"layer {place} on {shape_text(grid)}"
            for place, grid in other.grids.items()
            if grid != placement.grids[place]
        ]
        more = 100 * (other.seconds / placement.seconds - 1) if placement.seconds else 0.0
        listed = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
        lines.append(f"{more:+.2g} %, {memory_text(other.memory)}: {listed or 'x on another grid'}")
    return lines


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.rjust(width) if column >= 4 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
