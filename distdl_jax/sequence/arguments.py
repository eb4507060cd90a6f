"""What an attention may be told beside x: a memory, masks, a key. What does not fit is refused alike on all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.layer.parameters import ParamShapeDtypes
from distdl_jax.plans.decomposition import Range
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.primitives.plan import ShapeDtypes
from distdl_jax.validation import check_key, checked_boolean

MEMORY, MASK, PADDING = "memory", "attn_mask", "key_padding_mask"


def checked_key(key: Array | None, training: bool, draws: bool) -> Array | None:
    """The argument `key`, without which nothing can be dropped; None where nothing is."""
    if not (checked_boolean("training", training) and draws):
        return None
    if key is None:
        raise InvalidArgumentError("`key` (=None) must be a random key in training, the same on every worker.")
    check_key("key", key)
    return key


def _on_all(name: str, held: ParamShapeDtypes) -> dict[int, ShapeDtype] | None:
    """What the workers hold of an argument that all of them give, or none."""
    its = {worker: held[worker][name] for worker in held if name in held[worker]}
    if its and len(its) < len(held):
        missing = min(held.keys() - its.keys())
        raise PlanError(
            f"On worker {missing}: `{name}` must be an array on all workers where it is on one, but is None."
        )
    return its or None


def memory_of(held: ParamShapeDtypes, ranks: Sequence[int]) -> ShapeDtypes | None:
    """What the workers hold of the memory."""
    its = _on_all(MEMORY, held)
    return None if its is None else {worker: its[worker] for worker in ranks}


def is_padded(held: ParamShapeDtypes, keys: ShapeDtypes) -> bool:
    """Whether the workers say which keys are padding; they have projected `keys`."""
    for worker, mask in (_on_all(PADDING, held) or {}).items():
        shape = keys[worker].shape[:2]
        if mask.shape != shape or mask.dtype != np.bool_:
            raise PlanError(
                f"On worker {worker}: `{PADDING}` must be an array of bool, {shape_text(shape)}, on all workers where "
                f"it is on one, but is {mask}."
            )
    return any(PADDING in its for its in held.values())


def check_mask(held: ParamShapeDtypes, regions: Mapping[int, tuple[Range, Range, Range]], keys: int) -> None:
    """Refuse masks that are not for the samples, the heads and the queries of their workers, and all keys."""
    masks = _on_all(MASK, held) or {}
    for worker, mask in masks.items():
        n, heads, queries = (stop - start for start, stop in regions[worker])
        fits = len(mask.shape) == 4 and mask.shape[0] in (1, n) and mask.shape[1] in (1, heads)
        numbers = mask.dtype == np.bool_ or jnp.issubdtype(mask.dtype, jnp.floating)
        if not fits or mask.shape[2:] != (queries, keys) or not numbers:
            raise PlanError(
                f"On worker {worker}: `{MASK}` must be of bool or floating, {queries} x {keys} or {n} x {heads} x "
                f"{queries} x {keys} (where {n} and {heads} may be 1), but is {mask}."
            )
    if len({mask.dtype for mask in masks.values()}) > 1:
        listed = ", ".join(f"{mask.dtype} on worker {worker}" for worker, mask in sorted(masks.items()))
        raise PlanError(f"`{MASK}` must have one dtype on all workers, but is {listed}.")
