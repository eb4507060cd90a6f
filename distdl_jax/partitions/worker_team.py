"""The base of partitions: workers of a world in a given order and shape, as an immutable value."""

from __future__ import annotations

from typing import NoReturn

from distdl_jax.errors import InvalidTypeError
from distdl_jax.partitions.idle_workers import has_workers
from distdl_jax.partitions.static import Static
from distdl_jax.plans import broadcasting
from distdl_jax.plans.shape_dtype import ranks_text, shape_text
from distdl_jax.transports.threads.current_world import original_world, world_here
from distdl_jax.transports.world import World


class WorkerTeam(Static):
    """Workers of a world in a given order and shape: the values of a partition, without methods that make others.

    Two teams are equal if they have the same class and the same workers, in the same order and shape.
    """

    __slots__ = ("_rank", "_ranks", "_shape", "_world")

    _ranks: tuple[int, ...]
    _shape: tuple[int, ...]
    _world: World
    _rank: int | None
    _is_grid = False

    def _set(self, world: World, ranks: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self._world = original_world(world)
        self._ranks = ranks
        self._shape = shape
        self._rank = broadcasting.place_of(self._world.rank, ranks)
        has_workers(self._world, ranks, self._is_grid)

    @property
    def world(self) -> World:
        """The world of the partition's ranks."""
        return world_here(self._world)

    @property
    def active(self) -> bool:
        """Whether this worker is in the team."""
        return self.rank is not None

    @property
    def size(self) -> int:
        """The number of workers in the team."""
        return len(self._ranks)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of workers per dimension; `(size,)` without a topology."""
        return self._shape

    @property
    def dim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The team's world ranks, in order."""
        return self._ranks

    @property
    def rank(self) -> int | None:
        """This worker's rank in the team; None outside it."""
        world = self.world
        return self._rank if world is self._world else broadcasting.place_of(world.rank, self._ranks)

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(
            f"{self!r} can't be pickled: it belongs to the workers that are running. Save its `shape` and `ranks`, "
            "from which it can be made again."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerTeam):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        # Teams with and without a topology differ, even if their shapes agree: `index` is a tuple in one, a number in
        # the other, and a program traced for one must not be used for the other.
        return type(self), id(self._world), self._ranks, self._shape

    def describe(self) -> str:
        """Describe the team and its shape, with the same text on every worker."""
        return f"{shape_text(self._shape)} ({ranks_text(self._ranks)})"
