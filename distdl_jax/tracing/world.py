"""The seam: what a world of workers is, and what a transport carries between them.

All that the library knows of the machine is written down here. A back-end is a package beside this file that has both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from jax import Array

from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import Workers as Workers
from distdl_jax.watchdog.programs.ir import Operation, Program
from distdl_jax.watchdog.watch.call_log import CallLog

Reduction = Literal["sum", "max"]


class OutsideWorldError(Exception):
    """A program communicates with workers that are not in the world that it is read for."""


class World(Protocol):
    """The workers that every partition made from it refers to. Compared by identity; one object for each worker.

    - `rank`, `size`: this worker's number among all of them, and how many they are.
    """

    @property
    def rank(self) -> int:
        """This worker's world rank."""

    @property
    def size(self) -> int:
        """The number of workers."""

    @property
    def transport(self) -> Transport:
        """What carries arrays between the workers while compiled programs run."""

    @property
    def calls(self) -> CallLog | None:
        """Where calls of checked functions count, for a watchdog that compares the workers; None without one."""

    @property
    def may_measure(self) -> bool:
        """Whether times measured by this worker say how long its programs take."""

    @property
    def records(self) -> bool:
        """Whether movements leave a mark in traced programs, and nothing runs."""

    def agree(
        self,
        team: Workers,
        label: str,
        contribution: Any,
        decide: Callable[[dict[int, Any]], Any] = dict,
    ) -> Any:
        """Return what the first worker of `team` decides on all contributions (by world rank); for use while tracing.

        Collective in `team`. `label` says, in the same words on all of them, what it is about: workers that mean
        different things learn of it, and raise. `decide` runs on the first worker alone, and its result goes to all.

        **Raises:** `PlanError`, on all workers, where some worker of the team is about to do something else, or has
        left; `SetupError` in a world that has no workers but this one to talk to.
        """

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Keep the workers' programs of the function `name` for reports of workers that wait."""

    def check_devices(self) -> None:
        """Raise `SetupError` where this worker's programs could not communicate on its JAX devices."""


class Transport(Protocol):
    """One worker's operations on arrays inside a traced program.

    They block, and run in the order in which they were traced, also in loops and branches. Partners are world ranks.
    Any dtype of JAX's travels, in any length. Each operation depends on its array, and what it returns on the
    operation, in the compiled program too: that is how callers keep it from being dropped.
    """

    @property
    def effect(self) -> Any:
        """The JAX effect that orders its operations."""

    def send(self, x: Array, dest: int, tag: int) -> Array:
        """Send `x` to a worker; something that depends on it."""

    def receive(self, expected: ShapeDtype, source: int, tag: int, after: Array) -> Array:
        """Receive an array from a worker, not before `after` is there."""

    def sendrecv(self, x: Array, dest: int, expected: ShapeDtype, source: int, tag: int) -> Array:
        """Send `x` to one worker while receiving an array from another."""

    def broadcast(self, x: Array, team: Workers) -> Array:
        """Return the first worker's `x`, on every worker of `team`; the others pass an array of the same shape and
        dtype.
        """

    def reduce(self, x: Array, team: Workers, op: Reduction) -> Array:
        """Return the reduction of the workers' `x`, on the first worker of `team`; elsewhere something that depends on
        it.
        """

    def allreduce(self, x: Array, team: Workers, op: Reduction) -> Array:
        """Return the reduction of the workers' `x`, on every worker of `team`."""

    def sent_first(self, x: Array) -> Array:
        """Return `x`, for those who are to use it after what was sent so far, for which others may wait."""

    def operation(self, equation: Any) -> Operation | None:
        """Return what an equation of a traced program communicates; None where it is none of this transport's
        operations.
        """
