"""Threads that stand for the workers of a world, to trace what each of them would run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distdl_jax.tracing.world import World
from distdl_jax.transports.threads.current_world import simulated_world
from distdl_jax.transports.threads.workers import Workers


def on_stand_ins(world: World, program: Callable[[int], Any]) -> list[Any]:
    """Return what `program(rank)` returns for each worker of `world`, in a thread that stands for that worker.

    There the partitions of `world` are that worker's, so layers that were made outside can be traced as on it. The
    workers agree as in a job; nothing may run.
    """

    def on_worker() -> Any:
        return program(simulated_world.value.rank)

    workers = Workers(world.size, stands_for=world)
    try:
        return workers.run(on_worker)
    finally:
        workers.close()
