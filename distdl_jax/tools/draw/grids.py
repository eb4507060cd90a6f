"""Drawings of the owners of a tensor's blocks, or of the workers on a grid.

One dimension is a strip, two are a rectangle; with three the last two are a slab, and slabs are drawn side by side.
Further split dimensions have a row of slabs for each range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise, product
from math import prod
from typing import NamedTuple

from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import Box, Range, rank_of
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.text import Drawing, tint
from distdl_jax.tools.draw import svg
from distdl_jax.tools.draw.svg import Area, Part

MOST = 64
"""The number of workers that are drawn: if there are more, those with the first indices along each dimension."""

MOST_COPIES = 4
"""The number of copies of a tensor drawn separately; if there are more, a block names its workers."""

A_ROW = 16
"""The number of blocks in a row."""

FACE, STRIP, WIDEST = 230, 40, 1240
"""Pixels of the longer side of a slab, of a strip's height, and in total."""


class DrawnBlock(NamedTuple):
    """A block, the workers that hold it, and the number of the copy in which it is drawn."""

    workers: tuple[int, ...]
    box: Box
    copy: int = 0

    @property
    def is_empty(self) -> bool:
        return any(start >= stop for start, stop in self.box)


class Panel(NamedTuple):
    """Blocks that are drawn in one plane: of a copy, with ranges along the other dimensions."""

    copy: int
    ranges: tuple[Range, ...]
    row: int
    blocks: tuple[DrawnBlock, ...]


