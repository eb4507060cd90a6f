"""Slabs: what of a block has to be read for a part of it, against numpy's own slicing."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher.examples import examples

from distdl_jax.checkpoint.slabs import is_contiguous, slabs


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
    if wanted.size:
        flat = wanted.reshape(-1)
        assert is_contiguous(shape, part) == bool((np.diff(flat) == 1).all())


def test_rows_that_are_not_needed_are_not_read() -> None:
    """Ten columns of a matrix with rows of 4 MB: ten times eight bytes of each row, not the rows."""
    read = sum(slab.stop - slab.start for slab in slabs((100, 10**6), ((0, 100), (500, 510)), 4))
    assert read == 1000


@pytest.mark.parametrize("slab", [1, 10**6])
def test_a_scalar_is_one_slab(slab: int) -> None:
    assert [tuple(found) for found in slabs((), (), 8, slab=slab)] == [(0, 1, (), (), ())]
