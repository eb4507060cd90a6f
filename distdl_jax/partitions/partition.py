"""Partitions: teams of workers, with or without a Cartesian topology, as immutable values.

A partition is computed from integers on every worker, without communication, including workers that are not in it;
communicators are created when data first moves. Source: the DistDL documentation, "backends".
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, Removed, start_of_more
from distdl_jax.partitions.idle_workers import leaves_out
from distdl_jax.partitions.worker_team import WorkerTeam
from distdl_jax.plans import broadcasting
from distdl_jax.plans.broadcasting import BroadcastRule
from distdl_jax.plans.decomposition import index_of
from distdl_jax.plans.shape_dtype import listed, ranks_text, shape_text
from distdl_jax.plans.worker_ranks import worker_ranks
from distdl_jax.transports.open_world import open_world
from distdl_jax.transports.world import World
from distdl_jax.validation import checked_axes, checked_boolean, checked_booleans, checked_integer, checked_integers
from distdl_jax.watchdog.watch.status import worker_status

if TYPE_CHECKING:
    from mpi4py import MPI


class Partition(WorkerTeam):
    """A team of workers in a given order, without a topology (treated as one-dimensional if one is needed).

    Two partitions are equal if they have the same team, in the same order and shape; a partition can be a static
    argument of a jitted function or a key of a dictionary.

    **Arguments:**

    - `comm`: an mpi4py intracommunicator; its workers become the team. Default: `MPI.COMM_WORLD`. All of them must make
      their first partition from it together; everything after that needs no communication.

    **Raises:** `InvalidTypeError` if `comm` is not an intracommunicator; `SetupError` if workers can't communicate.

    **Attributes**, known to every worker except for `rank` and `index`, which are None outside the team:

    - `active`: whether this worker is in the team.
    - `size`, `shape`: the number of workers; per dimension.
    - `ranks`: the team's world ranks (ranks in the communicator of the first partition), in order.
    - `rank`, `index`: this worker's rank or index in the team.

    >>> import distdl_jax as dj
    >>> P_world = dj.Partition()
    >>> P_world.create_partition_inclusive([0])
    Partition(1 worker: 0; index=0)
    """

    __slots__ = ()

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        world = open_world(comm)
        self._set(world, worker_ranks(range(world.size)), (world.size,))

    @staticmethod
    def of_workers(world: World, ranks: Iterable[int]) -> Partition:
        """Return the partition of the workers `ranks` (world ranks, in order); the null partition if empty."""
        partition = object.__new__(Partition)
        ranks = worker_ranks(ranks)
        partition._set(world, ranks, (len(ranks),))
        return partition

    @property
    def index(self) -> Any:
        """This worker's `rank`, if there is no topology; None outside the team."""
        return self.rank

    def __repr__(self) -> str:
        noun = "worker" if self.size == 1 else "workers"
        if not self._ranks:
            text = "no worker"
        elif type(self) is Partition:
            text = f"{self.size} {noun}: {ranks_text(self._ranks)}"
        else:
            text = f"{noun} {ranks_text(self._ranks)}"
        shape = "" if type(self) is Partition else f"{shape_text(self._shape)}, "
        return f"{type(self).__name__}({shape}{text}; index={self.index})"

    def create_partition_inclusive(self, ranks: Iterable[int]) -> Partition:
        """Return the partition of the workers with the given `ranks` in this team, in that order.

        **Raises:** `InvalidArgumentError`, on every worker, if a rank is outside the team or repeated.
        """
        if isinstance(ranks, range) and ranks == range(self.size):
            return self.of_workers(self._world, self._ranks)
        chosen, size = checked_integers("ranks", ranks), self.size
        if outside := [rank for rank in chosen if not 0 <= rank < size]:
            raise InvalidArgumentError(
                f"`ranks` (={listed(chosen)}) names rank {outside[0]}, but {self._summary()} has ranks 0 to {size - 1}."
                f"{start_of_more(max(outside) + 1) if size == self._world.size else ''}"
            )
        if len(set(chosen)) < len(chosen):
            twice = next(rank for place, rank in enumerate(chosen) if rank in chosen[:place])
            raise InvalidArgumentError(f"`ranks` (={listed(chosen)}) names rank {twice} twice; a team has each once.")
        return self.of_workers(self._world, (self._ranks[rank] for rank in chosen))

    def create_partition_union(self, other: Partition) -> Partition:
        """Return the partition of this team's workers, followed by the other workers of `other`, each in order."""
        self._check_partner("other", other)
        own = set(self._ranks)
        return self.of_workers(self._world, self._ranks + tuple(rank for rank in other._ranks if rank not in own))

    def create_cartesian_topology_partition(self, shape: Iterable[int]) -> CartesianPartition:
        """Arrange this team in row-major order on a grid of `shape`.

        **Raises:** `InvalidArgumentError`, on every worker, if the numbers of cells and workers differ.
        """
        sizes = checked_integers("shape", shape)
        cells, workers = math.prod(sizes), self.size
        if cells != workers or any(size < 1 for size in sizes):
            raise InvalidArgumentError(
                f"`shape` (={sizes}) has {cells} cells, but the team has {workers} workers: they must be equal, and "
                f"dimensions 1 or more.{start_of_more(cells) if cells > workers == self._world.size else ''}"
            )
        partition = object.__new__(CartesianPartition)
        partition._set(self._world, self._ranks, sizes)
        return partition

    def grid(self, shape: Iterable[int], ranks: Iterable[int] | None = None) -> CartesianPartition:
        """Arrange some workers of this team in row-major order on a grid of `shape`.

        It is `create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)`. `ranks` has one rank for
        each cell, as in this partition's `rank` (world ranks, for the first partition). Default: the first workers.

        **Raises:** `InvalidArgumentError`, on every worker, if the number of cells differs from that of `ranks`, or
        exceeds the workers; if a rank is outside the team or repeated.
        """
        sizes = checked_integers("shape", shape)
        if ranks is None:
            cells = math.prod(sizes)
            ranks = range(cells if 0 < cells < self.size else self.size)
            leaves_out(self._world, self.size, sizes)
        return self.create_partition_inclusive(ranks).create_cartesian_topology_partition(sizes)

    def slice(
        self, dim: int | Sequence[int] | None = None, index: int | Sequence[int] = 0, *, keepdims: bool = True
    ) -> CartesianPartition:
        """Return the workers whose index along `dim` is `index`, such as the first column or row of a grid.

        For P with shape p_0 x ... x p_{D-1} it is the partition with 1 in place of p_d for each d of `dim`, and the
        same on all workers. `P.slice(dim=1)` is for a tensor that is whole along dimension 1 and cut along the others
        as on P; `P.slice()` is P's first worker, with P's number of dimensions, for a tensor that is not cut.

        **Arguments:**

        - `dim`: the fixed dimension, or several; negative ones count from the end. Default: all.
        - `index`: the fixed index, or one for each of `dim`; negative ones count from the end.
        - `keepdims`: whether `dim` stays, with one worker; otherwise it is removed. So if P is the P_W of a layer, P_n
          x P_out x P_in x ..., its P_x is `P.slice(1, keepdims=False)` and its P_y is `P.slice(2, keepdims=False)`.

        **Raises:** `InvalidArgumentError`, on every worker, for a dimension or an index that P doesn't have;
        `InvalidTypeError` for other types.

        >>> import distdl_jax as dj
        >>> P = dj.planning_world(6).grid([3, 2])
        >>> P.slice(dim=1), P.slice(dim=0, index=-1, keepdims=False)
        (CartesianPartition(3 x 1, workers 0, 2, 4; index=(0, 0)), CartesianPartition(2, workers 4, 5; index=None))
        """
        named = checked_integers("dim", range(self.dim) if dim is None else dim, or_one=True)
        checked_axes("dim", named, self._shape)
        places = checked_integers("index", index, or_one=True)
        places = places * len(named) if len(places) == 1 and not isinstance(index, Iterable) else places
        if len(places) != len(named):
            raise InvalidArgumentError(f"`index` (={index!r}) must be one index, or one for each `dim` (={named}).")
        fixed: dict[int, int] = {}
        for axis, place in zip(named, places, strict=True):
            size = self._shape[axis]
            if not -size <= place < size:
                raise InvalidArgumentError(
                    f"`index` (={index!r}) must be {-size} to {size - 1} along dimension {axis}: {self._summary()} has "
                    f"{size} there."
                )
            fixed[axis % self.dim] = place % size
        shape = (1 if axis in fixed else size for axis, size in enumerate(self._shape) if keepdims or axis not in fixed)
        indices = enumerate(index_of(rank, self._shape) for rank in range(self.size))
        ranks = [rank for rank, cell in indices if all(cell[axis] == place for axis, place in fixed.items())]
        return self.grid(shape, ranks)

    def create_allreduction_partition(
        self, axes_reduce: int | Sequence[int] | None = None, axes_keep: int | Sequence[int] | None = None
    ) -> Partition:
        """Return this worker's team for an all-sum-reduction along `axes_reduce` (or all axes but `axes_keep`).

        Workers with equal indices outside those dimensions form a team, in ascending order. Outside this partition: the
        null partition, which has no workers.

        **Raises:** `InvalidArgumentError`, on every worker, for a dimension that this partition doesn't have.
        """
        axes = broadcasting.reduction_axes(self._shape, axes_reduce, axes_keep)
        if self.rank is None:
            return self.of_workers(self._world, ())
        team = broadcasting.reduction_team(self._shape, axes, self.rank)
        return self.of_workers(self._world, (self._ranks[rank] for rank in team))

    def create_broadcast_partition_to(
        self, P_y: Partition, transpose_src: bool = False, transpose_dest: bool = False
    ) -> tuple[Partition, Partition]:
        """Return this worker's teams for a broadcast from this partition to `P_y`: `(P_send, P_recv)`.

        `P_send` is the team with this worker as root, `P_recv` the one in which it receives a copy; each is the null
        partition if there is none. A team starts with its root, followed by the receiving workers of `P_y`, in order.
        The two are equal on a worker that copies to itself.

        **Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if the
        shapes violate the broadcast rules.
        """
        flags = self._checked_flags(P_y, transpose_src, transpose_dest)
        return self._teams_to(P_y, *flags)

    def create_reduction_partition_to(
        self, P_y: Partition, transpose_src: bool = False, transpose_dest: bool = False
    ) -> tuple[Partition, Partition]:
        """Return this worker's teams for a sum-reduction from this partition to `P_y`: `(P_send, P_recv)`.

        `P_send` is the team in which this worker contributes, `P_recv` the one with this worker as root; each is the
        null partition if there is none. A team starts with its root.

        **Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if
        `P_y` does not broadcast to this partition.
        """
        transpose_src, transpose_dest = self._checked_flags(P_y, transpose_src, transpose_dest)
        P_recv, P_send = P_y._teams_to(self, transpose_dest, transpose_src)
        return P_send, P_recv

    def _checked_flags(self, P_y: Partition, transpose_src: bool, transpose_dest: bool) -> tuple[bool, bool]:
        self._check_partner("P_y", P_y)
        return checked_boolean("transpose_src", transpose_src), checked_boolean("transpose_dest", transpose_dest)

    def _teams_to(self, P_y: Partition, transpose_src: bool, transpose_dest: bool) -> tuple[Partition, Partition]:
        """Return the teams of a broadcast with this worker as root, and with this worker as a member."""
        rule = BroadcastRule(self._shape, P_y._shape, transpose_src, transpose_dest)
        teams = broadcasting.teams_of_worker(rule, self._ranks, P_y._ranks, self.world.rank)
        as_root, as_member = (self.of_workers(self._world, team.participants if team else ()) for team in teams)
        return as_root, as_member

    draw = Removed("dj.draw(P)")

    def broadcast_data(self, data: Any, root: int = 0, P_data: Partition | None = None) -> Any:
        """Broadcast `data`, any picklable object, from one worker to all workers of this partition.

        **Arguments:**

        - `data`: used only on the root. Other workers may pass anything; they need not know its shape or dtype.
        - `root`: the rank of the worker with the data, in `P_data` if given, otherwise in this partition.
        - `P_data`: a partition of workers of this one, for data known on a subpartition only.

        **Returns:** the data; None outside this partition. Collective in this partition.
        """
        source = self if P_data is None else P_data
        self._check_partner("P_data", source)
        worker = source._ranks[source._checked_rank("root", root)]
        if worker not in self._ranks:
            raise InvalidArgumentError(
                f"`root` (={root}) is worker {worker} in `P_data`, which is not in {self._summary()}."
            )
        if not self.active:
            return None
        label = f"broadcast_data from worker {worker} to {self.describe()}"
        own = data if self.world.rank == worker else None
        return self.world.agree(self._ranks, label, own, itemgetter(worker))

    def allgather_data(self, data: Any) -> list[Any] | None:
        """Gather every worker's `data`, any picklable object, on all workers of this partition.

        **Returns:** a list in the order of the ranks; None outside this partition. Collective in this partition.
        """
        if not self.active or self.size == 1:
            return [data] if self.active else None
        # Pickled, since an agreement may return one object for equal contributions: each entry is a separate object.
        everyone = self.world.agree(self._ranks, f"allgather_data on {self.describe()}", pickle.dumps(data))
        return [pickle.loads(everyone[worker]) for worker in self._ranks]

    def _checked_rank(self, name: str, rank: int) -> int:
        rank = checked_integer(name, rank)
        if not 0 <= rank < self.size:
            raise InvalidArgumentError(f"`{name}` (={rank}) must be a rank of {self._summary()}, below {self.size}.")
        return rank

    def _check_partner(self, name: str, other: object) -> None:
        check_partitions(**{"this partition": self, name: other})

    def _summary(self) -> str:
        """Describe the partition, with the same text on every worker."""
        kind = "the partition" if type(self) is Partition else f"the {shape_text(self._shape)} partition"
        return f"{kind} of {self.size} {'worker' if self.size == 1 else 'workers'}"


