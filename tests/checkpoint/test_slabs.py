"""Slabs: what of a block has to be read for a part of it, against numpy's own slicing."""

from __future__ import annotations

from math import prod
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher.examples import examples

from distdl_jax.checkpoint.slabs import ROW, SLAB, fill, slabs


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """A shape and a part of it, which may be empty."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    part = []
    for n in shape:
        start = draw(st.integers(0, n))
        part.append((start, draw(st.integers(start, n))))
    return shape, tuple(part)


@settings(max_examples=examples(150), deadline=None)
@given(parts(), st.sampled_from([0, 3, 16, 10**6]), st.sampled_from([1, 8, 40, 10**6]))
def test_the_slabs_bring_the_part(case: tuple, row: int, slab: int) -> None:
    """Every element once, in order; no slab larger than it may be (or than a row, where that is larger)."""
    shape, part = case
    block = np.arange(prod(shape)).reshape(shape)
    wanted = block[tuple(slice(start, stop) for start, stop in part)]
    got = np.full(wanted.shape, -1)
    end = 0
    for found in slabs(shape, part, 2, row, slab):
        assert end <= found.start < found.stop
        end = found.stop
        assert 2 * (found.stop - found.start) <= max(slab, row, 2)
        got[found.into] = block.reshape(-1)[found.start : found.stop].reshape(found.shape)[found.cut]
    np.testing.assert_array_equal(got, wanted)


@settings(max_examples=examples(150), deadline=None)
@given(parts(), st.data(), st.sampled_from([2, 8, 10**6]), st.sampled_from([2, 6, 40]))
def test_it_goes_to_its_place(case: tuple, data: st.DataObject, run: int, slab: int) -> None:
    """In an array that has room around it, by long runs or by slabs; nothing else changes."""
    shape, part = case
    block = np.arange(prod(shape), dtype=np.int16).reshape(shape)
    wanted = block[tuple(slice(start, stop) for start, stop in part)]
    left, right = (data.draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape))) for _ in range(2))
    place = tuple((a, a + n) for a, n in zip(left, wanted.shape, strict=True))
    expected = np.full([n + a + b for n, a, b in zip(wanted.shape, left, right, strict=True)], -1, np.int16)
    into = expected.copy()
    expected[tuple(slice(start, stop) for start, stop in place)] = wanted
    content = block.tobytes()

    def read(start: int, view: memoryview) -> None:
        assert 0 < len(view) <= max(slab, 4)
        view[:] = content[start : start + len(view)]

    with mock.patch.multiple("distdl_jax.checkpoint.slabs", RUN=run, SLAB=slab, ROW=4):
        fill(read, shape, part, into, place)
    np.testing.assert_array_equal(into, expected)


def test_rows_that_are_not_needed_are_not_read() -> None:
    """Ten columns of a matrix with rows of 4 MB: ten times eight bytes of each row, not the rows."""
    read = sum(slab.stop - slab.start for slab in slabs((100, 10**6), ((0, 100), (500, 510)), 4, ROW, SLAB))
    assert read == 1000


@pytest.mark.parametrize("slab", [1, 10**6])
def test_a_scalar_is_one_slab(slab: int) -> None:
    assert [tuple(found) for found in slabs((), (), 8, ROW, slab)] == [(0, 1, (), (), ())]
