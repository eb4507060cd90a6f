"""Halo exchange: each worker's block extended by its neighbours' adjacent data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.block_checks import GridBlocks, common_dtype, outside, owned_grid
from distdl_jax.functional.box_exchange import BoxPlan
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.plan import Computation, ShapeDtypes, taking_part
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import box_shape
from distdl_jax.plans.halos import Halos, needed_ranges, own_box
from distdl_jax.plans.messages import ExchangePlan
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import agree, shape_dtype_of
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import checked_booleans, checked_integers

Halo = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RangesPlan(BoxPlan):
    """A movement that gives each worker of a grid the ranges that it needs according to `halos`."""

    halos: Halos

    def __post_init__(self) -> None:
        halos = self.halos
        for d, (n, ranges, wraps) in enumerate(zip(halos.owned.extent, halos.needed, halos.wraps, strict=True)):
            if not wraps and any(start < stop and not 0 <= start <= stop <= n for start, stop in ranges):
                raise PlanError(
                    f"The ranges that workers need must be inside the tensor, but in dimension {d}, of length {n}, "
                    f"they need {ranges}."
                )

    @property
    def copies(self) -> bool:
        return True

    def steps(self, worker: int) -> tuple[ExchangePlan, ...]:
        return self.halos.plans(worker)

    def output(self, worker: int) -> ShapeDtype:
        return ShapeDtype(self.halos.shape_needed(worker), self.dtype)

    @property
    def outputs(self) -> ShapeDtypes:
        return GridBlocks(self.halos.wanted, self.dtype)


def plan_ranges(name: str, shape_dtypes: ShapeDtypes, P_x: Partition, halos: Halos) -> RangesPlan:
    """Plan the movement that gives each worker of P_x the ranges that it needs according to `halos`."""
    inputs = taking_part(shape_dtypes, P_x.ranks)
    return RangesPlan(name, inputs, common_dtype("x", inputs, P_x.ranks), halos)


@dataclass(frozen=True)
class HaloExchangePlan(Computation):
    """A halo exchange: a movement of the widest halos, from which each worker cuts its own.

    - `movement`: gives each worker the widest halo requested by a worker of the same index.
    - `halo`: the halo that each worker requested, by world rank.
    """

    movement: RangesPlan
    halo: Mapping[int, Halo] = field(hash=False)

    @property
    def workers(self) -> Workers:
        return self.movement.workers

    def output(self, worker: int) -> ShapeDtype:
        starts, stops = self.cut(worker)
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return ShapeDtype(shape, self.movement.dtype)

    def cut(self, worker: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the start and stop of the block that `worker` requested in the block from the movement."""
        halos = self.movement.halos
        cell = halos.owned.cell_of[worker]
        box = own_box(halos.owned, cell, self.halo[worker], halos.periodic)
        first = [ranges[i][0] for ranges, i in zip(halos.needed, halos.owned.index(cell), strict=True)]
        starts = tuple(want[0] - start for want, start in zip(box, first, strict=True))
        return starts, tuple(start + n for start, n in zip(starts, box_shape(box), strict=True))

    def computed(self, world: World, x: Array) -> Array:
        widest = self.movement.run(world, x)
        starts, stops = self.cut(world.rank)
        if stops == tuple(widest.shape) and not any(starts):
            return widest
        if any(start == stop for start, stop in zip(starts, stops, strict=True)):
            # JAX can't compile a branch or loop with an empty slice of some concatenations.
            return tie(jnp.zeros(self.output(world.rank).shape, widest.dtype), widest)
        return lax.slice(widest, starts, stops)


def plan_halo_exchange(
    shape_dtypes: ShapeDtypes, P_x: Partition, halo: Mapping[int, Halo], *, periodic: Sequence[bool] = ()
) -> HaloExchangePlan:
    """Plan `halo_exchange` from the shape and dtype on each worker of P_x, and its requested widths."""
    wraps = checked_periodic(periodic, P_x.dim)
    owned = owned_grid("x", P_x, shape_dtypes)
    try:
        needed = needed_ranges(owned, [halo[worker] for worker in P_x.ranks], wraps)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"`halo` doesn't fit the blocks of `x`: {error}") from None
    movement = plan_ranges("halo_exchange", shape_dtypes, P_x, Halos(owned, needed, wraps))
    return HaloExchangePlan(movement, {worker: halo[worker] for worker in movement.workers})


