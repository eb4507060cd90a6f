"""Keys and values of what has been seen: what an attention keeps from one piece of a text to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidTypeError, PlanError
from distdl_jax.partition import Partition
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import ShapeDtypes
from distdl_jax.sequence.online_softmax import Hidden, Places, added, finished, start
from distdl_jax.tensors import TensorSpec, device_array
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
"""The entries of a cache, and what they hold."""


def cache_specs(work: Partition, batch: int, length: int, heads: int, features: int) -> dict[str, TensorSpec]:
    """Of a cache for so many places, whose heads are split along the last dimension of `work`."""
    p_n, _, p_h = work.shape
    shape = (checked_integer("batch", batch, 1), checked_integer("length", length, 1), heads, features)
    blocks = TensorSpec(shape, work.create_cartesian_topology_partition([p_n, 1, p_h, 1]))
    samples = TensorSpec(shape[:2], work.create_cartesian_topology_partition([p_n, p_h, 1]), replicated=(1,))
    return {"key": blocks, "value": blocks, "padding": samples, "length": TensorSpec((), work, replicated=True)}


def empty(specs: Mapping[str, TensorSpec], dtype: DTypeLike) -> Cache:
    """This worker's part of a cache that has seen nothing; zero-volume where it holds none."""
    floating = checked_dtype("dtype", dtype)
    if not jnp.issubdtype(floating, jnp.floating):
        raise InvalidTypeError(f"`dtype` (={floating}) must be a real floating-point dtype, as jnp.float32.")
    dtypes = {"length": np.dtype(np.int32), "padding": np.dtype(np.bool_)}
    return {name: device_array(np.zeros(spec.local_shape, dtypes.get(name, floating))) for name, spec in specs.items()}


def entries_of(cache: Cache | None) -> Cache:
    """A cache's entries, by the names under which the workers tell each other of them; none without a cache."""
    if cache is not None and (not isinstance(cache, Mapping) or not cache):
        raise InvalidTypeError(f"`cache` (={cache!r}) must be a dictionary that `init_cache` makes, or a call returns.")
    return {PREFIX + str(name): its for name, its in (cache or {}).items()}


def check_cache(held: Mapping[int, Mapping[str, ShapeDtype]], x: ShapeDtypes, local: ShapeDtypes) -> None:
    """Refuse caches that are not their workers' parts of one; `local` are the keys that the workers have of x."""
    lengths = {its[f"{PREFIX}key"].shape[1:2] for its in held.values() if f"{PREFIX}key" in its}
    length = next(iter(lengths)) if len(lengths) == 1 else None
    for worker, its in held.items():
        n, more, *rest = local[worker].shape
        blocks: dict[str, tuple[Any, ...]] = {"key": (n, "length", *rest), "value": (n, "length", *rest)}
        for name, shape in (blocks | {"padding": (n, "length"), "length": ()}).items():
            told, kind = its.get(PREFIX + name), _KINDS[name]
            known = tuple(length[0] if size == "length" and length else size for size in shape)
            if told is None or told.shape != known or not jnp.issubdtype(told.dtype, kind[0]):
                sizes = f"{' x '.join(map(str, shape))} " if shape else ""
                raise PlanError(
                    f'On worker {worker}: `cache["{name}"]` must be {sizes}{kind[1]}, as `init_cache` makes it, but is '
                    f"{'not there' if told is None else f'{told.dtype}{list(told.shape)}'}."
                )
        others = [name for name in its if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in _KINDS]
        if others:
            raise PlanError(
                f'On worker {worker}: `cache` holds "{others[0].removeprefix(PREFIX)}", but must hold {sorted(_KINDS)}.'
            )
        if length and more > length[0]:
            raise PlanError(f"`x` has {more} elements of the sequence, but `cache` has places for {length[0]}.")


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
