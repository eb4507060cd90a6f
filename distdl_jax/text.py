"""Output for users: amounts and values as text, tables, and pictures as values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, TypeVar

T = TypeVar("T")


def cut(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters, 50 or more: the middle of a longer one is left out.

    >>> cut("0123456789" * 10, 60)
    '0123456789 ... (80 characters) ... 0123456789'
    """
    if len(text) <= longest:
        return text
    half = (longest - 40) // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


def brief(text: str, longest: int = 300) -> str:
    r"""Return a name or another text of a user or a file, for a sentence: cut, and without control characters.

    Those would break its line, or be obeyed by a terminal.

    >>> print(brief("red: \x1b[31m"))
    red: \x1b[31m
    """
    text = cut(text, longest)
    if text.isprintable():
        return text
    return cut("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text), longest)


def quoted(value: object) -> str:
    """Return a value of a user or a file, as Python writes it, for a sentence: in one line, and cut.

    >>> quoted("a"), len(quoted("a" * 10**7)) <= 300, quoted(10**5000)
    ("'a'", True, '<int without a text>')
    """
    try:
        text = repr(value)
    except Exception:  # of another library's class, or of an integer that is too long for Python
        text = f"<{type(value).__name__} without a text>"
    return brief(re.sub(r"\s*\n\s*", " ", text))


def bytes_text(count: int) -> str:
    """Return a number of bytes as text.

    >>> bytes_text(96), bytes_text(12_288), bytes_text(3_500_000)
    ('96 B', '12 kB', '3.5 MB')
    """
    for size, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.{0 if count >= 10 * size else 1}f} {unit}"
    return f"{count} B"


def number(value: float) -> str:
    """Return a number to three digits, without an exponent; an integer without decimals.

    >>> number(3), number(0.12345), number(12.345), number(1234.5)
    ('3', '0.123', '12.35', '1234')
    """
    if value == int(value):
        return str(int(value))
    if value < 0.0005:
        return "0.000"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Return the rows of a table as lines, with the columns `left` aligned to the left and the others to the right.

    >>> aligned([("layer", "bytes"), ("conv", "16")])
    ['layer  bytes', 'conv      16']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


TINTS = ("#a6d5f2", "#f7cd9c", "#9bd9bf", "#f5eba0", "#b9c3ee", "#f2b5a7", "#e0c0da")
"""Fills that can be distinguished with any colour vision (after Okabe and Ito, lightened)."""


def tint(worker: int) -> str:
    """Return the fill of a worker."""
    return TINTS[worker % len(TINTS)]


@dataclass(frozen=True)
class Drawing:
    """A picture: SVG, which Jupyter shows by itself, and text for a terminal, which `print` shows.

    - `svg`: the picture as an SVG document.
    - `text`: the same in characters.

    It is the same on every worker.

    >>> import distdl_jax as dj
    >>> print(dj.draw(dj.planning_world(6).grid([2, 3])))
    2 x 3 grid of 6 workers
          0     1     2
       +-----+-----+-----+
     0 |  0  |  1  |  2  |
       +-----+-----+-----+
     1 |  3  |  4  |  5  |
       +-----+-----+-----+
    """

    svg: str
    text: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Drawing: {self.text.splitlines()[0]}>"

    def save(self, path: str | Path) -> None:
        """Write the SVG to the file `path`; one worker is enough."""
        Path(path).write_text(self.svg, encoding="utf-8")


def documented(template: str, **values: str) -> Callable[[T], T]:
    """Return a decorator that completes the docstring of a class or function: its own lines, then `template`.

    In the template `$name` is the name of the decorated object, and others are from `values`.

    >>> @documented("It is called $name, and $what.", what="adds")
    ... def plus(x, y):
    ...     'Return a sum.'
    >>> print(plus.__doc__)
    Return a sum.
    <BLANKLINE>
    It is called plus, and adds.
    """

    def complete(item: T) -> T:
        target: Any = item
        rest = Template(template.strip("\n")).substitute(values, name=target.__name__)
        target.__doc__ = f"{inspect.cleandoc(target.__doc__ or '')}\n\n{rest}"
        return item

    return complete