@function_call
def halo_exchange(x: Array, P_x: Partition, halo: Sequence[Sequence[int]], *, periodic: Sequence[bool] = ()) -> Array:
    """Extend the blocks of a tensor on `P_x` by entries of their neighbours' blocks.

    With P_x of shape p_0 x ... x p_{D-1}, a worker that owns the range [a, b) of dimension d gets the range [a - left,
    b + right), clipped to the tensor, or wrapped around it if the dimension is periodic. Data is exchanged dimension by
    dimension, which includes corners, with as many neighbours as needed if a block is narrower than the halo. The
    adjoint adds each halo's cotangent back into the block it was copied from.

    **Arguments:**

    - `x`: this worker's block, of D dimensions; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition.
    - `halo`: this worker's ((left, right), ...), a pair of widths per dimension, in elements. They may differ between
      workers; workers with the same index in a dimension exchange the widest of them. A negative width omits data that
      this worker does not need. Ignored outside P_x, where () is accepted.
    - `periodic`: per dimension, whether it wraps around. Default: none.

    **Returns:** the wider block; outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, if `halo` or `periodic` is for another number of dimensions
    than P_x has; on every worker of P_x, if any of them has such a `halo`, or the widths don't fit; `InvalidTypeError`
    if an entry of `periodic` is not a bool; `PlanError` if the blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2])
    ...     x = dj.TensorSpec((6,), P).block(jnp.arange(6))
    ...     return dj.functional.halo_exchange(x, P, halo=[(1, 1)]).tolist()
    >>> dj.simulate(2, program)
    [[0, 1, 2, 3], [2, 3, 4, 5]]

    Source: DistDL documentation, "backends" (halo exchange) and "convolution"; Hewett and Grady (2020).
    """
    check_partitions(P_x=P_x)
    wraps = checked_periodic(periodic, P_x.dim)
    if not P_x.active:
        checked_halo(halo, P_x.dim, or_none=True)
        return outside(P_x.world, x)
    shape_dtypes, widths = agree_on_halos(x, P_x, halo, wraps)
    return plan_halo_exchange(shape_dtypes, P_x, widths, periodic=wraps).run(P_x.world, x)


def agree_on_halos(
    x: Array, P_x: Partition, halo: Sequence[Sequence[int]], wraps: tuple[bool, ...]
) -> tuple[ShapeDtypes, dict[int, Halo]]:
    """Return the shapes and dtypes of x, and the requested halos, on all workers of P_x."""
    label = f"halo_exchange on {P_x.describe()}{f', periodic {wraps}' * any(wraps)}"
    known = agree(P_x.world, P_x.ranks, label, lambda: (shape_dtype_of("x", x), checked_halo(halo, P_x.dim)))
    shapes, halos = ({worker: pair[place] for worker, pair in known.items()} for place in (0, 1))
    return shapes, halos


def checked_periodic(periodic: Sequence[bool], dim: int) -> tuple[bool, ...]:
    """Return `periodic` as one entry for each of `dim` dimensions; () means none."""
    wraps = checked_booleans("periodic", periodic) or (False,) * dim
    if len(wraps) != dim:
        raise InvalidArgumentError(f"`periodic` (={periodic!r}) must have {dim} entries, one per dimension.")
    return wraps


def checked_halo(halo: Sequence[Sequence[int]], dim: int, *, or_none: bool = False) -> Halo:
    """Return `halo` as a pair of integers for each of `dim` dimensions; or (), if that is accepted."""
    if or_none and (halo is None or (isinstance(halo, tuple | list) and not halo)):
        return ()
    try:
        pairs = (checked_integers("halo", pair) for pair in halo)
        widths = tuple((left, right) for left, right in pairs)
    except (TypeError, ValueError, InvalidTypeError):
        widths = ()
    if len(widths) != dim:
        raise InvalidArgumentError(
            f"`halo` (={halo!r}) must be {dim} pairs (left, right) of integers, one for each dimension of P_x."
        )
    return widths
