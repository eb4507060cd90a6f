"""SVG as text: shapes with few attributes, parts that are put beside each other, and the document around them.

The paper is white whatever is behind the picture. Each fill is as good as white under black letters, and hatching says
in grey, too, what a neighbour sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

PAPER, INK, GREY, FAINT, STRONG = "#ffffff", "#1b1f24", "#57606a", "#b6bdc6", "#b3261e"
TINTS = ("#a6d5f2", "#f7cd9c", "#9bd9bf", "#f5eba0", "#b9c3ee", "#f2b5a7", "#e0c0da")
"""Fills that people with any colour vision tell apart (after Okabe and Ito, lightened)."""

HATCH = "url(#dj-hatch)"

LETTER = 0.56
"""The width of a letter, as a part of its size."""

Point = tuple[float, float]


def tint(worker: int) -> str:
    """Return the fill of a worker."""
    return TINTS[worker % len(TINTS)]


def number(x: float) -> str:
    """Return a coordinate with one decimal, and none where it is whole."""
    return f"{x + 0.0:.1f}".removesuffix(".0") if abs(x) >= 0.05 else "0"


def bytes_text(count: int) -> str:
    """Return a number of bytes as people write it.

    >>> bytes_text(96), bytes_text(12_288), bytes_text(3_500_000)
    ('96 B', '12 kB', '3.5 MB')
    """
    for size, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.{0 if count >= 10 * size else 1}f} {unit}"
    return f"{count} B"


def width_of(text: str, size: float = 12) -> float:
    """Return about how wide a text is."""
    return LETTER * size * len(text)


def rect(x: float, y: float, w: float, h: float, fill: str, stroke: str = INK, about: str = "", more: str = "") -> str:
    """Return a rectangle; `about` is what a pointer over it shows."""
    line = f' stroke="{stroke}"' if stroke else ""
    start = f'<rect x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}" fill="{fill}"{line}{more}'
    return _closed("rect", start, about)


def polygon(points: Iterable[Point], fill: str, stroke: str = INK, about: str = "", more: str = "") -> str:
    """Return a polygon."""
    corners = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return _closed("polygon", f'<polygon points="{corners}" fill="{fill}" stroke="{stroke}"{more}', about)


def line(a: Point, b: Point, stroke: str = GREY, more: str = "") -> str:
    """Return a straight line."""
    (x1, y1), (x2, y2) = a, b
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} stroke="{stroke}"{more}/>'


def text(
    x: float, y: float, words: object, size: float = 12, anchor: str = "middle", fill: str = INK, more: str = ""
) -> str:
    """Return a text whose base line is at y."""
    where = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}"'
    side = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text {where}{side} fill="{fill}"{more}>{escape(str(words))}</text>'


def arrow(a: Point, b: Point, about: str = "", bend: float = 0, more: str = "", bordered: bool = True) -> str:
    """Return an arrow from a to b, `bordered` by paper; `bend`: how far its middle is off, to the left."""
    (x1, y1), (x2, y2) = a, b
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-6)
    middle = (x1 + x2) / 2 + bend * (y2 - y1) / length, (y1 + y2) / 2 - bend * (x2 - x1) / length
    curve = f"Q{number(middle[0])} {number(middle[1])} " if bend else "L"
    path = f"M{number(x1)} {number(y1)}{curve}{number(x2)} {number(y2)}"
    under = f'<path d="{path}" stroke="{PAPER}" stroke-width="3.8"/>' if bordered else ""
    over = f'<path d="{path}" stroke="{INK}" stroke-width="1.4" marker-end="url(#dj-head)"/>'
    shown = f"<title>{escape(about)}</title>" if about else ""
    return f'<g class="arrow" fill="none"{more}>{shown}{under}{over}</g>'


def badge(x: float, y: float, words: str) -> str:
    """Return a number on a disc of paper, in the middle of a block that other marks are on."""
    width = max(19.0, 9 + width_of(words, 12))
    disc = rect(x - width / 2, y - 9.5, width, 19, PAPER, INK, more=' rx="9.5"')
    return disc + text(x, y + 4.2, words, 12)


def hatched(x: float, y: float, w: float, h: float, fill: str, about: str = "") -> str:
    """Return a rectangle that is hatched: what another worker sent."""
    under = rect(x, y, w, h, fill, stroke="")
    return f'<g class="strip">{under}{rect(x, y, w, h, HATCH, INK, about)}</g>'


def _closed(tag: str, start: str, about: str) -> str:
    return f"{start}><title>{escape(about)}</title></{tag}>" if about else f"{start}/>"


@dataclass(frozen=True)
class Part:
    """A part of a picture, from (0, 0) to (width, height), and where in it a worker's block is, for arrows."""

    width: float
    height: float
    body: tuple[str, ...]
    anchors: Mapping[int, Point] = field(default_factory=dict)

    def at(self, x: float, y: float) -> str:
        """Return the part, moved."""
        return f'<g transform="translate({number(x)} {number(y)})">{"".join(self.body)}</g>'


def beside(parts: Sequence[Part], gap: float = 28) -> Part:
    """Return parts from left to right, their tops at one height."""
    height = max((part.height for part in parts), default=0)
    x, body = 0.0, []
    for part in parts:
        body.append(part.at(x, 0))
        x += part.width + gap
    return Part(max(x - gap, 0), height, tuple(body))


def below(parts: Sequence[Part], gap: float = 22) -> Part:
    """Return parts from above to below, at the left."""
    y, body = 0.0, []
    for part in parts:
        body.append(part.at(0, y))
        y += part.height + gap
    return Part(max((part.width for part in parts), default=0), max(y - gap, 0), tuple(body))


def words(lines: Sequence[str], size: float = 12, fill: str = GREY, more: str = "") -> Part:
    """Return lines of text as a part."""
    step = round(size * 1.4)
    body = tuple(text(0, size + step * i, each, size, "start", fill, more) for i, each in enumerate(lines))
    return Part(max((width_of(each, size) for each in lines), default=0), step * len(lines), body)


def wrapped(sentence: str, width: int = 92) -> list[str]:
    """Return a sentence in lines of at most about `width` letters."""
    lines = [""]
    for word in sentence.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines


def document(title: str, about: str, part: Part, margin: float = 16) -> str:
    """Return an SVG document of a part; `title` and `about` are what a reader who doesn't see it is told."""
    width, height = round(part.width + 2 * margin), round(part.height + 2 * margin)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" font-family="Helvetica, Arial, sans-serif">'
    )
    defs = (
        '<defs><marker id="dj-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.6L8 4L0 7.4z" fill="{INK}"/></marker>'
        '<pattern id="dj-hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path d="M0 0V5" stroke="{INK}" stroke-width="1.5" stroke-opacity=".55"/></pattern></defs>'
    )
    lines = [head, f"<title>{escape(title)}</title>", f"<desc>{escape(about)}</desc>", defs]
    lines += [rect(0, 0, width, height, PAPER, "", more=' rx="6"'), part.at(margin, margin), "</svg>"]
    return "\n".join(lines) + "\n"
