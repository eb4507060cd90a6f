"""The primitives as layers: the same functions with their partitions bound. They have no parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax import Array

from distdl_jax import functional
from distdl_jax.backends.mpi.partition import MPIPartition
from distdl_jax.plans.broadcasting import BroadcastRule, reduction_axes


@dataclass(frozen=True)
class Broadcast:
    """`functional.broadcast` from `P_x` to `P_y`; the arguments are checked when it is made."""

    P_x: MPIPartition
    P_y: MPIPartition
    transpose_src: bool = False
    transpose_dest: bool = False
    preserve_batch: bool = True

    def __post_init__(self) -> None:
        BroadcastRule(self.P_x.shape, self.P_y.shape, self.transpose_src, self.transpose_dest)

    def __call__(self, x: Array) -> Array:
        """The copy on P_y, a zero-volume array elsewhere in P_x, `x` outside both."""
        return functional.broadcast(
            x,
            self.P_x,
            self.P_y,
            transpose_src=self.transpose_src,
            transpose_dest=self.transpose_dest,
            preserve_batch=self.preserve_batch,
        )


@dataclass(frozen=True)
class SumReduce:
    """`functional.sum_reduce` from `P_x` to `P_y`; the arguments are checked when it is made."""

    P_x: MPIPartition
    P_y: MPIPartition
    transpose_src: bool = False
    transpose_dest: bool = False
    preserve_batch: bool = True

    def __post_init__(self) -> None:
        BroadcastRule(self.P_y.shape, self.P_x.shape, self.transpose_dest, self.transpose_src)

    def __call__(self, x: Array) -> Array:
        """The sum on P_y, a zero-volume array elsewhere in P_x, `x` outside both."""
        return functional.sum_reduce(
            x,
            self.P_x,
            self.P_y,
            transpose_src=self.transpose_src,
            transpose_dest=self.transpose_dest,
            preserve_batch=self.preserve_batch,
        )


@dataclass(frozen=True)
class AllSumReduce:
    """`functional.all_sum_reduce` on `P_x`, along `axes_reduce` or all dimensions but `axes_keep`."""

    P_x: MPIPartition
    axes_reduce: int | tuple[int, ...] | None = None
    axes_keep: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        reduced = reduction_axes(self.P_x.shape, self.axes_reduce, self.axes_keep)
        object.__setattr__(self, "axes_reduce", reduced)
        object.__setattr__(self, "axes_keep", None)

    def __call__(self, x: Array) -> Array:
        """The sum over this worker's team; outside P_x, `x`."""
        return functional.all_sum_reduce(x, self.P_x, self.axes_reduce)


@dataclass(frozen=True)
class Repartition:
    """`functional.repartition` from `P_x` to `P_y`."""

    P_x: MPIPartition
    P_y: MPIPartition
    preserve_batch: bool = True

    def __call__(self, x: Array) -> Array:
        """The balanced block on P_y, a zero-volume array elsewhere in P_x, `x` outside both."""
        return functional.repartition(x, self.P_x, self.P_y, preserve_batch=self.preserve_batch)


Transpose = DistributedTranspose = Repartition
"""DistDL's earlier names of `Repartition`."""


@dataclass(frozen=True)
class HaloExchange:
    """`functional.halo_exchange` on `P_x`, with this worker's `halo`; outside P_x the halo is not read."""

    P_x: MPIPartition
    halo: tuple[tuple[int, int], ...]
    periodic: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "halo", _pairs(self.halo) if self.P_x.active else ())
        object.__setattr__(self, "periodic", tuple(self.periodic))

    def __call__(self, x: Array) -> Array:
        """The block with its halo; outside P_x, `x`."""
        return functional.halo_exchange(x, self.P_x, self.halo, periodic=self.periodic)


@dataclass(frozen=True)
class AllGather:
    """`functional.all_gather` on `P_x` along `axes`."""

    P_x: MPIPartition
    axes: int | tuple[int, ...]

    def __call__(self, x: Array) -> Array:
        """The gathered block; outside P_x, `x`."""
        return functional.all_gather(x, self.P_x, self.axes)


@dataclass(frozen=True)
class ReduceScatter:
    """`functional.reduce_scatter` on `P_x` along `axes`."""

    P_x: MPIPartition
    axes: int | tuple[int, ...]

    def __call__(self, x: Array) -> Array:
        """This worker's block of the sum; outside P_x, `x`."""
        return functional.reduce_scatter(x, self.P_x, self.axes)


def _pairs(halo: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(widths) for widths in halo)
