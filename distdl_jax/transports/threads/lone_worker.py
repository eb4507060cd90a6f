"""One worker of a world, whose programs are traced in this thread without the others, and never run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distdl_jax.errors import SetupError
from distdl_jax.transports.threads.current_world import simulated_world
from distdl_jax.transports.threads.rendezvous import Rendezvous
from distdl_jax.transports.threads.world import ThreadWorld
from distdl_jax.transports.world import Workers, World
from distdl_jax.watchdog.watch.status import WorkerStatus, acting_as

OF_ONE = ("the derivative of ",)
"""Agreements in which one worker's program is enough: it is compared with those of workers that are known."""

OF_EQUALS = ("the program of ", "value_and_grad on ", "all_sum_reduce on ")
"""Agreements to which all workers contribute the same, or raise."""


class OthersNeededError(SetupError):
    """A program depends on what other workers trace."""


class _NoRendezvous(Rendezvous):
    """A place where nobody comes."""

    def __init__(self, size: int) -> None:
        self.workers: Any = range(size)


class LoneWorld(ThreadWorld):
    """One worker of `stands_for`."""

    def __init__(self, rank: int, stands_for: World) -> None:
        super().__init__(rank, _NoRendezvous(stands_for.size), stands_for)

    def agree(
        self, team: Workers, label: str, contribution: Any, decide: Callable[[dict[int, Any]], Any] = dict
    ) -> Any:
        if label.startswith(OF_ONE):
            return decide({self.rank: contribution})
        if label.startswith(OF_EQUALS):
            return decide(dict.fromkeys(team, contribution))
        raise OthersNeededError(f"{label} needs the other workers.")


@contextmanager
def alone(world: World, worker: int | None = None) -> Iterator[LoneWorld]:
    """Make this thread a worker of `world`, by default its own, until the end."""
    rank = world.rank if worker is None else worker
    lone = LoneWorld(rank, world)
    with acting_as(WorkerStatus(rank, world.size)), simulated_world(lone):
        yield lone
