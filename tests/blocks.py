"""Blocks of whole arrays on this worker."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import distdl_jax as dj


def block(whole: np.ndarray, partition: dj.Partition, dtype: Any = float) -> jax.Array:
    """Return this worker's block, cut by numpy's own rule (the first blocks hold one more); zero-volume outside."""
    if not partition.active:
        return dj.zero_volume_tensor(dtype=dtype)
    place = np.unravel_index(partition.rank, partition.shape)
    for axis, (parts, i) in enumerate(zip(partition.shape, place, strict=True)):
        whole = np.array_split(whole, parts, axis=axis - len(partition.shape))[i]
    return jax.device_put(np.asarray(whole, dtype))


def block_of(whole: Any, spec: dj.TensorSpec) -> Any:
    """Return this worker's block of a tensor of `spec`; an empty array where it holds none."""
    return np.zeros(0, whole.dtype) if spec.box is None else whole[tuple(slice(*side) for side in spec.box)]
