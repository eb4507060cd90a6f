"""A line if a program's grids leave workers of the job idle, printed once in a process."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from distdl_jax.plans.shape_dtype import ranks_text, shape_text
from distdl_jax.source_lines import user_line
from distdl_jax.transports.world import Workers, World

_log = logging.getLogger("distdl_jax")
_said = False


class _Grids:
    """The teams of a world's partitions, besides the first, of all; and the first grid that omitted workers."""

    def __init__(self) -> None:
        self.teams: set[Workers] = set()
        self.left_out_by = ""


_grids: WeakKeyDictionary[World, _Grids] = WeakKeyDictionary()


def has_workers(world: World, ranks: Workers, is_grid: bool) -> None:
    """Record that a partition has these workers of a world."""
    if is_grid or len(ranks) < world.size:
        _grids.setdefault(world, _Grids()).teams.add(ranks)


def leaves_out(world: World, team: int, shape: Sequence[int]) -> None:
    """Record a grid of the first workers of a team, one for each cell, if others of the world are omitted.

    A single worker is not such a grid: whole tensors are on one.
    """
    if 1 < math.prod(shape) < team == world.size:
        grids = _grids.setdefault(world, _Grids())
        grids.left_out_by = grids.left_out_by or f"{shape_text(tuple(shape))} ({user_line()})"


def say_who_is_idle(world: World) -> None:
    """Warn, on worker 0, if grids omit workers when data begins to move."""
    global _said
    if _said or world.rank or (grids := _grids.get(world)) is None or not grids.left_out_by:
        return
    busy = set[int]().union(*grids.teams)
    if idle := tuple(rank for rank in range(world.size) if rank not in busy):
        _said = True
        who, have, them = (
            (f"worker {idle[0]}", "has", "it") if len(idle) == 1 else (f"workers {ranks_text(idle)}", "have", "them")
        )
        _log.warning(
            f"distdl_jax: {who} of {world.size} {have} nothing to do: no partition has {them} so far, and the grid "
            f"{grids.left_out_by} takes the first workers only."
        )
