"""The interface to back-ends: worlds of workers, and transports of arrays between them.

It contains everything that the library knows about the machine. A back-end is a package that implements both.
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
    """A program communicates with workers outside the world for which it is read."""


class World(Protocol):
    """The workers to which every partition made from it refers. Compared by identity; one object for each worker.

    - `rank`, `size`: this worker's number among all of them, and their total.
    """

    @property
    def rank(self) -> int:
        """This worker's world rank."""

    @property
    def size(self) -> int:
        """The number of workers."""

    @property
    def transport(self) -> Transport:
        """The transport of arrays between the workers while compiled programs run."""

    @property
    def calls(self) -> CallLog | None:
        """The log of calls of checked functions, for a watchdog that compares the workers; None without one."""

    @property
    def may_measure(self) -> bool:
        """Whether times measured by this worker represent the run time of its programs."""

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
        """Return the first worker's decision on all contributions of `team` (by world rank); for use while tracing.

        Collective in `team`. `label` is the subject, with the same text on all of them: workers with different subjects
        detect that, and raise. `decide` runs only on the first worker, and its result is sent to all.

        **Raises:** `PlanError`, on all workers, if some worker of the team is about to do something else, or has left;
        `SetupError` in a world without other workers.
        """

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Store the workers' programs of the function `name` for reports about waiting workers."""

    def check_devices(self) -> None:
        """Raise `SetupError` if this worker's programs could not communicate on its JAX devices."""


class Transport(Protocol):
    """One worker's operations on arrays inside a traced program.

    They block, and run in the order in which they were traced, including in loops and branches. Partners are world
    ranks. Any JAX dtype can be sent, in any length. Each operation depends on its array, and its result on the
    operation, in the compiled program too: callers use that to keep it from being dropped.
    """

    @property
    def effect(self) -> Any:
        """The JAX effect that orders its operations."""

    def send(self, x: Array, dest: int, tag: int) -> Array:
        """Send `x` to a worker; return an array that depends on it."""

    def receive(self, expected: ShapeDtype, source: int, tag: int, after: Array) -> Array:
        """Receive an array from a worker, not before `after` is available."""

    def sendrecv(self, x: Array, dest: int, expected: ShapeDtype, source: int, tag: int) -> Array:
        """Send `x` to one worker while receiving an array from another."""

    def broadcast(self, x: Array, team: Workers) -> Array:
        """Return the first worker's `x`, on every worker of `team`; the others pass an array of the same shape and
        dtype.
        """

    def reduce(self, x: Array, team: Workers, op: Reduction) -> Array:
        """Return the reduction of the workers' `x`, on the first of `team`; elsewhere an array that depends on it."""

    def allreduce(self, x: Array, team: Workers, op: Reduction) -> Array:
        """Return the reduction of the workers' `x`, on every worker of `team`."""

    def sent_first(self, x: Array) -> Array:
        """Return `x` for uses after the messages sent so far, for which others may wait."""

    def operation(self, equation: Any) -> Operation | None:
        """Return the communication of an equation in a traced program; None if it is not this transport's."""
