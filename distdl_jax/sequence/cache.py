"""Keys and values of what has been seen: what an attention keeps from one piece of a text to the next."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import PlanError
from distdl_jax.partition import Partition
from distdl_jax.plans.decomposition import checked_integer
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import ShapeDtypes
from distdl_jax.primitives.tie import tie
from distdl_jax.sequence.softmax import Hidden, Places, added, finished, start
from distdl_jax.tensors import TensorSpec, device_array

Cache = dict[str, Array]
PREFIX = "cache."


def cache_specs(work: Partition, batch: int, length: int, heads: int, features: int) -> dict[str, TensorSpec]:
    """Of a cache for so many places, whose heads are split along the last dimension of `work`."""
    p_n, _, p_h = work.shape
    shape = (checked_integer("batch", batch, 1), checked_integer("length", length, 1), heads, features)
    blocks = TensorSpec(shape, work.create_cartesian_topology_partition([p_n, 1, p_h, 1]))
    samples = TensorSpec(shape[:2], work.create_cartesian_topology_partition([p_n, p_h, 1]), replicated=(1,))
    return {"key": blocks, "value": blocks, "padding": samples, "length": TensorSpec((), work, replicated=True)}


def empty(specs: Mapping[str, TensorSpec], dtype: DTypeLike) -> Cache:
    """This worker's part of a cache that has seen nothing; zero-volume where it holds none."""
    dtypes = {"length": jnp.int32, "padding": np.bool_}
    return {name: device_array(np.zeros(spec.local_shape, dtypes.get(name, dtype))) for name, spec in specs.items()}


def check_cache(held: Mapping[int, Mapping[str, ShapeDtype]], x: ShapeDtypes, local: ShapeDtypes) -> None:
    """Refuse caches that are not their workers' parts of one; `local` are the keys that the workers have of x."""
    lengths = {its[f"{PREFIX}key"].shape[1:2] for its in held.values() if f"{PREFIX}key" in its}
    for worker, its in held.items():
        for name in ("key", "value", "padding"):
            n, _, *rest = local[worker].shape
            rest = [] if name == "padding" else rest
            shape = its[PREFIX + name].shape if PREFIX + name in its else None
            if shape is None or len(lengths) != 1 or shape != (n, *next(iter(lengths)), *rest):
                raise PlanError(
                    f'On worker {worker}: `cache["{name}"]` must be {" x ".join(map(str, (n, "length", *rest)))}, of '
                    f"one length on all workers, as `init_cache` makes it, but is "
                    f"{'not there' if shape is None else shape}."
                )


def remembered(
    cache: Cache, q: Array, k: Array, v: Array, padding: Array | None, mask: Array | None
) -> tuple[Array, Cache]:
    """The heads' outputs for queries that follow what the cache has seen, and the cache with their keys and values.

    `padding`: which of them are; `mask`: for the queries, and all places of the cache. Where there are more than it has
    places for, outputs are NaN.
    """
    seen, more = cache["length"], k.shape[1]
    padding = jnp.zeros(k.shape[:2], bool) if padding is None else padding
    after = {
        name: lax.dynamic_update_slice_in_dim(cache[name], its.astype(cache[name].dtype), seen, 1)
        for name, its in (("key", k), ("value", v), ("padding", padding))
    } | {"length": seen + more}
    if not q.size:
        return tie(jnp.zeros(q.shape, q.dtype), q, k, v), after
    hidden = Hidden(after["padding"], mask)
    y, _ = finished(added(start(q), q, after["key"], after["value"], hidden, Places(seen, 0, True)), np.dtype(q.dtype))
    return jnp.where(after["length"] > after["key"].shape[1], jnp.nan, y), after
