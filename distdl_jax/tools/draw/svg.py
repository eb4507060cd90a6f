"""SVG as text: shapes, parts side by side or stacked, and the enclosing document.

The background is white whatever the page's. Black text is as readable on each fill as on white, and hatching marks
received data, without colours too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from textwrap import wrap
from typing import NamedTuple

PAPER, INK, GREY, FAINT, STRONG = "#ffffff", "#1b1f24", "#57606a", "#b6bdc6", "#b3261e"

HATCH = "url(#dj-hatch)"
"""The fill of received data."""

Point = tuple[float, float]
Area = tuple[float, float, float, float]
"""A rectangle: x, y, width and height."""


def number(x: float) -> str:
    """Return a coordinate with one decimal, or none if it is whole."""
    return f"{round(x, 1) + 0.0:g}"


def width_of(text: str, size: float = 12) -> float:
    """Return the approximate width of a text."""
    return 0.56 * size * len(text)


def element(tag: str, about: str = "", body: str = "", /, **attributes: float | str) -> str:
    """Return an SVG element; `about` is its tooltip. An underscore stands for a hyphen."""
    pairs = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    start = " ".join([tag, *(f'{n}="{v if isinstance(v, str) else number(v)}"' for n, v in pairs if v != "")])
    inside = (f"<title>{escape(about)}</title>" if about else "") + body
    return f"<{start}>{inside}</{tag}>" if inside else f"<{start}/>"


def rect(area: Area, fill: str, stroke: str = INK, about: str = "", **more: float | str) -> str:
    """Return a rectangle."""
    x, y, w, h = area
    return element("rect", about, x=x, y=y, width=w, height=h, fill=fill, stroke=stroke, **more)


def circle(at: Point, radius: float, about: str = "", **more: float | str) -> str:
    """Return a circle; by default a disc of ink."""
    return element("circle", about, cx=at[0], cy=at[1], r=radius, **({"fill": INK} | more))


def line(a: Point, b: Point, stroke: str = INK, width: float = 1.3, **more: float | str) -> str:
    """Return a straight line."""
    return element("line", x1=a[0], y1=a[1], x2=b[0], y2=b[1], stroke=stroke, stroke_width=width, **more)


def text(x: float, y: float, words: object, size: float = 12, anchor: str = "middle", fill: str = INK) -> str:
    """Return a text whose baseline is at y."""
    side = anchor.removeprefix("start")
    return element("text", "", escape(str(words)), x=x, y=y, font_size=size, text_anchor=side, fill=fill)


def arrow(a: Point, b: Point, about: str, bend: float = 0) -> str:
    """Return an arrow from a to b, with a white border; `bend`: how far its middle deviates to the left."""
    (x1, y1), (x2, y2) = a, b
    off = bend / max(math.dist(a, b), 1e-6)
    middle = (x1 + x2) / 2 + off * (y2 - y1), (y1 + y2) / 2 - off * (x2 - x1)
    curve = f"Q{number(middle[0])} {number(middle[1])} " if bend else "L"
    path = f"M{number(x1)} {number(y1)}{curve}{number(x2)} {number(y2)}"
    under = element("path", d=path, stroke=PAPER, stroke_width="3.8")
    over = element("path", d=path, stroke=INK, stroke_width="1.4", marker_end="url(#dj-head)")
    return element("g", about, under + over, class_="arrow", fill="none")


class Part(NamedTuple):
    """A part of a picture, from (0, 0) to (width, height)."""

    width: float
    height: float
    body: tuple[str, ...]

    def at(self, x: float, y: float) -> str:
        """Return the part, translated."""
        return element("g", "", "".join(self.body), transform=f"translate({number(x)} {number(y)})")


def beside(parts: Iterable[Part], gap: float = 28, widest: float = 900) -> Part:
    """Return parts from left to right, in rows of at most about `widest`, aligned at the top."""
    rows: list[Part] = []
    for part in parts:
        if rows and (x := rows[-1].width + gap) + part.width <= widest:
            rows[-1] = Part(x + part.width, max(rows[-1].height, part.height), (*rows[-1].body, part.at(x, 0)))
        else:
            rows.append(Part(part.width, part.height, (part.at(0, 0),)))
    return below(rows)


def below(parts: Iterable[Part], gap: float = 22) -> Part:
    """Return parts from top to bottom, aligned at the left; those without height are omitted."""
    y, width, body = -gap, 0.0, []
    for part in parts:
        if part.height:
            body.append(part.at(0, y + gap))
            width, y = max(width, part.width), y + gap + part.height
    return Part(width, max(y, 0), tuple(body))


def words(sentences: Iterable[str], size: float = 11, fill: str = GREY, letters: int = 92) -> Part:
    """Return sentences as a part, in lines of at most `letters`."""
    lines = [line for sentence in sentences for line in wrap(sentence, letters)]
    step = round(size * 1.4)
    body = tuple(text(0, size + step * i, each, size, "start", fill) for i, each in enumerate(lines))
    return Part(max((width_of(each, size) for each in lines), default=0), step * len(lines), body)


def heading(sentence: str, size: float = 13, letters: int = 92) -> Part:
    """Return a title as a part, in bold letters."""
    width, height, body = words([sentence], size, INK, letters)
    return Part(width, height, (element("g", "", "".join(body), font_weight="bold"),))


def document(title: str, about: str, part: Part, margin: float = 16) -> str:
    """Return an SVG document of a part; `title` and `about` describe it to readers who don't see it."""
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
    lines = [head, element("title", "", escape(title)), element("desc", "", escape(about)), defs]
    lines += [rect((0, 0, width, height), PAPER, "", rx=6), part.at(margin, margin), "</svg>"]
    return "\n".join(lines) + "\n"
