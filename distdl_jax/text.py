"""What people are shown: amounts in words, and pictures as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def bytes_text(count: int) -> str:
    """Return a number of bytes as people write it.

    >>> bytes_text(96), bytes_text(12_288), bytes_text(3_500_000)
    ('96 B', '12 kB', '3.5 MB')
    """
    for size, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.{0 if count >= 10 * size else 1}f} {unit}"
    return f"{count} B"


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
