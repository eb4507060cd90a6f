"""The primitives as layers: the functions of `functional` with their arguments bound. They have no parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from jax import Array

import distdl_jax.functional as functional
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.all_gather import plan_all_gather, plan_reduce_scatter
from distdl_jax.functional.all_reduce import Operation, plan_all_reduce
from distdl_jax.functional.all_sum_reduce import plan_all_sum_reduce
from distdl_jax.functional.broadcast import broadcast_rule, plan_broadcast, plan_sum_reduce, sum_rule
from distdl_jax.functional.halo_exchange import Halo, agree_on_halos, checked_halo, checked_periodic, plan_halo_exchange
from distdl_jax.functional.plan import Plan, ShapeDtypes, flags_text
from distdl_jax.functional.repartition import (
    all_to_all_partition,
    checked_shifts,
    plan_all_to_all,
    plan_repartition,
    plan_roll,
)
from distdl_jax.functional.rows import Rows
from distdl_jax.functional.take import (
    checked_rows,
    checked_segments,
    plan_segment_sum,
    plan_take,
    summed_partition,
    taken_partition,
)
from distdl_jax.nn.base.layer import Ends, ParameterFreeLayer
from distdl_jax.nn.base.parameters import ParamShapeDtypes, agree_on_shapes
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.broadcasting import reduction_axes
from distdl_jax.transports.world import Workers
from distdl_jax.validation import checked_axes, checked_axis, checked_booleans


class _Primitive(ParameterFreeLayer):
    """The base of the primitives as layers: `Broadcast(P_x, P_y)(x)` is `broadcast(x, P_x, P_y)`.

    A subclass names its function, whose docstring it extends, and the function's plan. The fields are the arguments of
    both, except x, and are checked at construction.
    """

    _name: ClassVar[str]
    _planned: ClassVar[Callable[..., Plan]]

    def __init_subclass__(
        cls, function: Callable[..., Array] | None = None, plan: Callable[..., Plan] | None = None, **options: Any
    ) -> None:
        super().__init_subclass__(**options)
        if function is not None and plan is not None:
            cls._name, cls._planned = function.__name__, staticmethod(plan)
            cls.__doc__ = f"{cls.__doc__}\n\n{inspect.getdoc(function)}"

    def __post_init__(self) -> None:
        check_partitions(**{name: value for name, value in self._arguments.items() if name in ("P_x", "P_y")})
        _ = self._copied  # dimensions that don't exist

    @property
    def _arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def plan(self, x: ShapeDtypes, params: Any = None) -> Plan:
        """Plan the layer for all workers' blocks, by world rank: without communication, equal on every worker."""
        return self._planned(x, **self._arguments)

    def _agree_on_shapes(self, params: Any, x: Array) -> tuple[ShapeDtypes, ParamShapeDtypes]:
        return agree_on_shapes(self.P_x.world, self._agreeing, self._label, {}, {}, x)

    @property
    def _agreeing(self) -> Workers:
        """The workers that agree on the shapes of a call."""
        return self._team

    @property
    def _label(self) -> str:
        """The subject of that agreement, as a function's: its partitions, and arguments that are not the defaults."""
        P_y, names = self._arguments.get("P_y"), self._arguments.keys() - {"P_x", "P_y"}
        given = {f.name: (self._arguments[f.name], f.default) for f in fields(self) if f.name in names}  # type: ignore[arg-type]
        where = f"on {self.P_x.describe()}" if P_y is None else f"from {self.P_x.describe()} to {P_y.describe()}"
        return f"{self._name}{flags_text(**given)} {where}"


@dataclass(frozen=True)
class _BetweenPartitions(_Primitive):
    """The arguments that broadcast and sum-reduce share."""

    P_x: Partition
    P_y: Partition
    transpose_src: bool = False
    transpose_dest: bool = False
    preserve_batch: bool = True

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x, P_y=self.P_y)


