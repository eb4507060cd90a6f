"""What is written is read by the safetensors package, and what that writes is read here."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax.partitions.formats.plain_files import PlainFile
from distdl_jax.partitions.formats.safetensors import (
    CODES,
    COMPLEX,
    bytes_of,
    dtype_named,
    is_storable,
    laid_out,
    read_header,
)

safetensors = pytest.importorskip("safetensors")


def tensors() -> dict[str, np.ndarray]:
    """One of each dtype, scalars and empty ones, in an order that is not that of their widths."""
    found = {name: np.arange(6).reshape(2, 3).astype(dtype_named(name)) for name in reversed(CODES)}
    found |= {"scalar": np.float32(2.5), "empty": np.zeros((0, 3), np.int8), "": np.arange(3, dtype=np.int16)}
    return {name: np.asarray(value) for name, value in found.items()}


def written(path: Path, arrays: dict[str, np.ndarray]) -> None:
    head, places, size = laid_out({name: (array.dtype.name, array.shape) for name, array in arrays.items()})
    assert all(place.offset % place.itemsize == 0 for place in places.values())
    content = bytearray(size)
    content[: len(head)] = head
    for name, array in arrays.items():
        content[places[name].offset : places[name].offset + array.nbytes] = bytes_of(array)
    path.write_bytes(content)


@pytest.mark.parametrize("large", [False, True])
def test_the_package_reads_what_is_written(large: bool, tmp_path: Path) -> None:
    """Large files begin at a page: bytes are copied to whole pages in two thirds of the time."""
    arrays = {"x": np.arange(2**18, dtype=np.float32)} if large else tensors()
    written(tmp_path / "x.safetensors", arrays)
    found = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert (found[name]["dtype"], found[name]["shape"]) == (CODES[array.dtype.name], list(array.shape))
        assert bytes(found[name]["data"]) == array.tobytes()
    if large:
        _, places, size = laid_out({"x": ("float32", arrays["x"].shape)})
        assert places["x"].offset % 4096 == 0 and size == places["x"].offset + arrays["x"].nbytes


def test_complex_numbers_are_pairs(tmp_path: Path) -> None:
    arrays = {"single": np.array([1 + 2j, 3 - 4j], np.complex64), "double": np.array(5 - 6j)}
    written(tmp_path / "x.safetensors", arrays | {"real": np.ones(2)})
    with safetensors.safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert sorted(json.loads(file.metadata()[COMPLEX])) == ["double", "single"]
        assert file.get_tensor("double").tolist() == [5, -6]
        assert file.get_tensor("single").tolist() == [[1, 2], [3, -4]]
    found = read_header(PlainFile(str(tmp_path / "x.safetensors")))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        "single": ("complex64", (2,)),
        "double": ("complex128", ()),
        "real": ("float64", (2,)),
    }


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {name: array for name, array in tensors().items() if not name.startswith(("float8", "bfloat"))}
    arrays["complex"] = np.array([1 + 2j], np.complex64)
    save_file(arrays, tmp_path / "x.safetensors", {"some": "text"})
    content = (tmp_path / "x.safetensors").read_bytes()
    for name, tensor in read_header(PlainFile(str(tmp_path / "x.safetensors"))).items():
        got = np.frombuffer(content, dtype_named(tensor.dtype), int(np.prod(tensor.shape)), tensor.offset)
        np.testing.assert_array_equal(got.reshape(tensor.shape), arrays.pop(name), strict=True)
    assert not arrays


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, (9).to_bytes(8, "little") + b"{not json", b"\0" * 8])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(dj.CheckpointError, match=r"x is not a safetensors file, or it is damaged"):
        read_header(PlainFile(str(tmp_path / "x")))


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "x", {"a": np.ones(4)})
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(dj.CheckpointError, match=r"x is damaged: it should have \d+ bytes, but has \d+"):
        read_header(PlainFile(str(tmp_path / "x")))


def test_the_bytes_of_the_header_are_no_numbers_of_a_tensor(tmp_path: Path) -> None:
    text = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [-8, -4]}}).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(dj.CheckpointError, match="-8 is not an integer from 0 to"):
        read_header(PlainFile(str(tmp_path / "x")))


def test_dtypes_without_a_code_are_not_storable() -> None:
    assert is_storable("bfloat16") and not is_storable(np.dtype(jnp.int4).name)
