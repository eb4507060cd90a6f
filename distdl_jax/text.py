"""Output for users: amounts as text, tables, and pictures as values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, TypeVar

T = TypeVar("T")


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


@dataclass(frozen=True)
class Drawing:
    """A picture: SVG, which Jupyter shows by itself, and text for a terminal, which `print` shows.

    - `svg`: the picture as an SVG document.
    - `text`: the same in characters.

    It is the same on every worker.

    >>> import distdl_jax as dj
    >>> print(dj.planning_world(6).grid([2, 3]).draw())
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
