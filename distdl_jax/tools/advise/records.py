"""Measurements stored in a file: plans and their times, by network, shapes, workers and versions."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.nn.networks.descriptions import LayerDescription, Skip
from distdl_jax.tools.advise.measure import Measured, Plans
from distdl_jax.transports.agreement import agree
from distdl_jax.transports.world import World
from distdl_jax.watchdog.launch.packages import installed_version

VERSION = 1
"""Of the file's format."""


def key_of(world: World, network: Sequence[Any], asked: dict[str, Any]) -> str:
    """Return the key of a measurement, as a line of JSON. Collective in the world; the same on all workers.

    `asked`: shapes and options. Functions are identified by name only.
    """
    here = platform.node(), jax.devices()[0].device_kind, os.cpu_count()
    hosts = agree(world, tuple(range(world.size)), "the hosts of dj.advise", lambda: here)
    workers = sorted(Counter(hosts[rank] for rank in range(world.size)).items())
    versions = {name: installed_version(name) for name in ("jax", "jaxlib", "mpi4jax", "distdl_jax")}
    counts = [[*host, count] for host, count in workers]
    text = [_text(layer) for layer in network]
    return json.dumps({"network": text, **asked, "workers": counts, "versions": versions}, sort_keys=True)


def stored_plans(world: World, path: Path, key: str) -> Plans | None:
    """Return the plans stored under a key in the first worker's file, with their times; None if there are none."""

    def read() -> Any:
        return _read(path).get(key) if world.rank == 0 else None

    found = agree(world, tuple(range(world.size)), "the results of dj.advise", read, itemgetter(0))
    if found is None:
        return None
    plans = tuple(tuple(map(tuple, grids)) for grids in found["plans"])
    times = np.array(found["seconds"], float).reshape(-1, len(plans))
    return Plans(plans, found["obvious"], Measured(times, tuple(found["stayed"])))


def store_plans(world: World, path: Path, key: str, plans: Plans) -> None:
    """Add times to the first worker's file. Collective in the world: if it can't be written, all raise."""
    seconds = [[None if np.isnan(time) else time for time in row] for row in plans.measured.times.tolist()]
    entry = {"plans": plans.grids, "obvious": plans.obvious, "stayed": plans.measured.plans, "seconds": seconds}

    def write() -> None:
        if world.rank == 0:
            text = json.dumps({"version": VERSION, "results": {**_read(path), key: entry}}, indent=1)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
            try:
                unfinished.write_text(text + "\n")
                unfinished.replace(path)
            except OSError as error:
                raise InvalidArgumentError(f"`results` (={str(path)!r}) can't be written: {error}.") from error

    agree(world, tuple(range(world.size)), "the results of dj.advise", write, itemgetter(0))


def _read(path: Path) -> dict[str, Any]:
    """Return the results in a file; none if there is no file."""
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
            f"`results` (={str(path)!r}) must be a file of dj.advise, or a new one, but can't be read: {error}."
        ) from error


def _text(layer: Any) -> str:
    if isinstance(layer, Skip):
        return f"skip({', '.join(map(_text, layer.layers))})"
    if isinstance(layer, LayerDescription):
        return repr(layer)
    return f"{getattr(layer, '__module__', '')}.{getattr(layer, '__qualname__', repr(layer))}"
