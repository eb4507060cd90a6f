"""Notebooks as pages: their text, code and stored outputs as Markdown."""

from __future__ import annotations

import json
from typing import Any

PICTURE = "The picture that the code above draws"


def as_markdown(notebook: str, address: str) -> str:
    """Return a page, from the JSON of a notebook and the address where a reader gets it."""
    parts: list[str] = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [_shown(output, cell.get("metadata", {}).get("alt", PICTURE)) for output in cell["outputs"]]
    parts.insert(1, f"This page is [a notebook]({address}) with its outputs.")
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any], alt: str) -> str:
    """Return an output in the richest form that is there; `alt` says what a picture shows."""
    data = {kind: "".join(content) for kind, content in output.get("data", {}).items()}
    if picture := data.get("image/svg+xml"):
        return f'<div class="output">{picture[picture.index("<svg") :]}</div>'
    if picture := data.get("image/png"):
        return f'<div class="output"><img src="data:image/png;base64,{picture.strip()}" alt="{alt}"></div>'
    if html := data.get("text/html"):
        return f'<div class="output">{html}</div>'
    text = data.get("text/plain") or "".join(output.get("text", output.get("traceback", "")))
    return f"```text\n{text.rstrip()}\n```"
