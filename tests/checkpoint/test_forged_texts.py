"""Texts of forged files in sentences: a name of megabytes is cut, and no control character reaches a terminal."""

import copy
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.data import open_array, read

LONG = "name" * 25_000
CONTROL = "\x1b[2J\x1b]0;title\x07\r\n\u202eDONE\x9b31m"
TEXTS = LONG, CONTROL, [LONG], {LONG: 0, CONTROL: 1}, 10**4000


def checked(call: Callable[[], Any]) -> str:
    """The sentence that a call raises, in one line of a sensible length; none where it raises nothing."""
    try:
        call()
    except (dj.DistDLError, OSError) as error:
        text = str(error)
        assert isinstance(error, dj.DistDLError), repr(error)[:1000]
        assert text.isprintable(), text[:1000]
        assert len(text) < 1500, text[:1000]
        return text
    return ""


def spec() -> TensorSpec:
    return TensorSpec((4,), dj.Partition(), replicated=True)


def changed(said: Any) -> Iterator[Any]:
    """Copies of what JSON says, in each of which one value, or one name, is another text."""
    paths: list[tuple[Any, ...]] = []

    def walk(value: Any, path: tuple[Any, ...]) -> None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            paths.append((*path, key))
            if isinstance(inner, dict | list):
                walk(inner, (*path, key))

    walk(said, ())
    for *above, key in paths:
        for text in TEXTS:
            for as_name in (False, True):
                forged = copy.deepcopy(said)
                container = forged
                for step in above:
                    container = container[step]
                if not as_name:
                    container[key] = text
                elif isinstance(container, dict) and isinstance(text, str):
                    container[text] = container.pop(key)
                else:
                    continue
                yield forged


@pytest.mark.simulated(1)
def test_manifests(tmp_path: Path) -> None:
    key = TensorSpec((), dj.Partition(), replicated=True)
    specs = {"w": spec(), "key": key}
    checkpoint.save(tmp_path, {"w": jnp.arange(4.0), "key": jax.random.key(0)}, specs)
    path = tmp_path / "step-0000000000" / "manifest.json"
    outer = json.loads(path.read_bytes())
    count = 0
    for forged in changed(outer["checkpoint"]):
        crc = zlib.crc32(json.dumps(forged, sort_keys=True, separators=(",", ":")).encode())
        path.write_text(json.dumps(outer | {"crc32": crc, "checkpoint": forged}))
        count += bool(checked(lambda: checkpoint.restore(tmp_path, specs)))
    assert count > 100
    for name in outer:
        for text in TEXTS:
            path.write_text(json.dumps(outer | {name: text}))
            assert checked(lambda: checkpoint.restore(tmp_path, specs))
    for text in (LONG, CONTROL, f'{{"{LONG}": NaN}}', f'{{"a": 1, "a": "{LONG}"}}', "[" * 10**6, "1" * 10**6):
        path.write_text(text)
        assert checked(lambda: checkpoint.restore(tmp_path, specs))


@pytest.mark.simulated(1)
def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"w": jnp.arange(4.0), "c": jnp.arange(4.0) * 1j}
    checkpoint.export(path, tensors, {name: spec() for name in tensors})
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    count = 0
    for forged in changed(json.loads(content[8:end])):
        text = json.dumps(forged).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
        count += bool(checked(lambda: checkpoint.import_(path, {name: spec() for name in tensors})))
        checked(lambda: open_array(path))
    assert count > 50


@pytest.mark.simulated(1)
@pytest.mark.parametrize("name", [LONG[:60_000], CONTROL], ids=["long", "control"])
@pytest.mark.parametrize("kind", ["objects", "no array", "damaged", "several", "short", "too many dimensions", "dtype"])
def test_members_of_npz_files(kind: str, name: str, tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([{}, {}]) if kind == "objects" else np.arange(4.0), allow_pickle=True)
    data = stream.getvalue()
    match kind:
        case "no array":
            data = b"text"
        case "damaged":
            data = data.replace(b"'<f8'", b"'<q8'")
        case "dtype":
            data = data.replace(b"'<f8'", b"'4f8'")
        case "short":
            data = data.replace(b"(4,), ", b"(9,), ")
        case "too many dimensions":
            data = b"\x93NUMPY\x01\x00" + (500).to_bytes(2, "little")
            data += f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({'1, ' * 100})}}".ljust(500).encode()
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for n in range(1 + (kind == "several")):
            archive.writestr(f"{name}{n}.npy", data)
    assert checked(lambda: read(tmp_path / "x.npz", ((0, 4),)))
    assert checked(lambda: checkpoint.import_(tmp_path / "x.npz", {"w": spec()}))


def test_names_in_hdf5_and_zarr(tmp_path: Path) -> None:
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    name = "\x1b[2J" + "name" * 10_000
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file[f"{name}0"], file[f"{name}1"] = np.arange(4.0), np.arange(3)
        file.create_dataset(f"{name}2", (4,), "f8", external=[("\x1b[2J" + "name" * 100, 0, 32)])
    assert checked(lambda: open_array(tmp_path / "x.h5"))
    assert checked(lambda: open_array(tmp_path / "x.h5", name))
    assert checked(lambda: open_array(tmp_path / "x.h5", f"{name}2"))
    group = zarr.open_group(str(tmp_path / "x.zarr"), mode="w")
    for n in range(9):
        group.create_array(f"\x1b[2J{'name' * 50}{n}", shape=(4,), dtype="f8")
    assert checked(lambda: open_array(tmp_path / "x.zarr"))


@pytest.mark.simulated(2)
def test_arguments_of_users() -> None:
    """Which are cut, too, and so is a path that is too long for the file system."""
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.restore("x", spec(), LONG),  # type: ignore[arg-type]
        lambda: checkpoint.restore("x", spec(), 10**5000),
        lambda: checkpoint.restore("x", {LONG: 3}),
        lambda: checkpoint.restore([LONG], spec()),  # type: ignore[arg-type]
        lambda: checkpoint.restore(LONG, spec()),
        lambda: checkpoint.restore(CONTROL.replace("\n", ""), spec()),
        lambda: checkpoint.save("x", {LONG: 0}, {CONTROL: spec()}),
        lambda: checkpoint.save(LONG, jnp.arange(4.0), spec()),
        lambda: checkpoint.import_(LONG, spec()),
        lambda: read(np.zeros(3), LONG),  # type: ignore[arg-type]
        lambda: dj.Partition().grid(LONG),  # type: ignore[arg-type]
    ]
    for call in calls:
        assert checked(call)
