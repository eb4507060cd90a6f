"""Who sends how much to whom: a square for every pair of workers, darker where more bytes go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from distdl_jax.drawing.svg import GREY, INK, Part, number, rect, text

SIDE = 400
"""Pixels of the matrix, where there are many workers."""

Amounts = Mapping[tuple[int, int], tuple[int, int]]
"""The number of messages, and of bytes, from one worker to another."""

SINGLE = 1024
"""How many squares have a text of their own; more are drawn shade by shade."""


def message_matrix(workers: Sequence[int], found: Amounts) -> Part:
    """Draw messages: rows send, columns receive; squares' titles have the figures."""
    cell = max(2.5, min(36.0, SIDE / max(len(workers), 1)))
    left, top = 34, 34
    place = {worker: i for i, worker in enumerate(workers)}
    most = max((size for _, size in found.values()), default=1) or 1
    side = cell * len(workers)
    body = [text(left + side / 2, 10, "to", 11, fill=GREY), text(4, top + side / 2, "from", 11, "start", GREY)]
    every = math.ceil(22 / cell)  # so that labels don't overlap
    for i, worker in enumerate(workers):
        if i % every == 0:
            at = cell * (i + 0.5)
            body.append(text(left + at, top - 6, worker, 10, fill=GREY))
            if abs(at - side / 2) > 9:
                body.append(text(left - 6, top + at + 3.5, worker, 10, "end", GREY))
    body.append(rect(left, top, side, side, "none", GREY))
    shades: dict[int, list[str]] = {}
    for (source, dest), (count, size) in sorted(found.items()):
        if not count:
            continue
        # By the logarithm, since halos and whole blocks differ by orders of magnitude.
        shade = 1 + round(9 * math.log1p(size) / math.log1p(most))
        x, y = left + cell * place[dest], top + cell * place[source]
        if len(found) <= SINGLE:
            about = f"{source} to {dest}: {count:,} messages, {size:,} bytes"
            body.append(rect(x, y, cell, cell, INK, "", about, f' fill-opacity="{shade * 0.085:.2f}"'))
        else:
            shades.setdefault(shade, []).append(f"M{number(x)} {number(y)}h{cell:.2f}v{cell:.2f}h-{cell:.2f}z")
    for shade, squares in sorted(shades.items()):
        body.append(f'<path d="{"".join(squares)}" fill="{INK}" fill-opacity="{shade * 0.085:.2f}"/>')
    return Part(left + side + 4, top + side + 4, tuple(body))
