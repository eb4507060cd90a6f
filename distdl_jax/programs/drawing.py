"""Who sends how much to whom, drawn: a square for every pair of workers, darker where more bytes go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_MARGIN = 60
_WIDTH = 640


def draw_messages(name: str, workers: Sequence[int], found: Mapping[tuple[int, int], tuple[int, int]]) -> str:
    """Draw the messages of the function `name` as SVG: rows send, columns receive; squares' titles have the figures.

    `found` holds how many messages, and bytes, go from one worker to another.
    """
    cell = max(4, min(48, (_WIDTH - _MARGIN) // max(len(workers), 1)))
    side = _MARGIN + cell * len(workers) + 10
    most = max((size for _, size in found.values()), default=1) or 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(side, 360)}" height="{side + 40}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(name)}: messages between workers</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18">{escape(name)}: bytes sent, rows to columns</text>',
    ]
    every = math.ceil(24 / cell)  # so that labels don't overlap
    for place, worker in enumerate(workers):
        at = _MARGIN + cell * place + cell / 2
        if place % every == 0:
            parts.append(f'<text x="{at}" y="{_MARGIN - 8}" text-anchor="middle">{worker}</text>')
            parts.append(f'<text x="{_MARGIN - 8}" y="{at + 4}" text-anchor="end">{worker}</text>')
    for row, source in enumerate(workers):
        for column, dest in enumerate(workers):
            count, size = found.get((source, dest), (0, 0))
            # By the logarithm, since halos and whole blocks differ by orders of magnitude.
            shade = 0.0 if size == 0 else 0.15 + 0.85 * math.log1p(size) / math.log1p(most)
            title = f"{source} to {dest}: {count:,} messages, {size:,} bytes"
            parts.append(
                f'<rect x="{_MARGIN + cell * column}" y="{_MARGIN + cell * row}" width="{cell}" height="{cell}" '
                f'stroke="#ddd" fill="#1f5fa8" fill-opacity="{shade:.3f}"><title>{title}</title></rect>'
            )
    parts.append(
        f'<text x="10" y="{side + 20}">{sum(size for _, size in found.values()):,} bytes in '
        f"{sum(count for count, _ in found.values()):,} messages; the darkest square {most:,} bytes</text>"
    )
    return "\n".join([*parts, "</svg>\n"])
