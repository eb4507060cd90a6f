"""An advice as a table: the layers, and the plans of the short list."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.tools.advise.halving import typical
from distdl_jax.tools.advise.measure import Plans
from distdl_jax.tools.advise.network import Grids
from distdl_jax.tools.advise.search import Search, memory_text


def advice_table(search: Search, plans: Plans, ordered: Sequence[Grids], chosen: Grids) -> str:
    """Return a line for each node of the chosen plan, then one for each plan."""
    rows: list[tuple[str, ...]] = [("", "layer", "output", "grid", "workers", "messages", "sent", "stored")]
    for node, grid in zip(search.network.nodes, chosen, strict=True):
        if (price := search.prices.node(node, grid)) is not None:
            cells = shape_text(node.y_shape), shape_text(grid), f"{math.prod(grid)}", f"{price.messages}"
            rows.append((node.items[0][0], node.name, *cells, memory_text(price.bytes), memory_text(price.stored)))
    times = plans.measured.times
    names = {plans.grids[plan]: name for name, plan in plans.obvious.items()}
    shown: list[tuple[str, ...]] = [
        ("", "plan", "grids of the layers", "step, ms" if len(times) else "estimate, ms", "stored")
    ]
    for grids in ordered:
        way = search.plan(grids)
        seconds = typical(times[:, plans.grids.index(grids)]) if len(times) else way.seconds
        mark, text = "->" if grids == chosen else "", _grids_text(search, grids)
        shown.append((mark, names.get(grids, ""), text, f"{1e3 * seconds:.3g}", memory_text(way.stored)))
    return "\n".join([*_aligned(rows, 4), "", *_aligned(shown, 3)])


def _grids_text(search: Search, grids: Grids) -> str:
    """Return the grids of a plan, neighbours on one grid as one."""
    runs: list[tuple[str, str, tuple[int, ...]]] = []
    for node, grid in zip(search.network.nodes, grids, strict=True):
        place = node.items[0][0]
        if runs and runs[-1][2] == grid:
            runs[-1] = (runs[-1][0], place, grid)
        else:
            runs.append((place, place, grid))
    return ", ".join(f"{a if a == b else f'{a} to {b}'}: {shape_text(grid)}" for a, b, grid in runs)


def _aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the rows as lines, the first columns to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