@dataclass(frozen=True)
class Blocks:
    """A tensor to draw.

    - `name`: "x"; "" if there is only one tensor.
    - `shape`: of the whole tensor; for a grid of workers, the grid's.
    - `grid`: the number of blocks along each dimension.
    - `blocks`: the blocks to draw.
    - `copies`: of the tensor.
    - `workers`: the number of workers that hold a block, drawn or not.
    - `outside`: workers without a block, as text.
    - `are_cells`: whether it is a grid of workers, with indices instead of ranges.
    """

    name: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    blocks: tuple[DrawnBlock, ...]
    copies: int = 1
    workers: int = 0
    outside: str = ""
    are_cells: bool = False

    @cached_property
    def drawn(self) -> tuple[int, ...]:
        """The drawn dimensions: the split ones, and features up to a total of three."""
        split = [d for d, p in enumerate(self.grid) if p > 1]
        features = range(2, len(self.shape)) if len(self.shape) > 2 else range(len(self.shape))
        whole = [d for d in reversed(features) if d not in split]
        return tuple(sorted((*split, *whole[: max(0, min(3, len(features)) - len(split))])))

    @property
    def title(self) -> str:
        """The tensor as a sentence."""
        workers = f"{self.workers:,} worker{'s' * (self.workers != 1)}"
        if self.are_cells:
            return f"{shape_text(self.grid)} grid of {workers}" if len(self.grid) > 1 else f"{workers} in a row"
        split = [d for d, p in enumerate(self.grid) if p > 1]
        how = f"dimension{'s' * (len(split) > 1)} {listing(split)} split" if split else "not split"
        return f"{self.name}{': ' * bool(self.name)}{shape_text(self.shape)} on {workers}, {how}"

    @property
    def notes(self) -> list[str]:
        """What the picture omits, as sentences."""
        notes = []
        hidden = [d for d in range(len(self.shape)) if d not in self.drawn]
        if hidden and not self.are_cells:
            lengths = listing([f"{d} (length {self.shape[d]})" for d in hidden])
            notes.append(f"Not drawn: dimension{'s' * (len(hidden) > 1)} {lengths}, whole on every worker.")
        if self.copies > 1:
            notes.append(f"There are {self.copies:,} copies of the tensor.")
        left_out = self.workers - len({worker for block in self.blocks for worker in block.workers})
        if left_out > 0:
            notes.append(
                f"Drawn are workers with the first indices along each dimension; {left_out:,} more of the "
                f"{shape_text(self.grid)} grid are omitted."
            )
        if empty := sorted({worker for block in self.blocks if block.is_empty for worker in block.workers}):
            notes.append(f"Empty blocks: {named(empty)}.")
        if self.outside:
            notes.append(f"{'Outside' if self.are_cells else 'Without a block'}: {self.outside}.")
        return notes

    @cached_property
    def panels(self) -> list[Panel]:
        """The nonempty blocks, by plane, in rows of limited length."""

        def plane(block: DrawnBlock) -> tuple[int, tuple[Range, ...]]:
            return block.copy, tuple(block.box[d] for d in self.drawn[:-2])

        filled = sorted((b for b in self.blocks if not b.is_empty), key=lambda block: (plane(block), block.box))
        panels = []
        for (copy, ranges), group in groupby(filled, key=plane):
            blocks = list(group)
            columns = sorted({self.column(block) for block in blocks})
            for row in range(0, len(columns), A_ROW):
                some = {*columns[row : row + A_ROW]}
                panels.append(Panel(copy, ranges, row, tuple(b for b in blocks if self.column(b) in some)))
        return panels

    def column(self, block: DrawnBlock) -> Range:
        """Return the range of a block along the last drawn dimension."""
        return block.box[self.drawn[-1]] if self.drawn else (0, 1)

    def line(self, block: DrawnBlock) -> Range:
        """Return the range of a block along the second to last drawn dimension."""
        return block.box[self.drawn[-2]] if len(self.drawn) > 1 else (0, 1)

    def caption(self, panel: Panel) -> str:
        """Return the caption of a panel."""
        shown = [f"copy {panel.copy}"] if self.copies > 1 and len({p.copy for p in self.panels}) > 1 else []
        for d, bounds in zip(self.drawn, panel.ranges, strict=False):
            if self.grid[d] > 1:
                shown.append(f"dim {d}: {self.range_text(bounds)}")
        return ", ".join(shown)

    def box_text(self, block: DrawnBlock) -> str:
        """Return the box of a block as an index; for a grid of workers, the worker's index."""
        return f"{named(block.workers)}: [{', '.join(map(self.range_text, block.box))}]"

    def range_text(self, bounds: Range) -> str:
        """Return a range in the notation of Python's slices; for a grid of workers, the index."""
        return f"{bounds[0]}" if self.are_cells else f"{bounds[0]}:{bounds[1]}"

    @property
    def text(self) -> str:
        """The tensor in characters: a table of workers for each panel, and what it omits."""
        lines = [self.title]
        for panel in self.panels:
            if caption := self.caption(panel) * (panel.row == 0):
                lines.append(f" {caption}")
            lines += self._table(panel.blocks)
        return "\n".join([*lines, *self.notes])

    def _table(self, blocks: Sequence[DrawnBlock]) -> list[str]:
        names = {(self.line(block), self.column(block)): label(block.workers) for block in blocks}
        rows, columns = (sorted({pair[side] for pair in names}) for side in (0, 1))
        heads = [self.range_text(bounds) if self.drawn else "" for bounds in columns]
        sides = [self.range_text(bounds) if len(self.drawn) > 1 else "" for bounds in rows]
        width, left = max(5, *(len(each) + 2 for each in (*heads, *names.values()))), max(map(len, sides))
        left += len(self.drawn) > 1
        rule = f"{' ' * left} +{'+'.join(['-' * width] * len(columns))}+"
        lines = [f"{' ' * left}  {' '.join(head.center(width) for head in heads)}".rstrip(), rule]
        for side, row in zip(sides, rows, strict=True):
            cells = "|".join(names.get((row, column), "").center(width) for column in columns)
            lines += [f"{side.rjust(left)} |{cells}|", rule]
        return lines


