"""A tensor as it is drawn: plain numbers, with titles and notes in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from typing import NamedTuple

from distdl_jax.plans.decomposition import Box, Range
from distdl_jax.plans.shape_dtype import shape_text

MOST = 64
"""How many workers are drawn: of more, those with the first indices along each dimension."""


class Block(NamedTuple):
    """A block, the workers that hold it, and the number of the copy that it is drawn in."""

    workers: tuple[int, ...]
    box: Box
    copy: int = 0

    @property
    def is_empty(self) -> bool:
        return any(start >= stop for start, stop in self.box)


@dataclass(frozen=True)
class Blocks:
    """A tensor as it is drawn.

    - `name`: "x"; "" where there is one tensor only.
    - `shape`: of the whole tensor; of a grid of workers, the grid's.
    - `grid`: how many blocks there are along each dimension.
    - `blocks`: those that are drawn.
    - `copies`: of the tensor.
    - `workers`: how many hold a block, drawn or not.
    - `outside`: workers without a block, in words.
    - `are_cells`: whether it is a grid of workers, with indices in the place of ranges.
    """

    name: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    blocks: tuple[Block, ...]
    copies: int = 1
    workers: int = 0
    outside: str = ""
    are_cells: bool = False

    @cached_property
    def split(self) -> tuple[int, ...]:
        """The dimensions that are split."""
        return tuple(d for d, p in enumerate(self.grid) if p > 1)

    @cached_property
    def drawn(self) -> tuple[int, ...]:
        """The dimensions that are drawn: those that are split, and features as far as there are three or fewer."""
        features = range(2, len(self.shape)) if len(self.shape) > 2 else range(len(self.shape))
        whole = [d for d in reversed(features) if d not in self.split]
        return tuple(sorted((*self.split, *whole[: max(0, min(3, len(features)) - len(self.split))])))

    @property
    def left_out(self) -> int:
        """How many workers hold a block that isn't drawn."""
        return self.workers - len({worker for block in self.blocks for worker in block.workers})

    @property
    def title(self) -> str:
        """The tensor in words."""
        if self.are_cells:
            workers = f"{self.workers:,} worker{'s' * (self.workers != 1)}"
            return f"{shape_text(self.grid)} grid of {workers}" if len(self.grid) > 1 else f"{workers} in a row"
        on = f"{self.workers:,} worker{'s' * (self.workers != 1)}"
        how = f"dimension{'s' * (len(self.split) > 1)} {listing(self.split)} split" if self.split else "not split"
        return f"{self.name}{': ' * bool(self.name)}{shape_text(self.shape)} on {on}, {how}"

    @property
    def notes(self) -> list[str]:
        """What the picture doesn't show, in words."""
        found = []
        hidden = [d for d in range(len(self.shape)) if d not in self.drawn]
        if hidden and not self.are_cells:
            lengths = listing([f"{d} (length {self.shape[d]})" for d in hidden])
            found.append(f"Not drawn: dimension{'s' * (len(hidden) > 1)} {lengths}, whole on every worker.")
        if self.copies > 1:
            found.append(f"There are {self.copies:,} copies of the tensor.")
        if self.left_out > 0:
            found.append(
                f"Drawn are workers with the first indices along each dimension; {self.left_out:,} more of the "
                f"{shape_text(self.grid)} grid are left out."
            )
        if empty := sorted({worker for block in self.blocks if block.is_empty for worker in block.workers}):
            found.append(f"Empty blocks: {named(empty)}.")
        if self.outside:
            found.append(f"{'Outside' if self.are_cells else 'Without a block'}: {self.outside}.")
        return found

    @cached_property
    def panels(self) -> dict[tuple[object, ...], list[Block]]:
        """Blocks on one face, by the copy, the ranges along dimensions of which there is a row each, and the slab's."""
        found: dict[tuple[object, ...], list[Block]] = {}
        for block in sorted(self.blocks, key=lambda block: (block.copy, block.box)):
            if not block.is_empty:
                outer = tuple(block.box[d] for d in self.drawn[:-2])
                found.setdefault((block.copy, outer[:-1], outer[-1:]), []).append(block)
        return found

    def caption(self, key: tuple[object, ...]) -> str:
        """Return what a face is of."""
        copy, rows, slab = key
        assert isinstance(rows, tuple) and isinstance(slab, tuple)
        found = [f"copy {copy}"] if self.copies > 1 and len({k[0] for k in self.panels}) > 1 else []
        for d, bounds in zip(self.drawn[: len(rows) + len(slab)], (*rows, *slab), strict=True):
            if self.grid[d] > 1:
                found.append(f"dim {d}: {self.range_text(bounds)}")
        return ", ".join(found)

    def box_text(self, block: Block) -> str:
        """Return the box of a block as an index; of a grid of workers, the worker's index."""
        return f"[{', '.join(map(self.range_text, block.box))}]"

    def range_text(self, bounds: Range) -> str:
        """Return a range as Python's slices are written; of a grid of workers, the index."""
        return f"{bounds[0]}" if self.are_cells else f"{bounds[0]}:{bounds[1]}"


def listing(items: Iterable[object]) -> str:
    """Return items in a sentence: "1, 2 and 3"."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def named(workers: Sequence[int]) -> str:
    """Return workers in words, runs of them as a range; of many runs the first ones.

    >>> named([0, 1, 2, 5]), named([3])
    ('workers 0-2, 5', 'worker 3')
    """
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(workers), lambda pair: pair[1] - pair[0])]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    more = ", ..." if len(shown) > 12 else ""
    return f"worker{'s' * (len(workers) > 1)} {', '.join(shown[:12])}{more}"


def named_outside(size: int, ranks: Sequence[int]) -> str:
    """Return the workers of a world of `size` that aren't among `ranks`, in words; "" where there are none."""
    inside = set(ranks)
    outside = [worker for worker in range(size) if worker not in inside] if len(ranks) < size else []
    return named(outside) if outside else ""


def first_cells(grid: Sequence[int], most: int = MOST) -> tuple[int, ...]:
    """Return how many indices are drawn along each dimension of a grid, so that there are at most `most` cells.

    >>> first_cells((2, 3)), first_cells((64, 64)), first_cells((1, 100_000))
    ((2, 3), (8, 8), (1, 64))
    """
    cells = [min(p, most) for p in grid]
    while prod(cells) > most:
        largest = max(range(len(cells)), key=cells.__getitem__)
        cells[largest] = max(cells[largest] // 2, 1)
    return tuple(cells)


def label(workers: Sequence[int]) -> str:
    """Return the workers that hold a block: of many the first ones."""
    return ", ".join(map(str, workers)) if len(workers) <= 3 else f"{workers[0]}, {workers[1]}, ..."
