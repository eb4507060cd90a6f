"""A quick estimate of what a layer costs on any grid, to choose those that are worth a plan.

A layer is planned on one worker, and on two or three along each dimension. What moves there is scaled to other grids as
if dimensions had nothing to do with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distdl_jax.advice.graph import Piece, Shape
from distdl_jax.advice.seconds import Stopwatch
from distdl_jax.costs.layers import PlacedLayer
from distdl_jax.costs.step_program import Event, step_events
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.planning import planning_world
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.work import Work
from distdl_jax.primitives.plan import PARAMS, Action
from distdl_jax.tensors import TensorSpec


class Movement(NamedTuple):
    """What the inner one of `workers` along a dimension sends: how many messages, of how many bytes in all."""

    workers: int
    messages: int
    nbytes: int


@dataclass(frozen=True)
class Estimate:
    """What a layer costs on one worker, and what moves where it is cut along one dimension.

    - `works`: its arithmetic; `parameters`: bytes of them.
    - `movements`: along each dimension; None where it can't be cut. `feature_axis`: that of the channels.
    """

    clock: Stopwatch
    copies: int
    y_shape: Shape
    works: tuple[Event, ...]
    parameters: int
    movements: tuple[Movement | None, ...]
    feature_axis: int

    @classmethod
    def of(cls, piece: Piece, clock: Stopwatch, copies: int) -> Estimate:
        """Return the estimate of a layer."""
        dims = len(piece.x_shape)
        layer, actions = _planned(piece, (1,) * dims, clock)
        works = tuple(event for event in _events(piece, actions, 0) if isinstance(event.does, Work))
        itemsize, specs = clock.dtype.itemsize, PlacedLayer("", layer, piece.name).param_specs
        parameters = sum(math.prod(spec.global_shape) for spec in specs) * itemsize
        movements = tuple(_movement(piece, d, clock) for d in range(dims))
        axis = getattr(piece.layer, "feature_axis", 1) % dims
        return cls(clock, copies, piece.y_shape, works, parameters, movements, axis)

    def seconds(self, grid: Shape) -> float:
        """Return the seconds of a training step on a grid, roughly; infinite where it can't be cut so."""
        if len(grid) != len(self.y_shape):  # behind a layer that changes the number of dimensions
            return 0.0
        if any(p > 1 and movement is None for p, movement in zip(grid, self.movements, strict=True)):
            return math.inf
        workers, machine = math.prod(grid), self.clock.machine
        busy = min(workers, machine.workers_per_host)
        share = math.prod(-(-n // p) / n for n, p in zip(self.y_shape, grid, strict=True))
        seconds = sum(
            machine.work_seconds(_scaled(event.does, share), event.direction, self.clock.dtype.name, busy)
            for event in self.works
            if isinstance(event.does, Work)
        )
        seconds += sum(self._moved(grid, d) for d in range(len(grid)))
        if not self.parameters:
            return seconds
        channels, (sums, copies) = grid[self.feature_axis], ("reduce", "bcast")
        own, hosts = self.parameters // channels, -(-workers // machine.workers_per_host)
        if (team := workers // channels) > 1:
            seconds += sum(self.clock.collective(kind, team, own, min(hosts, team)) for kind in (sums, copies))
        return seconds + self.clock.update((own // self.clock.dtype.itemsize,), self.copies, workers)

    def _moved(self, grid: Shape, d: int) -> float:
        movement, machine, workers = self.movements[d], self.clock.machine, grid[d]
        if workers == 1 or movement is None or not movement.messages:
            return 0.0
        apart = math.prod(grid[d + 1 :])
        level = "network" if apart * workers > machine.workers_per_host else "host"
        others = math.prod(grid) / workers
        messages, nbytes = movement.messages, movement.nbytes / others
        if d == self.feature_axis:  # along the channels, everyone needs the blocks of all others
            more = (workers - 1) / (movement.workers - 1)
            messages, nbytes = round(messages * more), nbytes * more * movement.workers / workers
        pairs = min(apart, machine.workers_per_host)
        return messages * self.clock.message(nbytes / messages, level, pairs)


def _scaled(work: Work, share: float) -> Work:
    names = ("flops", "flops_x", "flops_params", "read", "written")
    return replace(work, **{name: math.ceil(share * getattr(work, name)) for name in names})


def _planned(piece: Piece, grid: Shape, clock: Stopwatch) -> tuple[object, Sequence[Action]]:
    P = planning_world(math.prod(grid)).grid(grid)
    blocks = TensorSpec(piece.x_shape, P).block_shapes
    layer = piece.on(P)
    plan = piece.plan(layer, {worker: ShapeDtype(shape, clock.dtype) for worker, shape in blocks.items()}, P)
    return layer, plan.actions


def _movement(piece: Piece, d: int, clock: Stopwatch) -> Movement | None:
    """Return what moves where the layer is cut along dimension d alone, over three workers or, if need be, two."""
    for workers in (3, 2):
        if piece.x_shape[d] < workers:
            continue
        try:
            _, actions = _planned(piece, tuple(workers if e == d else 1 for e in range(len(piece.x_shape))), clock)
        except (InvalidArgumentError, PlanError):
            continue
        moves = [action for action in actions if action.of != PARAMS]
        found = [event.does for event in _events(piece, moves, 1) if not isinstance(event.does, Work)]
        return Movement(workers, len(found), sum(operation.bytes_sent for operation in found))
    return None


def _events(piece: Piece, actions: Sequence[Action], worker: int) -> list[Event]:
    return list(step_events(actions, worker, x_has_gradient=piece.differentiates_x))
