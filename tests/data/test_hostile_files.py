"""Files that are forged, damaged or no files: one kind of error, which names the file; nothing runs, nothing waits."""

import io
import json
import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax.data import batches, open_array, read


def npy(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<I", len(text)) + text + data


def described(descr: str, shape: str) -> bytes:
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n", bytes(64))


def safetensors(header: Any, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: Any = "F64", shape: Any = (8,), offsets: Any = (0, 64)) -> bytes:
    return safetensors({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


def whole(dtype: Any = np.float64) -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(8).astype(dtype), allow_pickle=True)
    return file.getvalue()


def npz(member: bytes, method: int = zipfile.ZIP_STORED, name: str = "x.npy") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(name, member)
    return file.getvalue()


ARRAYS = {
    "objects": whole(object),
    "a pickle": pickle.dumps(np.arange(3)),
    "negative": described("'<f8'", "(-8,)"),
    "many dimensions": described("'<f8'", str((1,) * 70)),
    "absurd": described("'<f8'", "(10**30,)".replace("10**30", "1" + "0" * 30)),
    "absurd product": described("'<f8'", str((2**40, 2**40))),
    "nothing of much": described("'<f8'", str((0, 2**62))),
    "fractions": described("'<f8'", "(1.5,)"),
    "truth": described("'<f8'", "(True,)"),
    "elements that are arrays": described("('<f8', (2,))", "(2,)"),
    "a long header": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}" + " " * 3 * 2**20, version=b"\2\0"),
    "a version": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}", bytes(8), b"\7\0"),
    "a program": npy("{'descr': __import__('os'), 'fortran_order': False, 'shape': (1,)}", bytes(8)),
    "no header": b"\x93NUMPY\1\0",
    "half": whole()[:-32],
    "empty": b"",
}
FILES = {f"{kind}.npy": content for kind, content in ARRAYS.items()}
FILES |= {f"{kind}.npz": npz(content) for kind, content in ARRAYS.items()}
FILES |= {f"{kind}, compressed.npz": npz(content, zipfile.ZIP_DEFLATED) for kind, content in ARRAYS.items()}
FILES |= {
    "half of a zip.npz": npz(whole())[:-40],
    "a wrong byte.npz": npz(bytes(2**12), zipfile.ZIP_DEFLATED)[:40],
    "another name.npz": npz(whole(), zipfile.ZIP_DEFLATED, "x"),
    "a kind of compression.npz": npz(whole(), zipfile.ZIP_DEFLATED).replace(b"\x08\x00", b"\x63\x00"),
    "no JSON.safetensors": safetensors(b"{{"),
    "nested.safetensors": safetensors(b"[" * 10**5),
    "a dtype.safetensors": tensor(dtype="F7"),
    "a dtype that is none.safetensors": tensor(dtype=8),
    "negative.safetensors": tensor(shape=[-8]),
    "many dimensions.safetensors": tensor(shape=[8] + [1] * 70),
    "absurd.safetensors": tensor(shape=[10**30]),
    "offsets.safetensors": tensor(offsets=[8, 72]),
    "offsets that are none.safetensors": tensor(offsets=["a"]),
    "a long header.safetensors": struct.pack("<Q", 2**62) + bytes(64),
    "half.safetensors": tensor()[:-32],
    "empty.safetensors": b"",
    "text.h5": b"no HDF5",
    "text.zarr": b"no Zarr",
}