def listing(items: Iterable[object]) -> str:
    """Return items as part of a sentence: "1, 2 and 3"."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def named(workers: Sequence[int]) -> str:
    """Return workers as text, with runs as ranges; if there are many runs, the first ones.

    >>> named([0, 1, 2, 5]), named([3])
    ('workers 0-2, 5', 'worker 3')
    """
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(workers), lambda pair: pair[1] - pair[0])]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    more = ", ..." if len(shown) > 12 else ""
    return f"worker{'s' * (len(workers) > 1)} {', '.join(shown[:12])}{more}"


def label(workers: Sequence[int]) -> str:
    """Return the workers that hold a block: if there are many, the first ones."""
    return ", ".join(map(str, workers)) if len(workers) <= 3 else f"{workers[0]}, {workers[1]}, ..."


def first_cells(grid: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Return the drawn cells of a grid: the first indices along each dimension.

    >>> len([*first_cells((2, 3))]), [*first_cells((64, 64))][-1], [*first_cells((1, 100_000))][-1]
    (6, (7, 7), (0, 63))
    """
    counts = [min(p, MOST) for p in grid]
    while prod(counts) > MOST:
        largest = max(range(len(counts)), key=counts.__getitem__)
        counts[largest] = max(counts[largest] // 2, 1)
    return product(*map(range, counts))


def outside(P: Partition) -> str:
    """Return the workers of the world that aren't in a partition, as text; "" if there are none."""
    others = sorted({*range(P.world.size)} - {*P.ranks}) if P.size < P.world.size else []
    return named(others) if others else ""


def workers_as_blocks(P: Partition) -> Blocks:
    """Return the workers of a partition for drawing: on the grid, if there is one."""
    cells = first_cells(P.shape)
    blocks = tuple(DrawnBlock((P.ranks[rank_of(cell, P.shape)],), tuple((i, i + 1) for i in cell)) for cell in cells)
    return Blocks("", P.shape, P.shape, blocks, 1, P.size, outside(P), are_cells=True)


def spec_as_blocks(spec: TensorSpec, name: str = "") -> Blocks:
    """Return a tensor for drawing: the owner of each block, and the workers without one."""
    P, along = spec.partition, {d: spec.partition.shape[d] for d in spec.replicated}
    copies, owners = prod(along.values()), dict[tuple[Box, int], list[int]]()
    for cell in first_cells(P.shape):
        rank = rank_of(cell, P.shape)
        copy = rank_of([cell[d] for d in along], [*along.values()]) if copies <= MOST_COPIES else 0
        owners.setdefault((spec._box(rank), copy), []).append(P.ranks[rank])
    blocks = tuple(DrawnBlock(tuple(workers), *box_and_copy) for box_and_copy, workers in owners.items())
    grid = tuple(p for d, p in enumerate(P.shape) if d not in along) or (1,) * len(spec.global_shape)
    return Blocks(name, spec.global_shape, grid, blocks, copies, P.size, outside(P))


class Grid(NamedTuple):
    """A laid-out tensor: the picture of its blocks, and the area and panel of each worker's block.

    For a worker with several copies, it is the first.
    """

    blocks: Blocks
    part: Part
    areas: Mapping[int, Area]
    panels: Mapping[int, int]

    def with_marks(self, marks: Iterable[str]) -> Part:
        """Return the picture with marks on top of the blocks."""
        return self.part._replace(body=(*self.part.body, *marks))


def lay_out(blocks: Blocks, gap: float = 3, around: float = 0, size: float = 0) -> Grid:
    """Lay out the blocks of a tensor, `gap` pixels between them and `around` each panel; `size`: of the longer side."""
    filled = [block for panel in blocks.panels for block in panel.blocks]
    lines, columns = [[along(block) for block in filled] for along in (blocks.line, blocks.column)]
    longest, highest = (max((stop for _, stop in ranges), default=1) for ranges in (columns, lines))
    count, dim = len(blocks.panels), len(blocks.drawn)
    part = 0.3 if count > 16 else 0.5 if count > 4 or len(lines) == 1 else 0.6 if blocks.copies > 1 else 1
    scale = (size or part * FACE) / max(longest if dim else 1, highest if dim > 1 else 1)
    narrow, low = (24, 24) if size else (60, 48)
    letters = max((len(label(block.workers)) for block in filled), default=1)
    across = _pixels(columns, max(narrow, scale * longest), max(22, 8 + 6.4 * letters), gap)
    down = _pixels(lines, max(low, scale * highest) if dim > 1 else STRIP, 20, gap)
    left = 8 + 6.2 * max(len(str(cut)) for cut in down) if dim > 1 else 0.0
    captioned = 18 * any(map(blocks.caption, blocks.panels))
    pitch = captioned + max(down.values()) - gap + 2 * around + 40
    areas, panels = dict[int, Area](), dict[int, int]()
    faces, texts = list[str](), list[str]()
    x, y, width, row = left, 0.0, 0.0, None
    for i, panel in enumerate(blocks.panels):
        first = min(blocks.column(block)[0] for block in panel.blocks)
        stop = max(blocks.column(block)[1] for block in panel.blocks)
        length = across[stop] - across[first] - gap + 2 * around
        if i and ((panel.copy, panel.ranges[:-1], panel.row) != row or x + length > WIDEST):
            x, y = left, y + pitch
        row = panel.copy, panel.ranges[:-1], panel.row
        caption = blocks.caption(panel)
        texts.append(svg.text(x + around, y + 11, caption, 11, "start", svg.GREY))
        at_x, at_y = x + around - across[first], y + captioned + around
        for block in panel.blocks:
            (a, b), (c, d) = blocks.column(block), blocks.line(block)
            area = at_x + across[a], at_y + down[c], across[b] - across[a] - gap, down[d] - down[c] - gap
            faces.append(_face(area, label(block.workers), block.workers[0], blocks.box_text(block)))
            for worker in block.workers:
                areas.setdefault(worker, area)
                panels.setdefault(worker, i)
        if dim:
            here = {cut: at_x + at for cut, at in across.items() if first <= cut <= stop}
            texts += _ticks(here, gap, blocks.are_cells, y + pitch - 27, is_across=True)
        if dim > 1 and x == left:
            here = {cut: at_y + at for cut, at in down.items()}
            texts += _ticks(here, gap, blocks.are_cells, x + max(around - 26, 0) - 5, is_across=False)
        length = max(length, svg.width_of(caption, 11))
        width = max(width, x + length)
        x += length + 26
    return Grid(blocks, Part(width, y + pitch - 20, (*faces, *texts)), areas, panels)


def _pixels(ranges: Iterable[Range], length: float, least: float, gap: float) -> dict[int, float]:
    """Return the position of each start and stop of ranges, proportional to lengths of at least `least`."""
    cuts = sorted({cut for bounds in ranges for cut in bounds}) or [0, 1]
    scale = length / max(cuts[-1] - cuts[0], 1)
    steps = (max(least, scale * (stop - start)) + gap for start, stop in pairwise(cuts))
    return dict(zip(cuts, accumulate(steps, initial=0.0), strict=True))


def _face(area: Area, shown: str, worker: int, about: str) -> str:
    x, y, w, h = area
    size = min(13.0, max(8.0, (w - 4) / (0.58 * len(shown))))
    middle = svg.text(x + w / 2, y + h / 2 + size * 0.36, shown, size)
    return svg.element("g", "", svg.rect(area, tint(worker), about=about) + middle, class_="block")


def _ticks(places: dict[int, float], gap: float, are_cells: bool, at: float, *, is_across: bool) -> list[str]:
    """Return the ends of ranges at one side of a panel, as far as they fit; for a grid, the indices."""
    starts = [*places.values()]
    ticks, free = [], -1e9
    for i, cut in enumerate(list(places)[: -1 if are_cells else None]):
        # For a range between two blocks, a position in the gap.
        pixel = (starts[i] + starts[i + 1] - gap) / 2 if are_cells else starts[i] - gap * i / (len(starts) - 1)
        if pixel - free >= (svg.width_of(str(cut), 10) + 6 if is_across else 11):
            x, y, anchor = (pixel, at, "middle") if is_across else (at, pixel + 3.5, "end")
            ticks.append(svg.text(x, y, cut, 10, anchor, svg.GREY))
            free = pixel
    return ticks


def titled(blocks: Blocks, part: Part | None = None) -> Part:
    """Return the picture of a tensor under its title, followed by what it omits."""
    return svg.below([svg.heading(blocks.title), part or lay_out(blocks).part, svg.words(blocks.notes)], 8)


def draw_blocks(blocks: Blocks) -> Drawing:
    """Draw one tensor, or a grid of workers."""
    about = ". ".join([*map(blocks.box_text, blocks.blocks[:MOST]), *blocks.notes])
    return Drawing(svg.document(blocks.title, about, titled(blocks)), blocks.text)