@dataclass(frozen=True)
class Broadcast(_BetweenPartitions, function=functional.broadcast, plan=plan_broadcast):
    """`functional.broadcast` as a layer. The partitions' shapes are checked at construction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        broadcast_rule(self.P_x, self.P_y, self.transpose_src, self.transpose_dest)

    @property
    def _ends(self) -> Ends:
        return Ends(self.P_x)  # P_y has copies, which the next layer may use

    @property
    def _copied(self) -> tuple[int, ...]:
        if self.transpose_src or self.transpose_dest:
            raise PlanError("No TensorSpec describes the output of a broadcast that transposes a partition.")
        more = self.P_y.dim - self.P_x.dim
        source = (1,) * more + self.P_x.shape
        return tuple(d for d, (p, q) in enumerate(zip(source, self.P_y.shape, strict=True)) if d < more or p < q)


@dataclass(frozen=True)
class SumReduce(_BetweenPartitions, function=functional.sum_reduce, plan=plan_sum_reduce):
    """`functional.sum_reduce` as a layer. The partitions' shapes are checked at construction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sum_rule(self.P_x, self.P_y, self.transpose_src, self.transpose_dest)


@dataclass(frozen=True, init=False)
class AllSumReduce(_Primitive, function=functional.all_sum_reduce, plan=plan_all_sum_reduce):
    """`functional.all_sum_reduce` as a layer. The dimensions are checked at construction."""

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
        # The fields, normalised so that equal layers compare equal.
        self._store(P_x=P_x, axes_reduce=reduction_axes(P_x.shape, axes_reduce, axes_keep), axes_keep=None)

    @property
    def _copied(self) -> tuple[int, ...]:
        return self.axes_reduce

    @property
    def _agreeing(self) -> Workers:
        return self.P_x.create_allreduction_partition(self._copied).ranks  # other teams may hold other shapes


@dataclass(frozen=True)
class AllReduce(_Primitive, function=functional.all_reduce, plan=plan_all_reduce):
    """`functional.all_reduce` as a layer."""

    P_x: Partition
    op: Operation = "sum"
    axes_reduce: tuple[int, ...] | int | None = None

    @property
    def _copied(self) -> tuple[int, ...]:
        axes = range(self.P_x.dim) if self.axes_reduce is None else self.axes_reduce
        return reduction_axes(self.P_x.shape, axes, None)

    @property
    def _agreeing(self) -> Workers:
        return self.P_x.create_allreduction_partition(self._copied).ranks  # other teams may hold other shapes


@dataclass(frozen=True)
class AllToAll(_Primitive, function=functional.all_to_all, plan=plan_all_to_all):
    """`functional.all_to_all` as a layer; the output is on `output_partition`."""

    P_x: Partition
    split_axis: int
    concat_axis: int

    def __post_init__(self) -> None:
        super().__post_init__()
        all_to_all_partition(**self._arguments)

    @property
    def output_partition(self) -> Partition:
        """The workers of P_x, with those along `concat_axis` moved along `split_axis`."""
        return all_to_all_partition(**self._arguments)


@dataclass(frozen=True)
class Repartition(_Primitive, function=functional.repartition, plan=plan_repartition):
    """`functional.repartition` as a layer."""

    P_x: Partition
    P_y: Partition
    preserve_batch: bool = True

    def _formula(self, params: Any, x: Array) -> Array:
        return x


Transpose = DistributedTranspose = Repartition
"""DistDL's earlier names for `Repartition`."""


