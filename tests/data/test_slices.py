"""The dtype and the mask of slices count, whatever the source declares; by classes of our own, numpy and JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import TensorSpec
from distdl_jax.data import batches, read

HALVES = np.arange(24).reshape(4, 6) / 2
MASKED = np.ma.array(HALVES, mask=HALVES % 3 == 1)
FILLED = np.where(HALVES % 3 == 1, np.nan, HALVES)


class Declared:
    """An array whose slices may have another dtype than it declares, as packed variables do."""

    def __init__(self, array: Any, dtype: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, dtype

    def __getitem__(self, at: Any) -> Any:
        return self.array[at]


class Foreign:
    """A slice of another library, torch's for instance, that numpy converts."""

    def __init__(self, array: np.ndarray, is_here: bool = True) -> None:
        self.array, self.shape, self.dtype, self.is_here = array, array.shape, "torch.float32", is_here

    def __getitem__(self, at: Any) -> Foreign:
        return Foreign(self.array[at], self.is_here)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.is_here:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        return self.array


@pytest.mark.parametrize("dtype", [np.int16, "i4", np.float32, ">f8", str, "torch.float32"])
def test_any_declared_dtype(dtype: Any) -> None:
    source = Declared(HALVES, dtype)
    for box in (((1, 3), (0, 6)), ((2, 2), (0, 6)), None):
        assert read(source, box).dtype == np.float64
    np.testing.assert_array_equal(read(source, ((1, 3), (0, 6))), HALVES[1:3])

    def program() -> None:
        P = dj.Partition()
        block = TensorSpec((4, 6), P.grid([1, 8])).block(source)  # two of the blocks are empty, one worker has none
        (batch,) = batches(source, TensorSpec((6,), P.grid([8])), 4)
        assert block.dtype == batch.dtype == np.float64
        np.testing.assert_array_equal(block, HALVES[:, P.rank : P.rank + 1] if P.rank < 6 else np.zeros((4, 0)))
        np.testing.assert_array_equal(batch, block)

    dj.simulate(9, program)


def test_a_source_that_can_not_slice_nothing() -> None:
    class Stacked(Declared):
        def __getitem__(self, at: Any) -> Any:
            return np.stack([*self.array[at]])

    assert read(Stacked(HALVES[:0], np.int16), ((0, 0), (0, 6))).dtype == np.int16
    assert read(Stacked(HALVES, np.int16), None).dtype == np.float64


def test_slices_of_several_dtypes() -> None:
    """Where the first element's holds them they fit; otherwise numbers would change, and they are refused."""

    class Mixed(Declared):
        def __getitem__(self, at: Any) -> Any:
            return self.array[at].astype(self.dtype if at[0].stop < 3 else np.float32)

    spec = TensorSpec((6,), dj.planning_world(1).grid([1]))
    (batch,) = batches(Mixed(HALVES, np.float64), spec, 4)
    np.testing.assert_array_equal(batch, HALVES)
    with pytest.raises(dj.InvalidTypeError, match="first element is of int16, its samples 2 to 3 are of float32"):
        list(batches(Mixed(HALVES, np.int16), spec, 2))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.complex64, ">f4"])
def test_masked_entries_are_nan(dtype: Any) -> None:
    masked = MASKED.astype(dtype)
    native = np.dtype(dtype).newbyteorder("=")
    spec, rows = TensorSpec((4, 6), dj.planning_world(1).grid([1, 1])), TensorSpec((6,), dj.planning_world(1).grid([1]))
    loaded = [
        next(batches(source, rows, size)) for source, size in ((masked, 4), ([*masked], 4), (iter([masked]), None))
    ]
    for found in (read(masked, spec.box), spec.block(masked), *loaded):
        assert found.dtype == native
        np.testing.assert_array_equal(found, FILLED.astype(native))
    assert MASKED.mask.any() and not np.isnan(MASKED.data).any()


