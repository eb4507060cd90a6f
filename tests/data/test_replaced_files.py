"""Files that change while they are read: the old numbers, or an error that names the file; never others."""

import copy
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from data.files import KINDS, write
from jobs import run_alone

import distdl_jax as dj
from distdl_jax import TensorSpec
from distdl_jax.data import batches, open_array, read
from distdl_jax.partitions.formats.arrays import arrays_in

OLD = np.arange(64 * 1024, dtype=np.float64).reshape(64, 1024)
NEW = {"values": -OLD, "dtype": OLD.astype(np.float32), "shape": -OLD[:, :512], "longer": -np.repeat(OLD, 2, 0)}


def renamed(path: Path, array: np.ndarray) -> None:
    """A new file gets the name of the old one."""
    write(path.with_name(f"new {path.name}"), array)
    if path.is_dir():
        path.rename(path.with_name(f"old {path.name}"))
    path.with_name(f"new {path.name}").rename(path)


def overwritten(path: Path, array: np.ndarray) -> None:
    """The numbers of the old file are replaced, in the same file where its format allows it."""
    write(path, array)


def cut(path: Path, array: np.ndarray) -> None:
    if path.is_dir():
        os.truncate(min(path.rglob("zarr.json")), 0)  # of the array, before the group's
    else:
        os.truncate(path, 600)


@pytest.mark.simulated(1)
@pytest.mark.parametrize("change", [renamed, overwritten, cut])
@pytest.mark.parametrize("kind", KINDS)
def test_while_batches_read_it(kind: str, change: Callable[[Path, np.ndarray], None], tmp_path: Path) -> None:
    for name, new in NEW.items():
        path = tmp_path / f"{name}.{kind}"
        write(path, OLD)
        P = dj.Partition().grid([1])
        its = batches(path, TensorSpec((1024,), P), 4, prefetch=0)
        np.testing.assert_array_equal(next(its), OLD[:4])
        change(path, new)
        try:
            found = [np.asarray(batch) for batch in its]
        except dj.CheckpointError as error:
            assert f"{name}.{kind}" in str(error)
            assert change is not renamed or kind.endswith(("zarr", "compressed.npz"))
        else:
            np.testing.assert_array_equal(np.concatenate(found), OLD[4:])
            assert change is renamed
        with pytest.raises((dj.CheckpointError, dj.InvalidArgumentError)) if change is cut else jax.checking_leaks():
            got = read(path, tuple((0, n) for n in new.shape))
            np.testing.assert_array_equal(got, new)


MAPPED = """
import os, sys
import numpy as np
import distdl_jax as dj
array = np.load(sys.argv[1], mmap_mode="r")[2:]
assert dj.data.read(array, ((0, 1), (0, 1))) == 2048
os.truncate(sys.argv[1], 600)
try:
    dj.data.read(array, ((40, 60), (0, 8)))
except dj.CheckpointError as error:
    print(error)
"""


def test_a_memory_map_of_the_program(tmp_path: Path) -> None:
    write(tmp_path / "x.npy", OLD)
    status, output = run_alone("-c", MAPPED, tmp_path / "x.npy")
    assert status == 0 and "x.npy has been truncated while it is a memory map: it has 600 bytes" in output, output


def test_pickled_and_copied(tmp_path: Path) -> None:
    """As loaders with processes of their own do; one that is unpickled when the file is another one is refused."""
    write(tmp_path / "x.npz", OLD)
    array = open_array(tmp_path / "x.npz")
    text = pickle.dumps(array)
    for again in (pickle.loads(text), copy.deepcopy(array)):
        np.testing.assert_array_equal(again[3:5], OLD[3:5])
    renamed(tmp_path / "x.npz", NEW["longer"])
    with pytest.raises(dj.CheckpointError, match=r"x\.npz has been changed"):
        pickle.loads(text)
    np.testing.assert_array_equal(array[3:5], OLD[3:5])


def test_an_import_of_two_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Worker 1 opens the file when another one has its name: no worker gets a part of each."""
    path = tmp_path / "x.npy"
    write(path, OLD)
    is_open = threading.Event()

    def opens(file: str) -> Any:
        if dj.Partition().rank == 1:
            assert is_open.wait(60)
            renamed(path, NEW["values"])
        found = arrays_in(file)
        is_open.set()
        return found

    monkeypatch.setattr("distdl_jax.checkpoint.import_export.arrays_in", opens)

    def program() -> None:
        with pytest.raises(dj.CheckpointError, match=r"x\.npy has been replaced by another file"):
            dj.checkpoint.import_(path, TensorSpec((64, 1024), dj.Partition().grid([1, 2])))

    dj.simulate(2, program)


INDICES: tuple[Any, ...] = (
    *(3, -1, slice(2, 9), slice(None, None, -3), slice(5, 5), ..., (), (2, 3), (slice(1, 4), -1), (..., 2)),
    *([4, 1, 1], (np.array([3, -2]), slice(2, 8, 3)), ([1, 2], 5), ([1, 2], [3, 4]), None, (slice(None), [1, 2])),
    *(np.arange(64) % 9 == 0, [], True),
)


@pytest.mark.parametrize("kind", ["npy", "npz", "compressed.npz", "safetensors"])
def test_slices_like_those_of_numpy(kind: str, tmp_path: Path) -> None:
    write(tmp_path / f"x.{kind}", OLD)
    array = open_array(tmp_path / f"x.{kind}")
    for index in INDICES:
        got = array[index]
        np.testing.assert_array_equal(got, OLD[index], strict=True)
    for wrong in (64, (0, 0, 0), "x", 1.5):
        with pytest.raises(IndexError):
            array[wrong]
    assert len(array) == 64 and array.ndim == 2
    np.testing.assert_array_equal(np.asarray(array, np.float32), OLD.astype(np.float32), strict=True)
