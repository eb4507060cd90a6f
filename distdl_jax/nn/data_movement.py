"""The primitives as layers: the same functions with their partitions bound. They have no parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax import Array

from distdl_jax import functional
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.layer.layer import Ends, ParameterFreeLayer
from distdl_jax.partition import Partition, check_partitions
from distdl_jax.plans.broadcasting import BroadcastRule, reduction_axes
from distdl_jax.primitives.all_gather import plan_all_gather, plan_reduce_scatter
from distdl_jax.primitives.all_reduce import Operation, plan_all_reduce
from distdl_jax.primitives.all_sum_reduce import plan_all_sum_reduce
from distdl_jax.primitives.broadcast import plan_broadcast
from distdl_jax.primitives.halo_exchange import Halo, checked_halo, checked_periodic, plan_halo_exchange
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.primitives.repartition import plan_repartition
from distdl_jax.primitives.sum_reduce import plan_sum_reduce
from distdl_jax.validation import checked_axes, checked_booleans


@dataclass(frozen=True)
class _BetweenPartitions(ParameterFreeLayer):
    """The arguments that broadcast and sum-reduce share."""

    P_x: Partition
    P_y: Partition
    transpose_src: bool = False
    transpose_dest: bool = False
    preserve_batch: bool = True

    @property
    def output_partition(self) -> Partition:
        """The partition of the output, P_y."""
        return self.P_y


@dataclass(frozen=True)
class Broadcast(_BetweenPartitions):
    """Copies of the subtensors on `P_x`, on `P_y`: `functional.broadcast` with its partitions bound.

    P_x has shape p_0 x ... x p_{D-1} and P_y q_0 x ... x q_{E-1}, D <= E; counted from the last dimension, every p is
    1 or equal to its q. The copies go along the dimensions in which p is 1; the adjoint sums them back.

    **Arguments:**

    - `P_x`, `P_y`: the partitions that the subtensors are on, and that the copies go to.
    - `transpose_src`, `transpose_dest`: count the worker (i, j) of P_x, or of P_y, as (j, i).
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    It is called with this worker's subtensor, or outside P_x with a zero-volume array.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, when it
    is made, where the shapes don't fit.

    Source: DistDL documentation, "broadcast".
    """

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x, P_y=self.P_y)
        BroadcastRule(self.P_x.shape, self.P_y.shape, self.transpose_src, self.transpose_dest)

    def _apply(self, x: Array) -> Array:
        """The copy on P_y, a zero-volume array elsewhere in P_x, `x` outside both."""
        return functional.broadcast(x, **vars(self))

    @property
    def _ends(self) -> Ends:
        return Ends(self.P_x)  # P_y has copies, of which one may do for the next layer

    @property
    def _copied(self) -> tuple[int, ...]:
        if self.transpose_src or self.transpose_dest:
            raise PlanError("No TensorSpec describes the output of a broadcast that transposes a partition.")
        more = self.P_y.dim - self.P_x.dim
        source = (1,) * more + self.P_x.shape
        return tuple(d for d, (p, q) in enumerate(zip(source, self.P_y.shape, strict=True)) if d < more or p < q)

    def plan(self, x: ShapeDtypes, params: object = None) -> Plan:
        """What becomes of what all workers hold, by world rank: without a message, and the same on every worker."""
        return plan_broadcast(x, **vars(self))


@dataclass(frozen=True)
class SumReduce(_BetweenPartitions):
    """Sums of the subtensors on `P_x`, on `P_y`: `functional.sum_reduce` with its partitions bound.

    P_x has shape p_0 x ... x p_{D-1} and P_y q_0 x ... x q_{E-1}, E <= D; counted from the last dimension, every q is
    1 or equal to its p. The sums go along the dimensions in which q is 1; the adjoint copies them back.

    **Arguments:**

    - `P_x`, `P_y`: the partitions that the terms are on, and that the sums go to.
    - `transpose_src`, `transpose_dest`: count the worker (i, j) of P_x, or of P_y, as (j, i).
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    It is called with this worker's term, or outside P_x with a zero-volume array.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, when it
    is made, where the shapes don't fit.

    Source: DistDL documentation, "broadcast" and "backends".
    """

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x, P_y=self.P_y)
        BroadcastRule(self.P_y.shape, self.P_x.shape, self.transpose_dest, self.transpose_src)

    def _apply(self, x: Array) -> Array:
        """The sum on P_y, a zero-volume array elsewhere in P_x, `x` outside both."""
        return functional.sum_reduce(x, **vars(self))

    def plan(self, x: ShapeDtypes, params: object = None) -> Plan:
        """What becomes of what all workers hold, by world rank: without a message, and the same on every worker."""
        return plan_sum_reduce(x, **vars(self))


@dataclass(frozen=True, init=False)
class AllSumReduce(ParameterFreeLayer):
    """The sum of each team's subtensors, on all of the team: `functional.all_sum_reduce` with its arguments bound.

    The workers of P_x, p_0 x ... x p_{D-1}, that agree in every index outside `axes_reduce` are a team. It is its own
    adjoint.

    **Arguments:**

    - `P_x`: the partition.
    - `axes_reduce`, `axes_keep`: dimensions to sum along, or to keep; exactly one of the two.

    It is called with this worker's term; outside P_x with anything, which comes back.

    **Raises:** `InvalidArgumentError`, on every worker, when it is made, if a dimension is not one of P_x's.

    Source: DistDL documentation, "backends"; Hewett and Grady (2020), all-sum-reduce.
    """

    P_x: Partition
    axes_reduce: tuple[int, ...]
    axes_keep: None

    def __init__(
        self,
        P_x: Partition,
        axes_reduce: int | Sequence[int] | None = None,
        axes_keep: int | Sequence[int] | None = None,
    ) -> None:
        check_partitions(P_x=P_x)
        # The fields, in the form in which equal ones are equal.
        vars(self).update(P_x=P_x, axes_reduce=reduction_axes(P_x.shape, axes_reduce, axes_keep), axes_keep=None)

    def _apply(self, x: Array) -> Array:
        """The sum over this worker's team; outside P_x, `x`."""
        return functional.all_sum_reduce(x, self.P_x, self.axes_reduce)

    @property
    def _copied(self) -> tuple[int, ...]:
        return self.axes_reduce

    def plan(self, x: ShapeDtypes, params: object = None) -> Plan:
        """What becomes of what all workers hold, by world rank: without a message, and the same on every worker."""
        return plan_all_sum_reduce(x, self.P_x, self.axes_reduce)


