"""A world for planning: one process makes the partitions and plans of any number of workers, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from distdl_jax.errors import InvalidArgumentError, SetupError
from distdl_jax.partition import Partition
from distdl_jax.programs.ir import Program
from distdl_jax.validation import MOST_WORKERS, checked_integer
from distdl_jax.world import Transport, Workers


def planning_world(n: int, rank: int = 0) -> Partition:
    """Return the first partition of a world of `n` workers that are not there, to plan in this process.

    Partitions, layers and their plans are made in it as in a job of `n` workers. No data moves: what needs another
    worker raises `SetupError`. Each call makes a world of its own.

    **Arguments:**

    - `n`: the number of workers.
    - `rank`: the worker that this process stands for, as `P.rank` and `P.active` say. Plans don't depend on it.

    **Returns:** the `Partition` of all `n` workers.

    **Raises:** `InvalidArgumentError` where `n` is below 1 or above 2^24, or `rank` not one of 0 to n - 1;
    `InvalidTypeError` where one is not an integer.

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


class _PlanningWorld:
    """Worker `rank` of `size`, without the others."""

    calls = None
    may_measure = False

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
        """Raise `SetupError`: there is nobody to agree with."""
        self._refuse()

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Keep nothing, since nothing runs."""

    def check_devices(self) -> None:
        """Accept all devices, since nothing runs on them."""

    def _refuse(self) -> NoReturn:
        raise SetupError("This world was made for planning, without other workers: no data can move in it.")
