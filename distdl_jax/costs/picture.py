"""The times of a step as a picture: a bar for each layer."""

from __future__ import annotations

from collections.abc import Sequence

from distdl_jax.costs.times import Times
from distdl_jax.drawing.svg import INK, Part, below, document, rect, text, width_of, words

COLOURS = {
    "forward": "#4878a8",
    "backward": "#a5cbe8",
    "update": "#c9ced4",
    "transfer": "#e08a3c",
    "waiting": "#8c2f39",
}
"""Of the parts of a bar, which are fields of `Times`, from the left: neighbours differ in lightness, too."""

WIDTH, BAR, GAP = 520, 16, 8
"""Pixels: of the longest bar; of a bar's height; between bars."""


def draw(bars: Sequence[tuple[str, Times]], title: str) -> str:
    """Return an SVG of bars with a name each: the means over the workers, one part after the other."""
    means = [(name, {part: float(getattr(times, part).mean()) for part in COLOURS}) for name, times in bars]
    longest = max((sum(parts.values()) for _, parts in means), default=0.0) or 1.0
    left = max((width_of(name) for name, _ in means), default=0) + 2 * GAP
    body = []
    for place, (name, parts) in enumerate(means):
        x, y = left, place * (BAR + GAP)
        body.append(text(left - GAP, y + BAR - 4, name, anchor="end"))
        for part, seconds in parts.items():
            length = WIDTH * seconds / longest
            if length > 0:
                about = f"{name}: {part} {1e3 * seconds:.3g} ms"
                body.append(rect(x, y, round(length, 2), BAR, COLOURS[part], INK, about, ' stroke-width=".5"'))
            x += length
        body.append(text(x + 4, y + BAR - 4, f"{1e3 * sum(parts.values()):.3g} ms", anchor="start"))
    about_all = ", ".join(f"{name} {1e3 * sum(parts.values()):.3g} ms" for name, parts in means)
    picture = Part(left + WIDTH + 80, len(means) * (BAR + GAP), tuple(body))
    return document(title, about_all, below([words([title], 13, INK), _legend(), picture], 10))


def _legend() -> Part:
    x, body = 0.0, []
    for part, colour in COLOURS.items():
        body += [
            rect(x, 0, BAR, BAR, colour, more=' stroke-width=".5"'),
            text(x + BAR + 4, BAR - 4, part, anchor="start"),
        ]
        x += BAR + width_of(part) + 3 * GAP
    return Part(x, BAR, tuple(body))