class CartesianPartition(Partition):
    """A team of workers on a grid: `shape` workers per dimension, numbered in row-major order.

    Created by `grid` or `create_cartesian_topology_partition`. `index` is this worker's index on the grid, a tuple.

    >>> import distdl_jax as dj
    >>> dj.Partition().grid([1, 1])
    CartesianPartition(1 x 1, worker 0; index=(0, 0))
    """

    __slots__ = ()

    _is_grid = True

    def __init__(self) -> None:
        raise InvalidTypeError("A CartesianPartition is made from another partition: Partition().grid([2, 2]).")

    @property
    def index(self) -> tuple[int, ...] | None:
        """This worker's index on the grid; None outside the team."""
        return None if self.rank is None else index_of(self.rank, self._shape)

    def cartesian_index(self, rank: int) -> tuple[int, ...]:
        """Return the index on the grid of the worker with the given rank in this partition."""
        return index_of(self._checked_rank("rank", rank), self._shape)

    def neighbor_ranks(self, rank: int | None = None) -> list[tuple[int | None, int | None]] | None:
        """Return, per dimension, the ranks (in this partition) of the workers before and after; None at the grid's end.

        `rank`: the worker whose neighbours to return. Default: this worker, with None outside the team.
        """
        rank = self.rank if rank is None else rank
        if rank is None:
            return None
        neighbors: list[tuple[int | None, int | None]] = []
        for axis, (place, size) in enumerate(zip(self.cartesian_index(rank), self._shape, strict=True)):
            stride = math.prod(self._shape[axis + 1 :])
            neighbors.append((rank - stride if place else None, rank + stride if place + 1 < size else None))
        return neighbors

    def create_cartesian_subtopology_partition(self, remain_dims: Iterable[bool]) -> CartesianPartition | Partition:
        """Return this worker's slice of the grid: dimensions marked true remain, the others are fixed at its own index.

        Like MPI's Cart_sub. Outside this partition: the null partition, which has no workers.
        """
        remain = checked_booleans("remain_dims", remain_dims)
        if len(remain) != self.dim:
            raise InvalidArgumentError(
                f"`remain_dims` (={remain}) has {len(remain)} entries, but {self._summary()} has {self.dim} dimensions."
            )
        axes = [axis for axis in range(self.dim) if remain[axis]]
        team = self.create_allreduction_partition(axes)
        return team.create_cartesian_topology_partition([self._shape[axis] for axis in axes]) if team.active else team


def check_workers(name: str, value: object) -> None:
    """Reject a value that is neither a partition nor None."""
    if value is not None and not isinstance(value, Partition):
        raise InvalidTypeError(f"`{name}` (={value!r}) must be a partition, or None for all workers.")


def check_partitions(**partitions: object) -> None:
    """Reject arguments, given by name, that are not partitions of one world; mark that world as in use."""
    for name, P in partitions.items():
        if not isinstance(P, Partition):
            raise InvalidTypeError(f"`{name}` (={P!r}) must be a partition.")
    (first, expected), *others = ((name, P.world) for name, P in partitions.items() if isinstance(P, Partition))
    for name, world in others:
        if world is not expected:
            shown = first if " " in first else f"`{first}`"
            raise InvalidArgumentError(
                f"`{name}` is on another communicator than {shown}, so their ranks can't be compared. Create both from "
                "one first partition."
            )
    worker_status().uses(expected)
