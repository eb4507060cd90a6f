"""Checks of the arguments of an attention beside x: a memory, masks, a key. All workers refuse alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import PlanError
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.nn.base.parameters import ParamShapeDtypes
from distdl_jax.plans.decomposition import Range
from distdl_jax.plans.shape_dtype import ShapeDtype

MEMORY, MASK, PADDING = "memory", "attn_mask", "key_padding_mask"


def _on_all(name: str, arguments: ParamShapeDtypes) -> dict[int, ShapeDtype]:
    """Return the shape and dtype of an argument on each worker, if any gives it; refuse it where one does not."""
    found = {worker: each[name] for worker, each in arguments.items() if name in each}
    if found and len(found) < len(arguments):
        missing = min(arguments.keys() - found.keys())
        raise PlanError(
            f"On worker {missing}: `{name}` must be an array on all workers where it is on one, but is None."
        )
    return found


def memory_of(arguments: ParamShapeDtypes, ranks: Sequence[int]) -> ShapeDtypes | None:
    """Return the shapes and dtypes of the memory's blocks; None without a memory."""
    blocks = _on_all(MEMORY, arguments)
    return {worker: blocks[worker] for worker in ranks} if blocks else None


def is_padded(arguments: ParamShapeDtypes, keys: ShapeDtypes) -> bool:
    """Say whether workers mark keys as padding, of the `keys` that they have projected."""
    masks = _on_all(PADDING, arguments)
    for worker, mask in masks.items():
        shape = keys[worker].shape[:2]
        if mask.shape != shape or mask.dtype != np.bool_:
            raise PlanError(
                f"On worker {worker}: `{PADDING}` (={mask}) must be {ShapeDtype(shape, np.dtype(bool))}: True or False "
                "for each of this worker's samples, and each element of its part of the sequence that keys are made of."
            )
    return bool(masks)


def check_mask(arguments: ParamShapeDtypes, regions: Mapping[int, tuple[Range, Range, Range]], keys: int) -> None:
    """Refuse masks that are not for the samples, the heads and the queries of their workers, and all keys."""
    masks = _on_all(MASK, arguments)
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
