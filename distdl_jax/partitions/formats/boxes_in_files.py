"""Boxes of arrays in files, read in runs, contiguous on both sides, or in slabs that are partly needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from distdl_jax.plans.decomposition import Box

ROW = 2**14
"""Up to this many bytes, contiguous rows are read whole, even if only a part is needed: reading parts takes longer."""

RUN = 2**13
"""From this many bytes on, a run, contiguous in the file and in memory, is read separately, directly into its place."""

SLAB = 4 * 2**20
"""The maximum number of bytes in one read."""


Pause = Callable[[], None]
"""Called by long work between two of its pieces; an exception from it ends the work."""


class Slab(NamedTuple):
    """Contiguous elements of a block, and the needed part of them.

    - `start`, `stop`: their numbers, row-major. `shape`: the shape of the array that they form.
    - `cut`: the needed part of that array. `into`: its place in the array of everything needed.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    cut: tuple[slice, ...]
    into: tuple[int | slice, ...]


def slabs(shape: Sequence[int], part: Box, itemsize: int, row: int, slab: int) -> Iterator[Slab]:
    """Yield slabs of at most `slab` bytes that hold `part` of a block of `shape`, in their order in the block.

    `row`: up to this many bytes, contiguous rows are read whole.

    >>> [tuple(slab) for slab in slabs((4, 6), ((1, 3), (2, 4)), itemsize=1, row=99, slab=99)]
    [(6, 18, (2, 6), (slice(None, None, None), slice(2, 4, None)), (slice(0, 2, None),))]
    >>> [(slab.start, slab.stop, slab.into) for slab in slabs((4, 6), ((1, 3), (2, 4)), itemsize=1, row=2, slab=9)]
    [(8, 10, (0, slice(0, 2, None))), (14, 16, (1, slice(0, 2, None)))]
    """
    if any(start >= stop for start, stop in part):
        return
    if not shape:
        yield Slab(0, 1, (), (), ())
        return
    # Along dimension d several rows are read at once, with a loop over the preceding indices.
    d = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) * itemsize <= row or d == len(shape) - 1)
    inner = tuple(shape[d + 1 :])
    volume = prod(inner)
    rows = max(1, slab // max(1, volume * itemsize))
    within = tuple(slice(start, stop) for start, stop in part[d + 1 :])
    for outer in product(*(range(start, stop) for start, stop in part[:d])):
        base = 0
        for place, length in zip(outer, shape, strict=False):
            base = base * length + place
        for first in range(*part[d], rows):
            last = min(first + rows, part[d][1])
            begin = base * shape[d]
            yield Slab(
                (begin + first) * volume,
                (begin + last) * volume,
                (last - first, *inner),
                (slice(None), *within),
                (
                    *(place - start for place, (start, _) in zip(outer, part[:d], strict=True)),
                    slice(first - part[d][0], last - part[d][0]),
                ),
            )


def runs(shape: Sequence[int], part: Box, first: int | None = None) -> tuple[int, Iterator[int]]:
    """Return the length of the runs of elements in `part` of a block of `shape`, and the start of each.

    `first`: the dimension along which a run lies; `part` must be whole in the following ones. Default: the first one.

    >>> length, starts = runs((4, 6), ((1, 3), (2, 4)))
    >>> length, list(starts)
    (2, [8, 14])
    >>> length, starts = runs((4, 6), ((1, 3), (0, 6)))
    >>> length, list(starts)
    (12, [6])
    >>> length, starts = runs((4, 6), ((1, 3), (0, 6)), first=1)
    >>> length, list(starts)
    (6, [6, 12])
    """
    lengths = [stop - start for start, stop in part]
    if not all(lengths):
        return 0, iter(())
    d = along(shape, part) if first is None else first
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    begin = sum(start * stride for (start, _), stride in zip(part, strides, strict=True))
    outer = product(*(range(0, length * stride, stride) for length, stride in zip(lengths[:d], strides, strict=False)))
    return prod(lengths[d:]), (begin + sum(places) for places in outer)


def along(shape: Sequence[int], part: Box) -> int:
    """Return the first dimension from which on `part` is contiguous in a block of `shape`.

    >>> along((4, 6), ((1, 3), (0, 6))), along((4, 6), ((1, 3), (0, 5))), along((4, 6), ((1, 2), (0, 5)))
    (0, 1, 1)
    """
    d = len(shape)
    while d and part[d - 1] == (0, shape[d - 1]):
        d -= 1
    return max(d - 1, 0)


def fill(
    read: Callable[[int, memoryview], None], shape: Sequence[int], part: Box, into: np.ndarray[Any, Any], place: Box
) -> None:
    """Fill `place` of `into`, a contiguous array, with `part` of a block of `shape`.

    `read(start, view)` reads bytes of the block from `start` on, at most `SLAB` of them. Long runs are read directly
    into their place, shorter ones through a buffer of a slab.
    """
    itemsize = into.dtype.itemsize
    d = max(along(shape, part), along(into.shape, place))
    length, starts = runs(shape, part, d)
    nbytes = length * itemsize
    if nbytes >= RUN or nbytes == into.nbytes:
        view = into.reshape(-1).view(np.uint8).data
        for start, to in zip(starts, runs(into.shape, place, d)[1], strict=True):
            run = view[to * itemsize :][:nbytes]
            for done in range(0, nbytes, SLAB):
                read(start * itemsize + done, run[done : done + SLAB])
        return
    buffer = np.empty(0, np.uint8)
    at: Any = (*(slice(start, stop) for start, stop in place), ...)
    dest = into[at]
    for slab in slabs(shape, part, itemsize, ROW, SLAB):
        nbytes = (slab.stop - slab.start) * itemsize
        if buffer.size < nbytes:
            buffer = np.empty(nbytes, np.uint8)
        read(slab.start * itemsize, buffer[:nbytes].data)
        dest[slab.into] = buffer[:nbytes].view(into.dtype).reshape(slab.shape)[slab.cut]


def box_of_index(index: Any, shape: Sequence[int]) -> tuple[Box, tuple[int | slice, ...]] | None:
    """Return the box of an index of integers and slices, and the index within it; None for another index.

    >>> box_of_index((1, slice(-1, 0, -2)), (3, 6))
    (((1, 2), (1, 6)), (0, slice(None, None, -2)))
    """
    keys = list(index) if isinstance(index, tuple) else [index]
    if (at := next((n for n, key in enumerate(keys) if key is Ellipsis), None)) is not None:
        keys[at : at + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
    keys += [slice(None)] * (len(shape) - len(keys))
    box: list[tuple[int, int]] = []
    within: list[int | slice] = []
    for key, n in zip(keys, shape, strict=False):
        if isinstance(key, slice):
            places = range(*key.indices(n))
            box.append((min(places[0], places[-1]), max(places[0], places[-1]) + 1) if places else (0, 0))
            within.append(slice(None, None, places.step))
        elif isinstance(key, int | np.integer) and not isinstance(key, bool) and -n <= key < n:
            box.append((int(key) % n, int(key) % n + 1))
            within.append(0)
    return (tuple(box), tuple(within)) if len(box) == len(keys) == len(shape) else None
