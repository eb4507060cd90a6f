"""Pictures for a terminal: grids of numbers, and messages line by line."""

from __future__ import annotations

from collections.abc import Sequence

from distdl_jax.drawing.blocks import Block, Blocks, label
from distdl_jax.plans.decomposition import Range


def blocks_text(blocks: Blocks) -> str:
    """Return a tensor as text: a table of workers for each face, and what it doesn't show."""
    parts = [blocks.title]
    for key, panel in blocks.panels.items():
        if caption := blocks.caption(key):
            parts.append(f" {caption}")
        parts += _table(blocks, panel)
    return "\n".join([*parts, *blocks.notes])


def _table(blocks: Blocks, panel: Sequence[Block]) -> list[str]:
    dims = blocks.drawn[-2:]
    everything: Range = (0, 1)

    def along(block: Block, place: int) -> Range:
        return block.box[dims[place]] if len(dims) > -place - 1 else everything

    rows = sorted({along(block, -2) for block in panel}) if len(dims) > 1 else [everything]
    columns = sorted({along(block, -1) for block in panel}) if dims else [everything]
    names = {(along(b, -2) if len(dims) > 1 else everything, along(b, -1)): label(b.workers) for b in panel}
    headings = [blocks.range_text(bounds) for bounds in columns] if dims else [""]
    width = max(5, *(len(each) + 2 for each in (*headings, *names.values())))
    sides = [blocks.range_text(bounds) if len(dims) > 1 else "" for bounds in rows]
    left = max(map(len, sides)) + (1 if len(dims) > 1 else 0)
    lines: list[str] = []
    for start in range(0, len(columns), 16):
        some = range(start, min(start + 16, len(columns)))
        rule = f"{' ' * left} +{'+'.join(['-' * width] * len(some))}+"
        lines += [f"{' ' * left}  {' '.join(headings[i].center(width) for i in some)}".rstrip(), rule]
        for side, row in zip(sides, rows, strict=True):
            cells = "|".join(names.get((row, columns[i]), "").center(width) for i in some)
            lines += [f"{side.rjust(left)} |{cells}|", rule]
    return lines