@pytest.mark.parametrize("name", FILES)
def test_broken_files(name: str, tmp_path: Path) -> None:
    for package in ("h5", "zarr"):
        if name.endswith(package):
            pytest.importorskip({"h5": "h5py", "zarr": "zarr"}[package])
    path = tmp_path / name
    path.write_bytes(FILES[name])
    with pytest.raises(dj.CheckpointError, match=name.replace(".", r"\.")):
        read(path, ((0, 1),))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def connection(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.getcwd()
        os.chdir(path.parent)  # the name of a socket must be short
        listener.bind(path.name)
        os.chdir(folder)


@pytest.mark.limit(20)
@pytest.mark.parametrize("make", [fifo, Path.mkdir, connection])
@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "h5", "zarr", "txt"])
def test_paths_of_other_kinds_are_refused(kind: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    if kind in ("h5", "zarr"):
        pytest.importorskip("h5py" if kind == "h5" else "zarr")
    make(tmp_path / f"x.{kind}")
    with pytest.raises(dj.CheckpointError, match=rf"x\.{kind} is (no file, but|damaged)"):
        open_array(tmp_path / f"x.{kind}")


@pytest.mark.limit(20)
@pytest.mark.parametrize("place", ["zarr.json", "x/zarr.json", "x/.zarray", "x/c/0"])
def test_a_pipe_in_a_zarr_store(place: str, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    zarr.open_group(tmp_path / "x.zarr", mode="w").create_array("x", data=np.arange(4.0), chunks=(2,))
    path = tmp_path / "x.zarr" / place
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(dj.CheckpointError, match=f"{place} is no file, but"):
        read(open_array(tmp_path / "x.zarr", "x"), ((0, 4),))


class Runs:
    """What a pickle of it runs leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("dtype", ["|O", "<f8"])
@pytest.mark.parametrize("place", ["filters", "compressor", "codecs", "in a shard"])
def test_a_zarr_store_runs_nothing(place: str, dtype: str, tmp_path: Path) -> None:
    """Whatever versions of zarr and numcodecs there are: those that refuse it themselves, and those that don't."""
    pytest.importorskip("zarr")
    store, told = tmp_path / "x.zarr", tmp_path / "it ran"
    store.mkdir()
    content = pickle.dumps(Runs(told))
    if place in ("filters", "compressor"):
        metadata = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": dtype, "fill_value": 0, "order": "C"}
        metadata |= {"filters": None, "compressor": None}
        metadata[place] = [{"id": "pickle"}] if place == "filters" else {"id": "pickle"}
        (store / ".zarray").write_text(json.dumps(metadata))
        (store / "0").write_bytes(content)
    else:
        codecs = [{"name": "bytes"}, {"name": "numcodecs.pickle", "configuration": {}}]
        if place == "in a shard":
            codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": [1], "codecs": codecs}}]
        metadata = {"zarr_format": 3, "node_type": "array", "shape": [1], "data_type": "float64", "fill_value": 0}
        metadata |= {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}}, "codecs": codecs}
        metadata |= {"chunk_key_encoding": {"name": "default"}, "attributes": {}}
        (store / "zarr.json").write_text(json.dumps(metadata))
        (store / "c").mkdir()
        (store / "c" / "0").write_bytes(content)
    with pytest.raises(dj.CheckpointError, match=r"x\.zarr"):
        read(store, ((0, 1),))
    assert not told.exists()


def test_hdf5_that_leads_elsewhere(tmp_path: Path) -> None:
    """A data set whose numbers are in any file, or in one that is missing; not one of the same folder."""
    h5py = pytest.importorskip("h5py")
    (tmp_path / "in").mkdir()
    for name in ("in/part.h5", "secret.h5"):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.arange(4.0)

    def virtual(name: str, source: str) -> None:
        layout = h5py.VirtualLayout((4,), "f8")
        layout[:] = h5py.VirtualSource(source, "x", (4,))
        with h5py.File(tmp_path / "in" / name, "w") as file:
            file.create_virtual_dataset("x", layout, fillvalue=7.0)

    virtual("good.h5", "part.h5")
    assert read(tmp_path / "in" / "good.h5", ((1, 3),)).tolist() == [1, 2]
    with h5py.File(tmp_path / "in" / "external.h5", "w") as file:
        file.create_dataset("x", (4,), "f8", external=[(str(tmp_path / "secret.h5"), 0, 32)])
        file["link"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "x")
    virtual("up.h5", "../secret.h5")
    virtual("absolute.h5", str(tmp_path / "secret.h5"))
    virtual("over there.h5", "external.h5")
    for name in ("external.h5", "up.h5", "absolute.h5", "over there.h5"):
        with pytest.raises(dj.CheckpointError, match=r"has numbers of '/x' in .*, which may be any file"):
            open_array(tmp_path / "in" / name)
    with pytest.raises(dj.InvalidArgumentError, match="It holds 'x'"):
        open_array(tmp_path / "in" / "external.h5", "link")
    virtual("missing.h5", "none.h5")
    with pytest.raises(FileNotFoundError, match=r"none\.h5"):
        open_array(tmp_path / "in" / "missing.h5")


def test_damage_that_one_worker_finds_raises_on_all(tmp_path: Path) -> None:
    """What one worker finds in a file reaches the others: an import raises on all."""
    (tmp_path / "x.npy").write_bytes(FILES["half.npy"])

    def program() -> None:
        P = dj.Partition()
        with pytest.raises(dj.CheckpointError, match=r"x\.npy is damaged"):
            dj.checkpoint.import_(tmp_path / "x.npy", dj.TensorSpec((8,), P))
        with pytest.raises(dj.CheckpointError, match=r"x\.npy is damaged"):
            batches(tmp_path / "x.npy", dj.TensorSpec((), P, replicated=True), 2)

    dj.simulate(2, program)
