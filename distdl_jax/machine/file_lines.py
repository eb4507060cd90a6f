"""Where in a TOML file an entry is, which Python's reader does not tell."""

from __future__ import annotations

import re
import tomllib
from typing import Any

Path = tuple[str | int, ...]
"""The keys, and places in lists, that lead to an entry."""

_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\")(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"))*)\s*=")


def line_of(text: str, path: Path) -> int:
    """Return the number of the line on which the entry is, or else the table that it would be in; 1 for none.

    >>> line_of('version = 1\\n[host]\\nworkers = 2', ("host", "workers"))
    3
    """
    lines = _lines(text)
    return next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 1)


def _lines(text: str) -> dict[Path, int]:
    """Return the lines of all tables, keys, and rows of lists that begin a line with a brace."""
    found: dict[Path, int] = {}
    table: Path = ()
    key: Path = ()
    rows = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            table = key = _keys(f"[{header[1]}]")
        elif name := _KEY.match(line):
            key, rows = table + _keys(f"{name[1]} = 0"), 0
        elif line.lstrip().startswith("{"):
            found[(*key, rows)] = number
            rows += 1
            continue
        else:
            continue
        found.setdefault(key, number)
    return found


def _keys(line: str) -> Path:
    """Return the keys that one line of TOML names, from the outermost."""
    try:
        inner: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    keys: list[str | int] = []
    while isinstance(inner, dict) and inner:
        ((key, inner),) = inner.items()
        keys.append(key)
    return tuple(keys)
