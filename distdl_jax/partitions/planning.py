"""A world for planning: one process makes the partitions and plans of any number of workers; nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jax import Array

from distdl_jax.errors import InvalidArgumentError, SetupError
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.transports.world import Transport, Workers, World
from distdl_jax.validation import MOST_WORKERS, checked_integer
from distdl_jax.watchdog.programs.ir import Program


def planning_world(n: int, rank: int = 0) -> Partition:
    """Return the first partition of a world of `n` virtual workers, for planning in this process.

    Partitions, layers and their plans are the same in it as in a job of `n` workers. No data moves: operations that
    need another worker raise `SetupError`. Each call makes a new world.

    **Arguments:**

    - `n`: the number of workers.
    - `rank`: the worker that this process represents, in `P.rank` and `P.active`. Plans don't depend on it.

    **Returns:** the `Partition` of all `n` workers.

    **Raises:** `InvalidArgumentError` if `n` is below 1 or above 2^24, or `rank` not one of 0 to n - 1;
    `InvalidTypeError` if one is not an integer.

    >>> import numpy
    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4096)
    >>> row = dj.ShapeDtype((1, 100), numpy.dtype("float32"))
    >>> layer = dj.nn.Repartition(P.grid([4096, 1]), P.grid([2, 1]))
    >>> plan = layer.plan(dict.fromkeys(P.ranks, row))
    >>> plan.output(1), plan.output(4095)
    (float32[2048, 100], float32[1, 0])
    """
    n = checked_integer("n", n, least=1, most=MOST_WORKERS)
    rank = checked_integer("rank", rank)
    if not 0 <= rank < n:
        raise InvalidArgumentError(f"`rank` (={rank}) must be one of the {n} workers, 0 to {n - 1}.")
    return Partition.of_workers(_PlanningWorld(rank, n), range(n))


def is_for_planning(world: World) -> bool:
    """Return whether a world has this worker only, with the ranks of others."""
    return isinstance(world, _PlanningWorld)


class _PlanningWorld:
    """Worker `rank` of `size`, without the others."""

    calls = None
    may_measure = False
    records = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @property
    def transport(self) -> Transport:
        """None: raises `SetupError`."""
        self._refuse()

    def agree(
        self, team: Workers, label: str, contribution: Any, decide: Callable[[dict[int, Any]], Any] = dict
    ) -> Any:
        """Raise `SetupError`: there is no worker to agree with."""
        self._refuse()

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Do nothing, since nothing runs."""

    def check_devices(self) -> None:
        """Accept all devices, since nothing runs on them."""

    def _refuse(self) -> NoReturn:
        raise SetupError("This world was made for planning, without other workers: no data can move in it.")


class RecordingWorld(_PlanningWorld):
    """Worker `rank` of `world`, for programs that are traced, and never run.

    Movements leave a mark in them, and layers agree without others, using the known blocks of all workers.

    - `agreements`: by subject, all workers' inputs and parameters of the traced layers, and their plans, in order.
    """

    records = True

    def __init__(self, rank: int, world: World) -> None:
        super().__init__(rank, world.size)
        self.stands_for = world
        self.agreements: dict[str, list[tuple[Mapping[int, Any], Mapping[int, Any], Any]]] = {}

    @property
    def transport(self) -> Any:
        """The ordering of operations requested by layers, which marks have anyway."""
        return _NoTransport

    def known(self, label: str, contribution: Any) -> Any:
        """Return all workers' contributions to an agreement of a traced layer, on inputs and parameters.

        Raises `SetupError` if this worker's contribution is not the expected one.
        """
        if label in self.agreements:
            x, params, _ = self._next(label)
            own_block = x[self.rank]
            match contribution:
                case ShapeDtype() if contribution == own_block:
                    return x
                case (ShapeDtype() as block, dict() as own) if block == own_block and own.keys() == self._names(params):
                    return x, params
        self._refuse()

    def plan_of(self, label: str) -> Any:
        """Return the plan of a traced layer, the same on all workers; raises `SetupError` like `known`."""
        if label not in self.agreements:
            self._refuse()
        return self._next(label)[2]

    def _next(self, label: str) -> tuple[Mapping[int, Any], Mapping[int, Any], Any]:
        several = self.agreements[label]
        return several.pop(0) if len(several) > 1 else several[0]

    def _names(self, params: Mapping[int, Any]) -> Any:
        return params.get(self.rank, {}).keys()


class _NoTransport:
    """The transport of programs that never run."""

    @staticmethod
    def sent_first(x: Array) -> Array:
        """Return `x`."""
        return x