@dataclass(frozen=True, init=False)
class HaloExchange(_Primitive, function=functional.halo_exchange, plan=plan_halo_exchange):
    """`functional.halo_exchange` as a layer. The numbers of widths and of `periodic` are checked at construction."""

    P_x: Partition
    halo: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]

    def __init__(self, P_x: Partition, halo: Sequence[Sequence[int]], periodic: Sequence[bool] = ()) -> None:
        check_partitions(P_x=P_x)
        checked_periodic(periodic, P_x.dim)
        widths = checked_halo(halo, P_x.dim, or_none=not P_x.active)
        # The fields, normalised so that equal layers compare equal.
        wraps = checked_booleans("periodic", periodic)
        self._store(P_x=P_x, halo=widths if P_x.active else (), periodic=wraps)

    def plan(self, x: ShapeDtypes, params: Any = None, *, halos: Mapping[int, Halo] | None = None) -> Plan:
        """Plan the layer for all workers' blocks, by world rank: without communication, equal on every worker.

        A worker knows only its own widths, so `halos` must give the widths of all workers of P_x, by world rank.
        """
        if halos is None:
            raise InvalidArgumentError(
                "`halos` must be given, the halo of each worker of P_x by world rank, to plan a halo exchange: this "
                "worker knows only its own."
            )
        pairs = {worker: checked_halo(halos[worker], self.P_x.dim) for worker in self.P_x.ranks}
        return plan_halo_exchange(x, self.P_x, pairs, periodic=self.periodic)

    def _agree_on_plan(self, params: Any, x: Array) -> Plan:
        shapes, halos = agree_on_halos(x, self.P_x, self.halo, checked_periodic(self.periodic, self.P_x.dim))
        return self.plan(shapes, halos=halos)


@dataclass(frozen=True)
class AllGather(_Primitive, function=functional.all_gather, plan=plan_all_gather):
    """`functional.all_gather` as a layer."""

    P_x: Partition
    axes: int | tuple[int, ...]

    @property
    def _copied(self) -> tuple[int, ...]:
        return checked_axes("axes", self.axes, self.P_x.shape)


@dataclass(frozen=True)
class ReduceScatter(_Primitive, function=functional.reduce_scatter, plan=plan_reduce_scatter):
    """`functional.reduce_scatter` as a layer."""

    P_x: Partition
    axes: int | tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_axes("axes", self.axes, self.P_x.shape)


@dataclass(frozen=True)
class Roll(_Primitive, function=functional.roll, plan=plan_roll):
    """`functional.roll` as a layer. Shifts and dimensions are checked at construction."""

    P_x: Partition
    shift: int | tuple[int, ...]
    axis: int | tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        shifts = checked_shifts(self.shift, self.axis, self.P_x)
        # The fields, normalised so that equal layers compare equal.
        self._store(shift=tuple(shifts.values()), axis=tuple(shifts))


@dataclass(frozen=True, init=False)
class Take(_Primitive, function=functional.take, plan=plan_take):
    """`functional.take` as a layer. Its row numbers are an immutable value, so that the layer is hashable."""

    P_x: Partition
    indices: Rows
    axis: int
    P_y: Partition

    def __init__(self, P_x: Partition, indices: Any, axis: int = 0, P_y: Partition | None = None) -> None:
        check_partitions(P_x=P_x)
        rows, axis = checked_rows("indices", indices), checked_axis("axis", axis, P_x.shape)
        self._store(P_x=P_x, indices=rows, axis=axis, P_y=taken_partition(P_x, rows, axis, P_y))


@dataclass(frozen=True, init=False)
class SegmentSum(_Primitive, function=functional.segment_sum, plan=plan_segment_sum):
    """`functional.segment_sum` as a layer. Its row numbers are an immutable value, so that the layer is hashable."""

    P_x: Partition
    segment_ids: Rows
    num_segments: int
    axis: int
    P_y: Partition

    def __init__(
        self, P_x: Partition, segment_ids: Any, num_segments: int, axis: int = 0, P_y: Partition | None = None
    ) -> None:
        check_partitions(P_x=P_x)
        rows, n = checked_segments(segment_ids, num_segments)
        axis = checked_axis("axis", axis, P_x.shape)
        P_y = summed_partition(P_x, rows, axis, P_y)
        self._store(P_x=P_x, segment_ids=rows, num_segments=n, axis=axis, P_y=P_y)