def test_masked_whole_numbers_are_refused_and_unmasked_ones_pass() -> None:
    spec, rows = TensorSpec((4, 6), dj.planning_world(1).grid([1, 1])), TensorSpec((6,), dj.planning_world(1).grid([1]))
    whole, wrong = np.ma.array(np.arange(24).reshape(4, 6)), MASKED.astype(int)
    for mask in (np.ma.nomask, False):
        source = np.ma.array(whole, mask=mask)
        np.testing.assert_array_equal(read(source, spec.box), whole.data)
        np.testing.assert_array_equal(spec.block(source), whole.data)
        np.testing.assert_array_equal(next(batches([*source], rows, 4)), whole.data)
    sentence = r"`{}` \(of dtype int64\) has masked entries, for which only floating dtypes have NaN"
    with pytest.raises(dj.InvalidArgumentError, match=sentence.format("array")):
        spec.block(wrong)
    for source, size in ((wrong, 4), ([*wrong], 4), (iter([wrong]), None)):
        with pytest.raises(dj.InvalidArgumentError, match=sentence.format("source")):
            next(batches(source, rows, size))


def test_tensors_of_another_library() -> None:
    spec = TensorSpec((4, 6), dj.planning_world(1).grid([1, 1]))
    for found in (read(Foreign(HALVES), spec.box), spec.block(Foreign(HALVES))):
        np.testing.assert_array_equal(found, HALVES)
    (batch,) = batches(Foreign(HALVES), TensorSpec((6,), dj.planning_world(1).grid([1])), 4)
    np.testing.assert_array_equal(batch, HALVES)
    for box in (spec.box, None):
        with pytest.raises(
            dj.InvalidTypeError, match=r"`source` \(of type Foreign\) can't be converted to an array of"
        ):
            read(Foreign(HALVES, is_here=False), box)
    keys = jax.random.split(jax.random.key(0), 4)
    with pytest.raises(dj.InvalidTypeError, match=r"`source` \(of type .*\) can't be converted to an array of numpy: "):
        read(keys, ((0, 2),))
    with pytest.raises(dj.InvalidTypeError, match=r"`source` must have a dtype of numpy, not key<fry>\."):
        read(keys, None)


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">c16", ">u4"])
def test_arrays_of_the_other_byte_order(dtype: str) -> None:
    array = (np.arange(24).reshape(4, 6) * 3).astype(dtype)
    native = array.astype(np.dtype(dtype).newbyteorder("="))

    def program() -> None:
        P = dj.Partition()
        spec = TensorSpec((4, 6), P.grid([1, 2]))
        columns = slice(*spec.box[1]) if spec.box else slice(0)
        for block in (spec.block(array), dj.scatter(array if P.rank == 0 else array[:0], spec)):
            assert block.dtype == native.dtype
            np.testing.assert_array_equal(np.ravel(block), np.ravel(native[:, columns]))
        whole = dj.gather(array[:, columns], spec)
        assert whole.dtype == native.dtype and (P.rank == 0 or not whole.size)
        np.testing.assert_array_equal(whole, native if P.rank == 0 else whole)
        rows = TensorSpec((6,), P.grid([2]))
        for batch in (next(batches([*array], rows, 4)), next(batches(iter([array]), rows))):
            assert batch.dtype == native.dtype
            np.testing.assert_array_equal(batch, native[:, columns])

    dj.simulate(3, program)


def test_scatter_of_masked_arrays() -> None:
    """NaN where floating; refused on all workers where not, as their root knows."""

    def program() -> None:
        P = dj.Partition()
        spec = TensorSpec((4, 6), P.grid([1, 2]))
        columns = slice(*spec.box[1]) if spec.box else slice(0)
        tree = {"x": MASKED, "n": np.ma.array(np.arange(4))}
        found = dj.scatter(tree, {"x": spec, "n": TensorSpec((4,), P.create_partition_inclusive([0]).grid([1]))})
        np.testing.assert_array_equal(np.ravel(found["x"]), np.ravel(FILLED[:, columns]))
        gathered = dj.gather(MASKED[:, columns], spec)
        np.testing.assert_array_equal(gathered, FILLED if P.rank == 0 else np.zeros(gathered.shape))
        holes = MASKED.astype(int) if P.rank == 1 else jnp.zeros((0,), int)
        with pytest.raises(dj.InvalidArgumentError, match=r"`tree\['x'\]` \(of dtype int64\) has masked entries"):
            dj.scatter({"x": holes}, {"x": TensorSpec((4, 6), P.grid([1, 3]))}, root=1)

    dj.simulate(3, program)
