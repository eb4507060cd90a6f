"""Real files of netCDF4 and xarray, packed and with missing values, against what these packages give in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import run_alone

import distdl_jax as dj
from distdl_jax import TensorSpec
from distdl_jax.data import batches, one_reader, read

netCDF4 = pytest.importorskip("netCDF4")

KEY = np.array([0, 42], np.uint32)
DEGREES = 273.15 + np.random.default_rng(0).normal(size=(7, 5, 6))
COUNTS = np.arange(7 * 5 * 6).reshape(7, 5, 6) % 120
MISSING = np.zeros((7, 5, 6), bool)
MISSING[0, 0, 0] = MISSING[3, 4, 5] = MISSING[6, 2, 0] = True
PACKED = {"scale_factor": 0.01, "add_offset": 273.0}

FLOATING: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": ("f4", {}, False),
    "double": ("f8", {}, False),
    "big_endian": (">f4", {}, False),
    "packed": ("i2", PACKED, False),
    "packed_to_float32": ("i2", {name: np.float32(value) for name, value in PACKED.items()}, False),
    "packed_and_missing": ("i2", {**PACKED, "_FillValue": np.int16(-999)}, True),
    "packed_unsigned": ("i1", {"scale_factor": 0.05, "add_offset": 270.0, "_Unsigned": "true"}, False),
    "missing": ("f4", {"_FillValue": np.float32(-1e30)}, True),
    "missing_by_default": ("f4", {}, True),
    "missing_is_nan": ("f4", {"_FillValue": np.float32(np.nan)}, True),
    "fill_without_missing": ("i2", {**PACKED, "_FillValue": np.int16(-999)}, False),
    "out_of_range": ("f4", {"valid_min": np.float32(273), "valid_max": np.float32(274)}, False),
}
WHOLE_NUMBERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "counts": ("i4", {}, False),
    "doubled": ("i2", {"scale_factor": np.int16(2)}, False),
    "moved": ("i2", {"add_offset": np.int32(5)}, False),
    "unsigned": ("i1", {"_Unsigned": "true"}, False),
    "missing_counts": ("i4", {"_FillValue": np.int32(-9)}, True),
}
VARIABLES = FLOATING | WHOLE_NUMBERS
BOXES = [((0, 3), (1, 5), (0, 6)), ((3, 7), (0, 5), (2, 3)), ((2, 2), (0, 5), (0, 6)), ((0, 7), (0, 5), (0, 6))]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all of the variables, some without samples, and a scalar."""
    path = tmp_path_factory.mktemp("netcdf") / "all.nc"
    with netCDF4.Dataset(path, "w") as dataset:
        for name, length in (("time", None), ("row", 5), ("column", 6), ("none", None)):
            dataset.createDimension(name, length)
        for name, (dtype, attributes, is_missing) in VARIABLES.items():
            fill, endian = attributes.get("_FillValue"), "big" if dtype[0] == ">" else "native"
            dimensions = ("time", "row", "column")
            variable = dataset.createVariable(name, dtype, dimensions, fill_value=fill, endian=endian)
            variable.setncatts({key: value for key, value in attributes.items() if key != "_FillValue"})
            variable[:] = np.ma.array(DEGREES if name in FLOATING else COUNTS, mask=MISSING & is_missing)
        empty = dataset.createVariable("empty", "i2", ("none", "row", "column"))
        scalar = dataset.createVariable("scalar", "i2", ())
        words = dataset.createVariable("words", str, ("row",))
        empty.scale_factor = scalar.scale_factor = 0.5
        scalar[...] = 3.5
        words[:] = np.array([*"abcde"], object)
    return path


def by_netcdf4(path: Path, name: str) -> tuple[Any, np.ndarray]:
    """Return a variable, and what it is as a whole."""
    variable = netCDF4.Dataset(path)[name]
    whole = variable[...]
    expected = np.array(np.ma.getdata(whole), whole.dtype.newbyteorder("="))
    if np.ma.getmaskarray(whole).any():
        expected[np.ma.getmaskarray(whole)] = np.nan
    return variable, expected


