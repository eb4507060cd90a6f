"""Runs notebooks without Jupyter: their code cells, one after the other, and what each of them shows as plain text.

    python tests/notebook_runner.py NOTEBOOK...

It prints JSON: for each notebook a list, with a text for each code cell.
"""

import ast
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


class Shown:
    """What was displayed, and may change."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def update(self, value: Any) -> None:
        self.value = value


@contextmanager
def front_end() -> Iterator[list[Shown]]:
    """Inside, the process looks like a kernel of Jupyter's; yield what programs display."""
    shown: list[Shown] = []

    def display(value: Any, display_id: bool = False) -> Shown:
        shown.append(Shown(value))
        return shown[-1]

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython).update(get_ipython=mock.Mock, version_info=(9, 0), display=module)
    vars(module)["display"] = display
    standing_for = {"IPython": ipython, "IPython.display": module}
    sys.modules.update(standing_for)
    try:
        yield shown
    finally:
        for name in standing_for:
            del sys.modules[name]


def run(notebook: Path) -> list[str]:
    """Return what each code cell shows: what it prints, then displays, then the value of its last line."""
    names: dict[str, Any] = {"__name__": "__main__"}
    if "flax" in notebook.read_text(encoding="utf-8"):
        importlib.import_module("treescope")  # flax prints by it; where there is an IPython, it imports more of it
    found = []
    for i, cell in enumerate(code_cells(notebook)):
        source = "".join(cell["source"])
        body = ast.parse(source).body
        last = body.pop() if isinstance(body[-1], ast.Expr) and not source.endswith(";") else None
        name = f"{notebook.stem}, code cell {i}"
        with front_end() as shown, redirect_stdout(StringIO()) as printed:
            exec(compile(ast.Module(body, []), name, "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), name, "eval"), names)
                shown += [Shown(value)] if value is not None else []
        texts = [printed.getvalue(), *(repr(each.value) for each in shown)]
        found.append("\n".join(text.rstrip() for text in texts if text.strip()))
    return found


def stored(notebook: Path) -> list[str]:
    """Return what each code cell showed when the notebook was saved, pictures of pixels left out."""
    found = []
    for cell in code_cells(notebook):
        outputs = [each for each in cell["outputs"] if "image/png" not in each.get("data", {})]
        printed = "".join("".join(each["text"]) for each in outputs if each["output_type"] == "stream")
        texts = [printed, *("".join(each["data"]["text/plain"]) for each in outputs if "data" in each)]
        found.append("\n".join(text.rstrip() for text in texts if text.strip()))
    return found


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "Agg"
    print(json.dumps([run(Path(name)) for name in sys.argv[1:]]))
