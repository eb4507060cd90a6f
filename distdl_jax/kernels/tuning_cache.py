"""The file in which this machine's measurements are kept, by machine and by what was measured.

Any number of processes read and write it. A reader takes what it can read, and nothing else; a writer reads it again,
adds what it has, and puts a whole new file in its place. What two write at the same time one of them may lose: it is
measured again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl_jax.kernels.timing import Measurement

VERSION = 1

Kept = dict[str, dict[str, Measurement]]
"""By what was measured, by way."""


def default_path() -> Path | None:
    """Where the user's cache is; None for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "distdl_jax" / "tuning.json"


def read(path: Path, machine: str) -> Kept:
    """What was measured on `machine`; what can't be read, or isn't what this library writes, does not count."""
    kept: Kept = {}
    for subject, ways in _mapping(_machines(path).get(machine)).items():
        measured = {way: told for way, text in _mapping(ways).items() if (told := _measurement(text)) is not None}
        if measured:
            kept[subject] = measured
    return kept


def add(path: Path, machine: str, kept: Kept) -> bool:
    """Add measurements, in place of others of the same; whether that was possible."""
    machines = {name: dict(_mapping(theirs)) for name, theirs in _machines(path).items()}
    machines.setdefault(machine, {}).update({subject: dict(ways) for subject, ways in kept.items()})
    written = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            written = file.name
            json.dump({"version": VERSION, "machines": machines}, file, indent=1, sort_keys=True)
        os.replace(written, path)
    except OSError:
        if written:
            with suppress(OSError):
                os.unlink(written)
        return False
    return True


def _machines(path: Path) -> Mapping[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return _mapping(told.get("machines")) if isinstance(told, dict) and told.get("version") == VERSION else {}


def _mapping(told: Any) -> Mapping[str, Any]:
    return told if isinstance(told, dict) else {}


def _measurement(told: Any) -> Measurement | None:
    match told:
        case [float() | int() as seconds, int() as temporaries] if 0 < seconds < float("inf") and temporaries >= 0:
            return Measurement(float(seconds), temporaries)
    return None
