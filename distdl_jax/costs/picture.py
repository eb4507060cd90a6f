"""The times of a step as a picture: a bar for each layer, in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from distdl_jax.costs.times import Times

COLOURS = {
    "forward": "#4878a8",
    "backward": "#7fb0d8",
    "update": "#a8a8a8",
    "transfer": "#e08a3c",
    "waiting": "#c0504d",
}
"""Of the parts of a bar, which are fields of `Times`, from the left."""

WIDTH, BAR, GAP, LETTER, MARGIN = 520, 16, 8, 7, 12
"""Pixels: of the longest bar; of a bar's height; between bars; of a letter; around all."""


def draw(bars: Sequence[tuple[str, Times]], title: str) -> str:
    """Return an SVG of bars with a name each: the means over the workers, one part after the other."""
    means = [(name, {part: float(getattr(times, part).mean()) for part in COLOURS}) for name, times in bars]
    longest = max((sum(parts.values()) for _, parts in means), default=0.0) or 1.0
    left = MARGIN + LETTER * max((len(name) for name, _ in means), default=0) + GAP
    top = MARGIN + 2 * (BAR + GAP)
    width, height = left + WIDTH + 12 * LETTER, top + len(means) * (BAR + GAP) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(MARGIN, MARGIN + BAR - 4, title),
    ]
    x: float = MARGIN
    for part, colour in COLOURS.items():
        y = MARGIN + BAR + GAP
        lines += [_box(x, y, BAR, colour), _text(x + BAR + 4, y + BAR - 4, part)]
        x += BAR + LETTER * len(part) + 3 * GAP
    for place, (name, parts) in enumerate(means):
        x, y = left, top + place * (BAR + GAP)
        lines.append(_text(left - GAP, y + BAR - 4, name, "end"))
        for part, seconds in parts.items():
            length = WIDTH * seconds / longest
            if length > 0:
                lines.append(_box(x, y, length, COLOURS[part], f"{name}: {part} {1e3 * seconds:.3g} ms"))
            x += length
        lines.append(_text(x + 4, y + BAR - 4, f"{1e3 * sum(parts.values()):.3g} ms"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(x: float, y: float, width: float, colour: str, title: str = "") -> str:
    about = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{colour}">{about}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
