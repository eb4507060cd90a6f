"""Any box of an array in any kind of file, against numpy's slices of the whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.files import KINDS, Watched, write

import distdl_jax as dj
from distdl_jax.data import open_array, read

WHOLE = np.arange(7 * 5 * 6, dtype=np.float32).reshape(7, 5, 6)


def written(kind: str, folder: Path) -> Any:
    """Return the array as a source."""
    if kind in ("memory", "big-endian"):
        return WHOLE.astype(">f4") if kind == "big-endian" else WHOLE
    write(folder / f"x.{kind}", WHOLE)
    return open_array(folder / f"x.{kind}")


@pytest.mark.parametrize("kind", ["memory", "big-endian", *KINDS])
def test_any_box_of_any_source(kind: str, tmp_path: Path) -> None:
    source = written(kind, tmp_path)
    draw = np.random.default_rng(0)
    for _ in range(12):
        ends = [sorted(int(end) for end in draw.integers(0, n + 1, 2)) for n in WHOLE.shape]
        box = tuple((start, stop) for start, stop in ends)
        halo = draw.integers(0, 3, (3, 2)).tolist()
        got = read(source, box)
        assert got.dtype == np.float32 and got.flags.c_contiguous
        np.testing.assert_array_equal(got, WHOLE[tuple(slice(*ends) for ends in box)])
        if got.size:
            wide = tuple(
                slice(max(0, start - left), stop + right)
                for (start, stop), (left, right) in zip(box, halo, strict=True)
            )
            np.testing.assert_array_equal(read(source, box, halo), WHOLE[wide])


def test_paths_and_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", a=np.ones(2), b=np.zeros(3))
    np.save(tmp_path / "one.npy", np.arange(4))
    assert read(tmp_path / "one.npy", ((1, 3),)).tolist() == [1, 2]
    assert read(open_array(tmp_path / "two.npz", "b"), ((0, 2),)).tolist() == [0, 0]
    for name in (None, "c"):
        with pytest.raises(dj.InvalidArgumentError, match=r"`name` \(=.*\) must be the name of an array in .*'a', 'b'"):
            open_array(tmp_path / "two.npz", name)
    with pytest.raises(OSError):
        read(str(tmp_path / "none.npy"), ((0, 1),))
    (tmp_path / "x.txt").write_text("1 2 3")
    with pytest.raises(dj.CheckpointError, match=r"`path` \(='.*x.txt'\) must end in .npy, .npz, .safetensors, .h5, "):
        read(tmp_path / "x.txt", ((0, 1),))


def test_names_in_hdf5_files(tmp_path: Path) -> None:
    """All names of a data set: by hard links, soft links, and groups with several names; h5py names it by one."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["group/x"], file["other"] = np.arange(4), np.zeros(4)
        file["second"], file["same"], file["root"] = file["group/x"], file["group"], file["/"]
        file["soft"], file["group/beside"] = h5py.SoftLink("/group/x"), h5py.SoftLink("x")
        file["far"], file["folder"] = h5py.SoftLink("soft"), h5py.SoftLink("same")
        file["elsewhere"], file["led"] = h5py.ExternalLink("y.h5", "x"), h5py.SoftLink("elsewhere")
        file["ring"], file["back"], file["none"] = h5py.SoftLink("back"), h5py.SoftLink("ring"), h5py.SoftLink("no")
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["x"] = np.arange(4)
    names = ["group/x", "/group/x", "second", "same/x", "root/root/second", "soft", "group/beside", "far", "folder/x"]
    for name in names:
        assert read(open_array(tmp_path / "x.h5", name), ((1, 3),)).tolist() == [1, 2]
    for name in ("elsewhere", "led", "ring", "none", "group", "soft/x"):
        with pytest.raises(dj.InvalidArgumentError, match=rf"`name` \(='{name}'\) must be the name of an array in"):
            open_array(tmp_path / "x.h5", name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_goes_to_another_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = written(kind, Path())
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(read(source, ((0, 2), (1, 3), (2, 4))), WHOLE[0:2, 1:3, 2:4])


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(dj.SetupError, match=r"requires h5py: pip install 'distdl_jax\[hdf5\]'"):
        open_array("x.h5")


def test_nothing_else_is_read() -> None:
    watched = Watched(WHOLE)
    read(watched, ((1, 3), (0, 2), (4, 6)))
    read(watched, ((1, 3), (2, 2), (4, 6)))
    assert read(watched, ((1, 3), (2, 2), (4, 6)), [(1, 1)] * 3).shape == (4, 0, 3)
    assert read(watched, None).shape == (0,)
    assert watched.asked == [8, 1, 1, 1]  # one element tells the dtype


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("x", None), "No such file"),
        ((3, None), r"`source` \(=3\) must be an array, or the path"),
        ((WHOLE, ((0, 1),)), r"`box` \(=\(\(0, 1\),\)\) is not a box of an array of shape \(7, 5, 6\)"),
        ((WHOLE, ((0, 8), (0, 1), (0, 1))), "is not a box of an array of shape"),
        ((WHOLE, (1, 2, 3)), r"`box` \(=\(1, 2, 3\)\) must hold a range"),
        ((WHOLE, ((0, 1),) * 3, [(1, 1)]), r"`halo` \(=\[\(1, 1\)\]\) must hold widths of 0 or more for each of the 3"),
        ((WHOLE, ((0, 1),) * 3, [(0, -1)] * 3), "must hold widths of 0 or more for each of the 3 dimensions"),
        ((WHOLE, ((0, 1),) * 3, [1, 1, 1]), r"`halo` \(=\[1, 1, 1\]\) must hold two integers"),
    ],
)
def test_wrong_arguments(arguments: tuple, sentence: str) -> None:
    with pytest.raises((dj.DistDLError, OSError), match=sentence):
        read(*arguments)