@dataclass(frozen=True)
class AllReduce(ParameterFreeLayer):
    """The reduction of each team's subtensors, on all of the team: `functional.all_reduce` with its arguments bound.

    On P_x, p_0 x ... x p_{D-1}; the operations and their derivatives are in the table of `functional.all_reduce`.

    **Arguments:**

    - `P_x`, `op`: the partition, and one of "sum", "mean", "max", "min", "prod".
    - `axes_reduce`: dimensions to reduce along. Default: all.

    It is called with this worker's subtensor; outside P_x with anything, which comes back.

    **Raises:** as `functional.all_reduce`, when it is called.

    Source: Hewett and Grady (2020), all-sum-reduce, and what follows from it.
    """

    P_x: Partition
    op: Operation = "sum"
    axes_reduce: tuple[int, ...] | int | None = None

    def _apply(self, x: Array) -> Array:
        """The reduction over this worker's team; outside P_x, `x`."""
        return functional.all_reduce(x, self.P_x, self.op, self.axes_reduce)

    @property
    def _copied(self) -> tuple[int, ...]:
        return reduction_axes(
            self.P_x.shape, range(self.P_x.dim) if self.axes_reduce is None else self.axes_reduce, None
        )

    def plan(self, x: ShapeDtypes, params: object = None) -> Plan:
        """What becomes of what all workers hold, by world rank: without a message, and the same on every worker."""
        return plan_all_reduce(x, self.P_x, self.op, self.axes_reduce)


@dataclass(frozen=True)
class Repartition(ParameterFreeLayer):
    """The same tensor in the balanced blocks of another partition: `functional.repartition` with its partitions bound.

    From P_x, p_0 x ... x p_{D-1}, to P_y, q_0 x ... x q_{D-1}, of a tensor of D dimensions. The adjoint is the
    movement back.

    **Arguments:**

    - `P_x`, `P_y`: the partitions that the tensor is on, and is to be on.
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    It is called with this worker's block, balanced or not, or outside P_x with a zero-volume array.

    **Raises:** `InvalidTypeError` where `preserve_batch` is not True or False; when it is called,
    `InvalidArgumentError` where the partitions differ in the number of dimensions, and `PlanError` where the blocks
    don't form a grid.

    Source: DistDL documentation, "repartition"; Hewett and Grady (2020), generalised all-to-all.
    """

    P_x: Partition
    P_y: Partition
    preserve_batch: bool = True

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x, P_y=self.P_y)

    @property
    def output_partition(self) -> Partition:
        """The partition of the output, P_y."""
        return self.P_y

    def _apply(self, x: Array) -> Array:
        """The balanced block on P_y, a zero-volume array elsewhere in P_x, `x` outside both."""
        return functional.repartition(x, self.P_x, self.P_y, preserve_batch=self.preserve_batch)

    def plan(self, x: ShapeDtypes, params: object = None) -> Plan:
        """What becomes of what all workers hold, by world rank: without a message, and the same on every worker."""
        return plan_repartition(x, self.P_x, self.P_y, preserve_batch=self.preserve_batch)


Transpose = DistributedTranspose = Repartition
"""DistDL's earlier names of `Repartition`."""


