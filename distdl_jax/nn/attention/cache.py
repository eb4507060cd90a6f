"""The cache of an attention: keys and values of the elements seen so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidTypeError, PlanError
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.nn.attention.online_softmax import Keys, added, finished, start
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec, device_array
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import checked_dtype, checked_integer

Cache = dict[str, Array]
PREFIX = "cache."

_KINDS: dict[str, tuple[Any, str]] = {
    "key": (jnp.floating, "real floating-point numbers, of one length on all workers"),
    "value": (jnp.floating, "real floating-point numbers, of the length of its keys"),
    "padding": (jnp.bool_, "booleans, of the length of its keys"),
    "length": (jnp.integer, "an integer, a scalar"),
}
"""The entries of a cache: the kind of their dtype, and a description for errors."""


def cache_specs(work: Partition, batch: int, length: int, heads: int, features: int) -> dict[str, TensorSpec]:
    """Return the specs of a cache for `length` elements, whose heads are split along the last dimension of `work`."""
    p_n, _, p_h = work.shape
    shape = (checked_integer("batch", batch, 1), checked_integer("length", length, 1), heads, features)
    blocks = TensorSpec(shape, work.create_cartesian_topology_partition([p_n, 1, p_h, 1]))
    samples = TensorSpec(shape[:2], work.create_cartesian_topology_partition([p_n, p_h, 1]), replicated=(1,))
    return {"key": blocks, "value": blocks, "padding": samples, "length": TensorSpec((), work, replicated=True)}


def empty(specs: Mapping[str, TensorSpec], dtype: DTypeLike) -> Cache:
    """Return this worker's part of an empty cache; zero-volume if it holds none."""
    floating = checked_dtype("dtype", dtype)
    if not jnp.issubdtype(floating, jnp.floating):
        raise InvalidTypeError(f"`dtype` (={floating}) must be a real floating-point dtype, as jnp.float32.")
    dtypes = {"length": np.dtype(np.int32), "padding": np.dtype(np.bool_)}
    return {name: device_array(np.zeros(spec.local_shape, dtypes.get(name, floating))) for name, spec in specs.items()}


def entries_of(cache: Cache | None) -> Cache:
    """Return a cache's entries, by the names under which workers exchange their shapes; none without a cache."""
    if cache is not None and (not isinstance(cache, Mapping) or not cache):
        raise InvalidTypeError(f"`cache` (={cache!r}) must be a dictionary from `init_cache`, or from a previous call.")
    return {f"{PREFIX}{name}": entry for name, entry in (cache or {}).items()}


def check_cache(entries: Mapping[int, Mapping[str, ShapeDtype]], x: ShapeDtypes, local: ShapeDtypes) -> None:
    """Reject caches that are not their workers' parts of one; `local` are the keys that the workers compute from x."""
    lengths = {each[f"{PREFIX}key"].shape[1:2] for each in entries.values() if f"{PREFIX}key" in each}
    length = next(iter(lengths)) if len(lengths) == 1 else None
    for worker, each in entries.items():
        n, more, *rest = local[worker].shape
        blocks: dict[str, tuple[Any, ...]] = {"key": (n, "length", *rest), "value": (n, "length", *rest)}
        for name, shape in (blocks | {"padding": (n, "length"), "length": ()}).items():
            entry, (kind, words) = each.get(PREFIX + name), _KINDS[name]
            known = tuple(length[0] if size == "length" and length else size for size in shape)
            if entry is None or entry.shape != known or not jnp.issubdtype(entry.dtype, kind):
                sizes = f"{' x '.join(map(str, shape))} " if shape else ""
                raise PlanError(
                    f'On worker {worker}: `cache["{name}"]` must be {sizes}{words}, as returned by `init_cache`, but '
                    f"is {'not there' if entry is None else f'{entry.dtype}{list(entry.shape)}'}."
                )
        names = [name.removeprefix(PREFIX) for name in each if name.startswith(PREFIX)]
        if others := [name for name in names if name not in _KINDS]:
            raise PlanError(f'On worker {worker}: `cache` holds "{others[0]}", but must hold {sorted(_KINDS)}.')
        if length and more > length[0]:
            raise PlanError(f"`x` has {more} elements of the sequence, but `cache` has a capacity of {length[0]}.")


def remembered(
    cache: Cache, q: Array, k: Array, v: Array, padding: Array | None, mask: Array | None
) -> tuple[Array, Cache]:
    """Return the heads' outputs for queries that follow the cached elements, and the extended cache.

    `padding` marks keys that are padding; `mask` covers the queries, and the whole capacity of the cache. If the keys
    exceed the capacity, outputs are NaN.
    """
    seen, more = cache["length"], k.shape[1]
    padding = jnp.zeros(k.shape[:2], bool) if padding is None else padding
    after = {
        name: lax.dynamic_update_slice_in_dim(cache[name], new.astype(cache[name].dtype), seen, 1)
        for name, new in (("key", k), ("value", v), ("padding", padding))
    } | {"length": seen + more}
    if not q.size:
        return tie(jnp.zeros(q.shape, q.dtype), q, k, v), after
    keys = Keys(after["key"], after["value"], first_query=seen, causal=True, padding=after["padding"], mask=mask)
    y, _ = finished(added(start(q), q, keys), np.dtype(q.dtype))
    return jnp.where(after["length"] > after["key"].shape[1], jnp.nan, y), after
