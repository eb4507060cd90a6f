"""Slabs: what of a block has to be read for a part of it, against numpy's own slicing."""

from math import prod
from unittest import mock

import numpy as np
import pytest
from launcher.examples import examples

from distdl_jax.partitions.formats.boxes_in_files import ROW, SLAB, fill, slabs

Box = tuple[tuple[int, int], ...]


def parts(draw: np.random.Generator) -> tuple[tuple[int, ...], Box]:
    """A shape and a part of it: all of a dimension, some of it, rarely nothing."""
    shape = tuple(int(n) for n in draw.integers(1, 7, draw.integers(0, 5)))
    part = []
    for n in shape:
        start, stop = sorted(int(end) for end in draw.choice(n + 1, 2, replace=False))
        part.append((0, n) if draw.random() < 0.4 else (start, start if draw.random() < 0.05 else stop))
    return shape, tuple(part)


@pytest.mark.parametrize("slab", [2, 6, 40])
@pytest.mark.parametrize("row", [0, 4, 16, 10**6])
@pytest.mark.parametrize("run", [2, 8, 10**6])
def test_the_part_goes_to_its_place(run: int, row: int, slab: int) -> None:
    """In an array that has room around it, or none, by long runs or by slabs; nothing else changes."""
    for number in range(examples(40)):
        draw = np.random.default_rng([run, row, slab, number])
        shape, part = parts(draw)
        block = np.arange(prod(shape), dtype=np.int16).reshape(shape)
        wanted = block[tuple(slice(start, stop) for start, stop in part)]
        room = draw.integers(1, 3, (len(shape), 2)) * (draw.random((len(shape), 2)) < 0.4)
        place = tuple((a, a + n) for (a, _), n in zip(room.tolist(), wanted.shape, strict=True))
        expected = np.full(np.add(wanted.shape, room.sum(1)), -1, np.int16)
        into = expected.copy()
        expected[tuple(slice(start, stop) for start, stop in place)] = wanted
        content = block.tobytes()

        def read(start: int, view: memoryview, content: bytes = content) -> None:
            assert 0 < len(view) <= max(slab, row, 2)
            view[:] = content[start : start + len(view)]

        with mock.patch.multiple("distdl_jax.partitions.formats.boxes_in_files", RUN=run, SLAB=slab, ROW=row):
            fill(read, shape, part, into, place)
        np.testing.assert_array_equal(into, expected, err_msg=f"{part} of {shape} to {place} of {into.shape}")


def test_rows_that_are_not_needed_are_not_read() -> None:
    """Ten columns of a matrix with rows of 4 MB: ten times eight bytes of each row, not the rows."""
    read = sum(slab.stop - slab.start for slab in slabs((100, 10**6), ((0, 100), (500, 510)), 4, ROW, SLAB))
    assert read == 1000


@pytest.mark.parametrize("slab", [1, 10**6])
def test_a_scalar_is_one_slab(slab: int) -> None:
    assert [tuple(found) for found in slabs((), (), 8, ROW, slab)] == [(0, 1, (), (), ())]
