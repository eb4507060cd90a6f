"""The file of measurements, by machine and by problem.

Any number of processes read and write it. A reader takes what it can read, and nothing else; a writer reads it again,
adds its measurements, and puts a whole new file in its place. Of two that write at the same time one may lose its
measurements: they are made again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl_jax.kernels.cpu.timing import Measurement

VERSION = 1

Measurements = dict[str, dict[str, Measurement]]
"""By problem, by algorithm."""


def default_path() -> Path | None:
    """Return where the user's cache is; None for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "distdl_jax" / "tuning.json"


def read(path: Path, machine: str) -> Measurements:
    """Return what was measured on `machine`; entries that this library doesn't write are left out."""
    found: Measurements = {}
    for subject, entries in _mapping(_machines(path).get(machine)).items():
        measured = {name: one for name, entry in _mapping(entries).items() if (one := _measurement(entry)) is not None}
        if measured:
            found[subject] = measured
    return found


def add(path: Path, machine: str, measurements: Measurements) -> bool:
    """Add measurements, in place of others of the same, and return whether that was possible."""
    machines = {name: dict(_mapping(subjects)) for name, subjects in _machines(path).items()}
    machines.setdefault(machine, {}).update({subject: dict(each) for subject, each in measurements.items()})
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
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return _mapping(content.get("machines")) if isinstance(content, dict) and content.get("version") == VERSION else {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _measurement(entry: Any) -> Measurement | None:
    match entry:
        case [float() | int() as seconds, int() as temporaries] if 0 < seconds < float("inf") and temporaries >= 0:
            return Measurement(float(seconds), temporaries)
    return None
