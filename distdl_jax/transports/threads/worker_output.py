"""What simulated workers print: in a notebook side by side, a column for each worker; elsewhere as it comes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from html import escape
from typing import Any

from distdl_jax.transports.threads.current_world import simulated_world

MOST = 100_000
"""Characters up to which the table is shown anew while the workers run: a front end gets all of it each time."""

CELL = "vertical-align: top; text-align: left; padding: 2px 10px"
TEXT = "margin: 0; background: none; font-family: monospace"


class Columns:
    """Stands for `sys.stdout`: keeps what workers write, each by itself, and hands on what anyone else writes."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual
        self._texts: defaultdict[int, str] = defaultdict(str)
        self._shown: tuple[Any, int] | None = None  # a display handle, and the characters that it shows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def write(self, text: str) -> int:
        if simulated_world.value is None:
            return int(self._usual.write(text))
        self._texts[simulated_world.value.rank] += text  # in the worker's own thread
        return len(text)

    def show(self, is_end: bool = False) -> None:
        """Show what there is to show, if it is more than before."""
        size = sum(map(len, list(self._texts.values())))
        if not size or (self._shown and (size == self._shown[1] or (size > MOST and not is_end))):
            return
        from IPython.display import display

        table = Table({rank: self._texts[rank] for rank in sorted(self._texts)})
        if self._shown:
            self._shown[0].update(table)
        self._shown = (self._shown[0] if self._shown else display(table, display_id=True), size)


class Table:
    """Texts of workers as a front end shows them: HTML, or text with one worker after the other."""

    def __init__(self, texts: dict[int, str]) -> None:
        self._texts = texts

    def _repr_html_(self) -> str:
        from distdl_jax.tools.draw.svg import tint

        heads = (f'<th style="{CELL}; background: {tint(w)}; color: black">worker {w}</th>' for w in self._texts)
        cells = (
            f'<td style="{CELL}"><pre style="{TEXT}">{escape(text.rstrip())}</pre></td>'
            for text in self._texts.values()
        )
        rows = f"<tr>{''.join(heads)}</tr><tr>{''.join(cells)}</tr>"
        return f'<div style="overflow-x: auto"><table>{rows}</table></div>'

    def __repr__(self) -> str:
        return "\n".join(f"worker {w}\n{text.rstrip()}" for w, text in self._texts.items())


@contextmanager
def shown_by_worker() -> Iterator[Columns | None]:
    """Inside, show what workers print side by side where a kernel of IPython's runs; elsewhere do nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        yield None
        return
    columns = Columns(sys.stdout)
    with redirect_stdout(columns):
        try:
            yield columns
        finally:
            columns.show(is_end=True)
