"""Check whether copies that must be equal still are: `check_replicated`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import PlanError
from distdl_jax.partition import Partition
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.primitives.all_gather import all_gather
from distdl_jax.settings import current_settings
from distdl_jax.source_lines import user_line
from distdl_jax.spec_trees import leaves_with_specs
from distdl_jax.tensors import TensorSpec
from distdl_jax.validation import is_traced


def check_replicated(tree: Any, specs: Any) -> Any:
    """Check that the copies of replicated values still agree, bit for bit, with `DISTDL_JAX_DEBUG=1`.

    Copies that differ (of a scale or a running mean, say, after an update that was not the same on all workers) raise
    no error by themselves, and training goes on with a mixture. Put into a step, before or after the update, this finds
    it in the call in which it happens. Without the setting nothing is done, and nothing is sent.

    **Arguments:**

    - `tree`: this worker's blocks of any pytree: parameters, optimiser states, running statistics.
    - `specs`: a pytree of `TensorSpec`, like `tree` or a prefix of it; None for what is left alone. Only values whose
      spec has `replicated` dimensions are looked at.

    **Returns:** `tree`, as it is.

    **Raises:** `InvalidArgumentError`, with or without the setting, where `specs` has not the structure of `tree`;
    `PlanError`, on all workers that hold copies of a value that differs, naming it and two of them. In a
    jitted function JAX raises it once the function has run, as an error of its runtime with this text in it.

    Collective among the workers that hold copies: a fingerprint of 32 bits is sent for each value.

    >>> import distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> check_replicated({"scale": 2.0}, {"scale": dj.TensorSpec((), P)})
    {'scale': 2.0}
    """
    pairs = leaves_with_specs(tree, specs)
    if not current_settings().debug:
        return tree
    groups: dict[tuple[Partition, tuple[int, ...]], list[tuple[str, Any]]] = {}
    for path, value, spec in pairs:
        if spec is not None and _has_copies(spec):
            groups.setdefault((spec.partition, spec.replicated), []).append((f"tree{path}", value))
    where = user_line()
    for (P, axes), leaves in groups.items():
        team = P.create_allreduction_partition(axes)
        if team.active:
            _compare(team, [name for name, _ in leaves], [value for _, value in leaves], where)
    return tree


def _has_copies(spec: TensorSpec) -> bool:
    return any(spec.partition.shape[d] > 1 for d in spec.replicated)


def _compare(team: Partition, names: Sequence[str], values: Sequence[Any], where: str) -> None:
    own = jnp.stack([fingerprint(lax.stop_gradient(jnp.asarray(value))) for value in values])
    rows = all_gather(own[None], team.create_cartesian_topology_partition([team.size, 1]), axes=0)
    compare = partial(_raise_if_different, team.ranks, tuple(names), where)
    if is_traced(rows):
        jax.debug.callback(compare, rows)
    else:
        compare(rows)


def _raise_if_different(team: Workers, names: Sequence[str], where: str, rows: Any) -> None:
    """Compare the fingerprints of each worker of the team, the rows."""
    rows = np.asarray(rows)
    for name, column in zip(names, rows.T, strict=True):
        if (column != column[0]).any():
            other = team[int(np.argmax(column != column[0]))]
            raise PlanError(
                f"`{name}` must be the same on all workers that hold copies of it, but is not on workers {team[0]} and "
                f"{other} (check_replicated at {where}). Every worker must update its copies alike, from the same "
                "gradient: dj.replicated adds that up over the copies."
            )


def fingerprint(x: Array) -> Array:
    """Return 32 bits that depend on every bit of `x`, and its place.

    >>> int(fingerprint(jnp.arange(3))) != int(fingerprint(jnp.array([0, 2, 1])))
    True
    """
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    size = x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(size, 4)}")).reshape(-1).astype(jnp.uint32)
    mixed = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    mixed = (mixed ^ (mixed >> 15)) * (2 * lax.iota(jnp.uint32, bits.size) + 1)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
