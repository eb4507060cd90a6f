"""An advice as a table: the layers, and the plans of the short list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.tools.advise.network import Grids
from distdl_jax.tools.advise.search import Search, memory_text

if TYPE_CHECKING:
    from distdl_jax.tools.advise.advise import Placement

_LAYERS = ("", "layer", "output", "grid", "workers", "messages", "sent", "stored")
_PLANS = ("", "plan", "grids of the layers", "step, ms", "messages", "sent", "memory")


def advice_table(search: Search, grids: Grids, chosen: Placement, plans: Sequence[tuple[str, Placement]]) -> str:
    """Return a line for each described layer, with the functions behind it; then one for each plan."""
    rows = [_LAYERS]
    for node, grid in zip(search.network.nodes, grids, strict=True):
        if (price := search.prices.node(node, grid)) is not None:
            cells = shape_text(node.y_shape), shape_text(grid), f"{math.prod(grid)}", f"{price.messages}"
            rows.append((node.items[0][0], node.name, *cells, memory_text(price.bytes), memory_text(price.stored)))
    lines = _aligned(rows, 4)
    is_measured = chosen.seconds is not None
    shown = [(*_PLANS[:3], "step, ms" if is_measured else "estimate, ms", *_PLANS[4:])]
    for name, plan in plans:
        seconds = plan.estimate if plan.seconds is None else plan.seconds
        mark = "->" if plan.grids == chosen.grids else ""
        cells = f"{1e3 * seconds:.3g}", f"{plan.messages}", memory_text(plan.bytes), memory_text(plan.memory)
        shown.append((mark, name, _grids_text(plan), *cells))
    return "\n".join([*lines, "", *_aligned(shown, 3)])


def _grids_text(plan: Placement) -> str:
    """Return the grids of a plan, neighbours on one grid as one."""
    runs: list[tuple[str, str, tuple[int, ...]]] = []
    for place, grid in plan.grids.items():
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