def by_xarray(path: Path, name: str) -> tuple[Any, np.ndarray]:
    xarray = pytest.importorskip("xarray")
    variable = xarray.open_dataset(path, engine="netcdf4")[name]
    return variable, variable.values


SOURCES = [by_netcdf4, by_xarray]
Opened = Callable[[Path, str], tuple[Any, np.ndarray]]


@pytest.mark.parametrize("opened", SOURCES)
@pytest.mark.parametrize("name", [name for name in VARIABLES if name != "missing_counts"])
def test_boxes_are_those_of_one_process(file: Path, name: str, opened: Opened) -> None:
    """Their dtype, too, which is seldom the declared one; NaN for what is missing, wherever the probe is."""
    variable, expected = opened(file, name)
    assert np.isnan(expected).any() == (VARIABLES[name][2] or name == "out_of_range") or opened is by_xarray
    for box in BOXES:
        found = read(variable, box)
        assert type(found) is np.ndarray and found.dtype == expected.dtype and found.dtype.isnative
        np.testing.assert_array_equal(found, expected[tuple(slice(*ends) for ends in box)])
    wide = read(variable, BOXES[1], [(1, 1)] * 3)
    np.testing.assert_array_equal(wide, expected[2:7, 0:5, 1:4])
    assert read(variable, None).dtype == expected.dtype


@pytest.mark.parametrize("opened", SOURCES)
@pytest.mark.parametrize("name", ["plain", "packed", "packed_to_float32", "packed_and_missing", "missing", "unsigned"])
def test_all_workers_have_the_same_dtype(file: Path, name: str, opened: Opened) -> None:
    """With a block, with an empty one, and outside of the partition: by `block`, and by `batches`."""
    with one_reader():
        expected = opened(file, name)[1]

    def program() -> None:
        P = dj.Partition()
        with one_reader():
            variable = opened(file, name)[0]
        spec = TensorSpec((7, 5, 6), P.grid([1, 6, 1]))  # five rows: worker 5 has none of them, worker 6 no block
        block = spec.block(variable)
        assert block.dtype == expected.dtype
        np.testing.assert_array_equal(block, expected[:, P.rank : P.rank + 1] if P.rank < 6 else np.zeros((7, 0)))
        (batch,) = batches(variable, TensorSpec((5, 6), P.grid([6, 1])), 7)
        assert batch.dtype == expected.dtype and len(batch) == 7
        np.testing.assert_array_equal(batch, block)
        shuffled = [*batches(variable, TensorSpec((5, 6), P.grid([6, 1])), 3, KEY)]
        assert P.rank > 5 or sorted(np.nansum(np.concatenate(shuffled), (1, 2)).tolist()) == sorted(
            np.nansum(expected[:, P.rank : P.rank + 1], (1, 2)).tolist()
        )
        with one_reader():
            del variable

    dj.simulate(7, program)


def test_without_x64_blocks_are_float32_as_those_of_plain_float64(file: Path) -> None:
    import jax

    with jax.enable_x64(False):
        for name in ("double", "packed", "packed_and_missing"):
            variable, expected = by_netcdf4(file, name)
            spec = TensorSpec((7, 5, 6), dj.planning_world(1).grid([1, 1, 1]))
            (batch,) = batches(variable, TensorSpec((5, 6), dj.planning_world(1).grid([1, 1])), 7)
            assert read(variable, spec.box).dtype == np.float64 == expected.dtype
            for found in (spec.block(variable), batch):
                assert found.dtype == np.float32
                np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("opened", SOURCES)
def test_sources_without_samples_and_scalars(file: Path, opened: Opened) -> None:
    for name, box in (("empty", ((0, 0), (0, 5), (0, 6))), ("scalar", ())):
        variable, expected = opened(file, name)
        found = read(variable, box)
        assert found.shape == expected.shape and found.dtype == np.float64
        np.testing.assert_array_equal(found, expected)
    assert float(TensorSpec((), dj.planning_world(1).grid([1])).block(opened(file, "scalar")[0])) == 3.5


