"""The rooms of the library stand on floors, and imports go down: the table of docs/design.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = tuple(
    tuple(re.findall(r"`(\w+)", row.split("|")[1]))
    for row in re.findall(r"^\| `.*$", (ROOT / "docs" / "design.md").read_text(), re.M)
)
"""From the top, the rooms of each floor: the first column of the page's table of rooms."""

FLOOR = {room: number for number, rooms in enumerate(reversed(FLOORS)) for room in rooms}
DOORS = {"__init__", "__main__", "onednn"}
"""What users import and start, which may import all."""


def imports(path: Path) -> Iterator[str]:
    """Yield the rooms that a module imports from, also within its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("distdl_jax"):
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]


def test_every_room_stands_on_a_floor() -> None:
    rooms = {path.relative_to(ROOT / "distdl_jax").parts[0].removesuffix(".py") for path in modules()}
    assert rooms - DOORS == set(FLOOR)


def test_imports_go_down() -> None:
    """But for the program as a type, which `tracing` has of `watchdog`."""
    found = []
    for path in modules():
        room = path.relative_to(ROOT / "distdl_jax").parts[0].removesuffix(".py")
        for other in imports(path) if room not in DOORS else ():
            is_side = (room, other) == ("tracing", "watchdog") or FLOOR[room] == FLOOR.get(other) == 0
            if other != room and not is_side and FLOOR.get(other, -1) >= FLOOR[room]:
                found.append(f"{path.relative_to(ROOT)} imports from {other}")
    assert not found


def test_files_of_the_page_exist() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    named = re.findall(r"(?<=[\s`])([\w/]+\.py)\b", page)
    known = [
        f"/{path.relative_to(ROOT)}" for folder in ("distdl_jax", "tests", "benchmarks") for path in python(folder)
    ]
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in known)] == []


def modules() -> list[Path]:
    """Return all modules of the library."""
    return python("distdl_jax")


def python(folder: str) -> list[Path]:
    """Return all files of Python in a folder."""
    return sorted((ROOT / folder).rglob("*.py"))
