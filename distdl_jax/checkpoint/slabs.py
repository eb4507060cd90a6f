"""Parts of blocks in files: a part is cut into slabs, which are read in one go, and runs, which are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from distdl_jax.plans.decomposition import Box, Range

ROW = 2**20
"""Bytes up to which what lies together is read whole, though only a part of it be needed."""

SLAB = 4 * 2**20
"""Bytes that are read in one go at most."""


class Slab(NamedTuple):
    """Some of the elements of a block that lie together, and what of them is needed.

    - `start`, `stop`: which ones, counted row-major. `shape`: what array they are.
    - `cut`: the part of that array that is needed. `into`: where that goes in the array of all that is needed.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    cut: tuple[slice, ...]
    into: tuple[int | slice, ...]


def slabs(shape: Sequence[int], part: Box, itemsize: int, row: int = ROW, slab: int = SLAB) -> Iterator[Slab]:
    """The slabs that hold `part` of a block of `shape`, in the order in which they lie in it.

    >>> [tuple(slab) for slab in slabs((4, 6), ((1, 3), (2, 4)), itemsize=1)]
    [(6, 18, (2, 6), (slice(None, None, None), slice(2, 4, None)), (slice(0, 2, None),))]
    >>> [(slab.start, slab.stop, slab.into) for slab in slabs((4, 6), ((1, 3), (2, 4)), itemsize=1, row=2)]
    [(8, 10, (0, slice(0, 2, None))), (14, 16, (1, slice(0, 2, None)))]
    """
    if any(start >= stop for start, stop in part):
        return
    if not shape:
        yield Slab(0, 1, (), (), ())
        return
    # Along dimension d several rows are read at once; those before it are gone through one by one.
    d = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) * itemsize <= row or d == len(shape) - 1)
    inner = tuple(shape[d + 1 :])
    volume = prod(inner)
    rows = max(1, slab // max(1, volume * itemsize))
    within = tuple(slice(start, stop) for start, stop in part[d + 1 :])
    for outer in product(*(range(start, stop) for start, stop in part[:d])):
        base = 0
        for place, length in zip(outer, shape, strict=False):
            base = base * length + place
        for first, last in _pieces(part[d], rows):
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


def _pieces(whole: Range, length: int) -> Iterator[Range]:
    for start in range(whole[0], whole[1], length):
        yield start, min(start + length, whole[1])


def is_contiguous(shape: Sequence[int], part: Box) -> bool:
    """Whether the elements of `part` lie together in a block of `shape`.

    >>> is_contiguous((4, 6), ((1, 3), (0, 6))), is_contiguous((4, 6), ((1, 3), (0, 5)))
    (True, False)
    >>> is_contiguous((4, 6), ((2, 3), (1, 5)))
    True
    """
    lengths = [stop - start for start, stop in part]
    first = next((d for d, length in enumerate(lengths) if length != 1), len(lengths))
    return all(length == n for length, n in zip(lengths[first + 1 :], shape[first + 1 :], strict=True))


def runs(shape: Sequence[int], part: Box) -> tuple[int, Iterator[int]]:
    """The runs of elements of a block of `shape` that make up `part`: their length, and where each begins.

    >>> length, starts = runs((4, 6), ((1, 3), (2, 4)))
    >>> length, list(starts)
    (2, [8, 14])
    >>> length, starts = runs((4, 6), ((1, 3), (0, 6)))
    >>> length, list(starts)
    (12, [6])
    """
    lengths = [stop - start for start, stop in part]
    if not all(lengths):
        return 0, iter(())
    d = len(shape)
    while d and lengths[d - 1] == shape[d - 1]:
        d -= 1
    d = max(d - 1, 0)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(start * stride for (start, _), stride in zip(part[d:], strides[d:], strict=True))
    outer = product(*(range(start, stop) for start, stop in part[:d]))
    return prod(lengths[d:]), (first + sum(i * n for i, n in zip(index, strides, strict=False)) for index in outer)


def fill(read: Callable[[int, memoryview], None], shape: Sequence[int], part: Box, into: np.ndarray[Any, Any]) -> None:
    """Fill `into` with `part` of a block of `shape`, of which `read(start, into)` reads bytes from `start` on.

    Where the part lies together, and in `into` too, it goes there at once; else through a buffer of a slab.
    """
    itemsize = into.dtype.itemsize
    if is_contiguous(shape, part) and into.flags.c_contiguous:
        _, starts = runs(shape, part)
        for start in starts:
            read(start * itemsize, into.reshape(-1).view(np.uint8).data)
        return
    buffer = np.empty(0, np.uint8)
    for slab in slabs(shape, part, itemsize):
        nbytes = (slab.stop - slab.start) * itemsize
        if buffer.size < nbytes:
            buffer = np.empty(nbytes, np.uint8)
        read(slab.start * itemsize, buffer[:nbytes].data)
        into[slab.into] = buffer[:nbytes].view(into.dtype).reshape(slab.shape)[slab.cut]