@dataclass(frozen=True, init=False)
class HaloExchange(ParameterFreeLayer):
    """Blocks with what their neighbours hold around them: `functional.halo_exchange` with its arguments bound.

    On P_x, p_0 x ... x p_{D-1}, a worker that owns [a, b) of a dimension gets [a - left, b + right), clipped to the
    tensor. The adjoint adds each halo back into the block that it was copied from.

    **Arguments:**

    - `P_x`: the partition.
    - `halo`: this worker's ((left, right), ...), in elements, a pair per dimension. Outside P_x () will do.
    - `periodic`: per dimension, whether it wraps around; the same on all workers. Default: none does.

    It is called with this worker's block; outside P_x with anything, which comes back.

    **Raises:** `InvalidArgumentError` where `halo` or `periodic` is for another number of dimensions than P_x has, and
    `InvalidTypeError` where `periodic` is no sequence of booleans; when it is called, `InvalidArgumentError` where the
    widths don't fit, `PlanError` where the blocks don't form a grid.

    Source: DistDL documentation, "backends" (halo exchange) and "convolution"; Hewett and Grady (2020).
    """

    P_x: Partition
    halo: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]

    def __init__(self, P_x: Partition, halo: Sequence[Sequence[int]], periodic: Sequence[bool] = ()) -> None:
        check_partitions(P_x=P_x)
        checked_periodic(periodic, P_x.dim)
        widths = checked_halo(halo, P_x.dim, or_none=not P_x.active)
        # The fields, in the form in which equal ones are equal.
        wraps = checked_booleans("periodic", periodic)
        vars(self).update(P_x=P_x, halo=widths if P_x.active else (), periodic=wraps)

    def _apply(self, x: Array) -> Array:
        """The block with its halo; outside P_x, `x`."""
        return functional.halo_exchange(x, self.P_x, self.halo, periodic=self.periodic)

    def plan(self, x: ShapeDtypes, params: object = None, *, halos: Mapping[int, Halo] | None = None) -> Plan:
        """What becomes of what all workers hold, by world rank: without a message, and the same on every worker.

        Each worker knows its own widths alone, so `halos` has to say those of all workers of P_x, by world rank.
        """
        if halos is None:
            raise InvalidArgumentError(
                "`halos` must be given, the halo of each worker of P_x by world rank, to plan a halo exchange: this "
                "worker knows its own alone."
            )
        pairs = {worker: checked_halo(halos[worker], self.P_x.dim) for worker in self.P_x.ranks}
        return plan_halo_exchange(x, self.P_x, pairs, periodic=self.periodic)


@dataclass(frozen=True)
class AllGather(ParameterFreeLayer):
    """The blocks of all workers along `axes`, side by side: `functional.all_gather` with its arguments bound.

    On P_x, p_0 x ... x p_{D-1}, of a tensor of n_0 x ... x n_{D-1}: every worker gets the whole n_d in the dimensions
    of `axes`. The adjoint is `ReduceScatter`.

    **Arguments:**

    - `P_x`: the partition.
    - `axes`: the dimensions to gather along.

    It is called with this worker's block; outside P_x with anything, which comes back.

    **Raises:** when it is called, `InvalidArgumentError` for a dimension that P_x doesn't have, `PlanError` where the
    blocks don't form a grid.

    Source: Hewett and Grady (2020); the newer DistDL's layer of the same name.
    """

    P_x: Partition
    axes: int | tuple[int, ...]

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)

    def _apply(self, x: Array) -> Array:
        """The gathered block; outside P_x, `x`."""
        return functional.all_gather(x, self.P_x, self.axes)

    @property
    def _copied(self) -> tuple[int, ...]:
        return checked_axes("axes", self.axes, self.P_x.shape)

    def plan(self, x: ShapeDtypes, params: object = None) -> Plan:
        """What becomes of what all workers hold, by world rank: without a message, and the same on every worker."""
        return plan_all_gather(x, self.P_x, self.axes)


@dataclass(frozen=True)
class ReduceScatter(ParameterFreeLayer):
    """Each worker's block of the sum along `axes`: `functional.reduce_scatter` with its arguments bound.

    On P_x, p_0 x ... x p_{D-1}: workers that agree in every index outside `axes` hold terms of one shape; each gets
    its balanced block of their sum. The adjoint is `AllGather`.

    **Arguments:**

    - `P_x`: the partition.
    - `axes`: the dimensions to sum, and to scatter, along.

    It is called with this worker's term; outside P_x with anything, which comes back.

    **Raises:** when it is called, `InvalidArgumentError` for a dimension that P_x doesn't have, `PlanError` where the
    terms differ in shape.

    Source: Hewett and Grady (2020); the newer DistDL's layer of the same name.
    """

    P_x: Partition
    axes: int | tuple[int, ...]

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)

    def _apply(self, x: Array) -> Array:
        """This worker's block of the sum; outside P_x, `x`."""
        return functional.reduce_scatter(x, self.P_x, self.axes)

    def plan(self, x: ShapeDtypes, params: object = None) -> Plan:
        """What becomes of what all workers hold, by world rank: without a message, and the same on every worker."""
        return plan_reduce_scatter(x, self.P_x, self.axes)
