"""A network as a table: its layers, their partitions, and their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from distdl_jax.nn.base.layer import Layer
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.text import aligned

_TITLES = ("", "layer", "partitions", "parameters", "bytes per worker")


def network_table(layers: Iterable[Callable[..., Any]], dtype: np.dtype) -> str:
    """Return a line for each layer, including those of nested networks, and one for all of them.

    Bytes count parameters of `dtype`: the smallest and the largest amount on a worker, among the workers in any of the
    layers' partitions.
    """
    listed = list(_listed(layers, ""))
    specs = [_specs_of(layer) for _, layer in listed]
    workers = sorted({worker for _, layer in listed for P in _partitions_of(layer).values() for worker in P.ranks})
    rows: list[Sequence[str]] = [_TITLES]
    for (place, layer), layer_specs in zip(listed, specs, strict=True):
        placed = ", ".join(f"{name} {P.describe()}" for name, P in _partitions_of(layer).items())
        rows.append((place, _name(layer), placed, *_amounts(layer_specs, workers, dtype)))
    rows.append(("", "all", "", *_amounts([spec for layer_specs in specs for spec in layer_specs], workers, dtype)))
    return "\n".join(line.rstrip() for line in aligned(rows, (1, 2)))


def _listed(layers: Iterable[Callable[..., Any]], before: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for place, layer in enumerate(layers):
        inner = getattr(layer, "layers", None)
        if inner is None:
            yield f"{before}{place}", layer
        else:
            yield from _listed(inner, f"{before}{place}.")


def _name(layer: Callable[..., Any]) -> str:
    return type(layer).__name__ if isinstance(layer, Layer) else getattr(layer, "__name__", type(layer).__name__)


def _specs_of(layer: Callable[..., Any]) -> list[TensorSpec]:
    if not isinstance(layer, Layer):
        return []
    leaves = jax.tree.leaves(layer.param_specs(), is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
    return [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]


def _partitions_of(layer: Callable[..., Any]) -> dict[str, Partition]:
    """Return the partitions among a layer's arguments, by name."""
    attributes = getattr(layer, "__dict__", {})
    return {name: P for name, P in attributes.items() if isinstance(P, Partition) and name.startswith("P_")}


def _amounts(specs: Sequence[TensorSpec], workers: Sequence[int], dtype: np.dtype) -> tuple[str, str]:
    bytes_of = dict.fromkeys(workers, 0)
    for spec in specs:
        for worker, shape in spec.block_shapes.items():
            bytes_of[worker] = bytes_of.get(worker, 0) + math.prod(shape) * dtype.itemsize
    least, most = min(bytes_of.values(), default=0), max(bytes_of.values(), default=0)
    shown = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"{sum(math.prod(spec.global_shape) for spec in specs):,}", shown