def test_missing_whole_numbers_are_refused_where_they_are_read(file: Path) -> None:
    """The probe, entry (0, 0, 0), is one of them."""
    variable, _ = by_netcdf4(file, "counts")
    holes = netCDF4.Dataset(file)["missing_counts"]
    spec = TensorSpec((5, 6), dj.planning_world(1).grid([1, 1]))
    assert read(holes, None).dtype == np.int32
    np.testing.assert_array_equal(read(holes, ((3, 7), (0, 1), (1, 6))), COUNTS[3:7, 0:1, 1:6])
    sentence = r"'missing_counts', of dtype int32\) has masked entries, for which only floating dtypes have NaN"
    with pytest.raises(dj.InvalidArgumentError, match=rf"`source` \({sentence}"):
        read(holes, BOXES[-1])
    with pytest.raises(dj.InvalidArgumentError, match=rf"`array` \({sentence}"):
        TensorSpec((7, 5, 6), dj.planning_world(1).grid([1, 1, 1])).block(holes)
    with pytest.raises(dj.InvalidArgumentError, match=rf"`source` \({sentence}"):
        list(batches({"x": variable, "y": holes}, {"x": spec, "y": spec}, 2))
    holes.set_auto_mask(False)
    assert read(holes, ((0, 1),) * 3).tolist() == [[[-9]]]


def test_words_are_refused(file: Path) -> None:
    for opened in SOURCES:
        variable, _ = opened(file, "words")
        with pytest.raises(dj.InvalidTypeError, match="`source` must hold numbers, but has an array of dtype"):
            batches(variable, TensorSpec((), dj.planning_world(1).grid([1]), replicated=True), 1)
        with pytest.raises(dj.InvalidTypeError, match=r"`array.dtype` \(=dtype\(.*must be a dtype of numbers"):
            TensorSpec((5,), dj.planning_world(1).grid([1])).block(variable)


def test_samples_and_batches_of_a_data_set(file: Path) -> None:
    """A data set, or loader, of packed and missing values: its slices are masked arrays."""
    variable, expected = by_netcdf4(file, "packed_and_missing")
    spec = TensorSpec((5, 6), dj.planning_world(2, rank=1).grid([1, 2]))

    class Samples:
        def __len__(self) -> int:
            return len(variable)

        def __getitem__(self, i: int) -> Any:
            return variable[i]

    for source, size in ((Samples(), 7), (iter([variable[:]]), None)):
        (batch,) = batches(source, spec, size)
        np.testing.assert_array_equal(batch, expected[:, :, 3:])


TWO_READERS = """
import sys
import jax, netCDF4
import distdl_jax as dj

def program():
    P = dj.Partition()
    with dj.data.one_reader():
        file = netCDF4.Dataset(sys.argv[1])
        variables = file["a"], file["b"]
        expected = [variable[:].mean() for variable in variables]
    spec = dj.TensorSpec((16, 64), P.grid([1, P.size]))
    readers = [dj.data.batches(variable, spec, 1, jax.random.key(0)) for variable in variables]
    sums = [0.0, 0.0]
    for both in zip(*readers):
        sums = [total + float(batch.sum()) for total, batch in zip(sums, both)]
    means = [dj.all_reduce(jax.numpy.float32(total), P, "sum") / (120 * 16 * 64) for total in sums]
    assert all(abs(mean - right) < 1e-3 for mean, right in zip(means, expected)), (means, expected)
    with dj.data.one_reader():
        file.close()

dj.simulate(int(sys.argv[2]), program)
print("both were read")
"""


@pytest.mark.parametrize("workers", [1, 4])
def test_two_iterators_read_ahead_together(workers: int, tmp_path: Path) -> None:
    """In a process of its own, which netCDF's library would crash."""
    path = tmp_path / "two.nc"
    with netCDF4.Dataset(path, "w") as dataset:
        for name, length in (("time", None), ("row", 16), ("column", 64)):
            dataset.createDimension(name, length)
        for name in "ab":
            dimensions = ("time", "row", "column")
            variable = dataset.createVariable(name, "i2", dimensions, zlib=True, chunksizes=(1, 16, 64))
            variable.setncatts(PACKED)
            variable[:] = 273 + np.random.default_rng(1).normal(size=(120, 16, 64))
    status, output = run_alone("-c", TWO_READERS, str(path), str(workers))
    assert status == 0 and "both were read" in output, output
