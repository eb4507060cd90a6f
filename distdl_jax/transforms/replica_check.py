"""Check whether replicated values are still equal: `check_replicated`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_gather import all_gather
from distdl_jax.functional.all_sum_reduce import all_sum_reduce
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.spec_trees import leaves_with_specs
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.settings import current_settings
from distdl_jax.source_lines import user_line
from distdl_jax.validation import is_traced


def check_replicated(tree: Any, specs: Any) -> Any:
    """Check that the copies of replicated values still agree, up to rounding, with `DISTDL_JAX_DEBUG=1`.

    XLA may compile an update differently on workers with different other parameters. So copies of floating-point
    numbers may differ by the square root of their precision (1.5e-8 in float64, 3.5e-4 in float32), relative to the
    largest entry of the value: equal gradients give a few roundings per step, which take millions of steps to
    accumulate to that, and a missing `dj.replicated`, another rate or another key give a part of the update itself,
    which exceeds it after a few steps. Integers and booleans must be equal.

    Copies that differ (for instance of a scale or a running mean, after an update that was not the same on all workers)
    raise no error by themselves, and training continues with a mixture. Used in a step, before or after the update,
    this check detects it in the call in which it happens. Without the setting it does nothing, and sends nothing.

    **Arguments:**

    - `tree`: this worker's blocks of any pytree: parameters, optimiser states, running statistics.
    - `specs`: a pytree of `TensorSpec`, like `tree` or a prefix of it; None for values to skip. Only values whose spec
      has `replicated` dimensions are checked.

    **Returns:** `tree`, unchanged.

    **Raises:** `InvalidArgumentError`, with or without the setting, if `specs` does not have the structure of `tree`;
    `PlanError`, on all workers that hold copies of a value that differs, naming it and two of them. In a jitted
    function JAX raises it after the run, as a runtime error that includes this text.

    Collective among the workers that hold copies: the first of them sends its values to the others.

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
    own = jnp.stack([_differs(team, lax.stop_gradient(jnp.asarray(value))) for value in values])
    rows = all_gather(own[None], team.create_cartesian_topology_partition([team.size, 1]), axes=0)
    compare = partial(_raise_if_different, team.ranks, tuple(names), where)
    if is_traced(rows):
        jax.debug.callback(compare, rows)
    else:
        compare(rows)


def _raise_if_different(team: Workers, names: Sequence[str], where: str, rows: Any) -> None:
    """Raise if a value differs on a worker of the team, a row, from the first one's."""
    for name, column in zip(names, np.asarray(rows).T, strict=True):
        if column.any():
            other = team[int(np.argmax(column))]
            raise PlanError(
                f"`{name}` must be the same on all workers that hold copies of it, but is not on workers {team[0]} and "
                f"{other} (check_replicated at {where}). Every worker must update its copies with the same gradient: "
                "dj.replicated sums it over the copies."
            )


def _differs(team: Partition, x: Array) -> Array:
    """Return whether `x` differs from that of the team's first worker by more than rounding."""
    inexact, precision = jnp.issubdtype(x.dtype, jnp.inexact), x.dtype
    if x.dtype.itemsize < 4 and x.dtype != bool:
        x = x.astype(np.float32 if inexact else np.int32)  # exactly, and of whole bytes
    first = all_sum_reduce(x if team.rank == 0 else jnp.zeros_like(x), team, axes_keep=())
    if not inexact:
        return jnp.any(x != first)
    same = (x == first) | (jnp.isnan(x) & jnp.isnan(first))
    apart = jnp.max(jnp.where(same, 0, jnp.abs(x - first)), initial=0)
    largest = jnp.max(jnp.where(jnp.isfinite(first), jnp.abs(first), 0), initial=0)
    return ~(apart <= float(jnp.finfo(precision).eps) ** 0.5 * largest)
