"""What was measured, kept in a file: plans and their times, by network, shapes, workers and versions."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from distdl_jax.agreement.agree import agree
from distdl_jax.errors import InvalidArgumentError
from distdl_jax.nn.descriptions import LayerDescription, Skip
from distdl_jax.tools.advise.measure import Measured
from distdl_jax.tools.advise.network import Grids
from distdl_jax.world import World

VERSION = 1
"""Of the file's format."""


def key_of(world: World, network: Sequence[Any], asked: dict[str, Any]) -> str:
    """Return what a measurement depends on, as a line of JSON. Collective in the world; the same on all workers.

    `asked`: shapes and options. Functions are known by their names alone.
    """
    here = platform.node(), jax.devices()[0].device_kind, os.cpu_count()
    hosts = agree(world, tuple(range(world.size)), "the hosts of dj.advise", lambda: here)
    workers = sorted(Counter(hosts[rank] for rank in range(world.size)).items())
    versions = {name: version(name) for name in ("jax", "jaxlib", "mpi4jax")}
    from distdl_jax import __version__

    entries = {
        "network": [_text(layer) for layer in network],
        **asked,
        "workers": [[*host, count] for host, count in workers],
        "versions": {**versions, "distdl_jax": __version__},
    }
    return json.dumps(entries, sort_keys=True)


def kept(world: World, path: Path, key: str) -> tuple[list[Grids], dict[str, int], Measured] | None:
    """Return the plans, the obvious ones among them, and their times, as the first worker's file has them; or None."""

    def read() -> Any:
        return _read(path).get(key) if world.rank == 0 else None

    found = agree(world, tuple(range(world.size)), "the results of dj.advise", read, lambda all: all[0])
    if found is None:
        return None
    plans = [tuple(map(tuple, grids)) for grids in found["plans"]]
    times = np.array(found["seconds"], float).reshape(-1, len(plans))
    return plans, found["obvious"], Measured(times, tuple(found["stayed"]))


def keep(
    world: World, path: Path, key: str, plans: Sequence[Grids], obvious: dict[str, int], measured: Measured
) -> None:
    """Add a measurement to the first worker's file. Collective in the world: where it can't be written, all raise."""
    seconds = [[None if np.isnan(time) else time for time in row] for row in measured.times.tolist()]
    entry = {"plans": plans, "obvious": obvious, "stayed": measured.plans, "seconds": seconds}

    def write() -> None:
        if world.rank != 0:
            return
        text = json.dumps({"version": VERSION, "results": {**_read(path), key: entry}}, indent=1)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        try:
            unfinished.write_text(text + "\n")
            unfinished.replace(path)
        except OSError as error:
            raise InvalidArgumentError(f"`results` (={str(path)!r}) can't be written: {error}.") from error

    agree(world, tuple(range(world.size)), "the results of dj.advise", write, lambda _: None)


def _read(path: Path) -> dict[str, Any]:
    """Return the results in a file; none where there is no file."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            raise ValueError(f"its version is {content['version']!r}, but this library reads {VERSION}")
        results: dict[str, Any] = content["results"]
        return results
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"`results` (={str(path)!r}) must be a file of dj.advise, or none yet, but can't be read: {error}."
        ) from error


def _text(layer: Any) -> str:
    if isinstance(layer, Skip):
        return f"skip({', '.join(map(_text, layer.layers))})"
    if isinstance(layer, LayerDescription):
        return repr(layer)
    return f"{getattr(layer, '__module__', '')}.{getattr(layer, '__qualname__', repr(layer))}"
