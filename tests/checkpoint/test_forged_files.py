"""Files that somebody has changed: they give the right data or a `CheckpointError` on every worker, and nothing else.

A manifest has a checksum of its own; here it is made anew after each change, so that the change itself is found.
"""

import copy
import io
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.trees import refused

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.partitions.formats.arrays import arrays_in

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, float("nan")),
    *("", "x", "../../x", "/etc/passwd", "worker-00001.safetensors", "float64", "F64", "bfloat16", "rbg", "\0", "é"),
    *([], {}, [[]], [0], [0, 1], [0, 6], [[0, 6]], [3, 1], {"a": 1}, [2, 2], [1] * 70),
)
WHOLE = np.arange(12.0).reshape(6, 2)
MUTATIONS = 2000


def specs() -> dict[str, Any]:
    P = dj.Partition()
    everywhere = TensorSpec((), P, replicated=True)
    rows = TensorSpec((6, 2), P.grid([P.size, 1]))
    return {"w": rows, "key": everywhere, "step": everywhere}


def save(path: Path) -> None:
    start, stop = specs()["w"].box[0]
    tree = {"w": jnp.asarray(WHOLE[start:stop]), "key": jax.random.key(3), "step": 7}
    checkpoint.save(path, tree, specs())


def places(said: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in what JSON says, with each of its keys."""
    if isinstance(said, dict | list):
        for key in said if isinstance(said, dict) else range(len(said)):
            yield said, key
            yield from places(said[key])


def mutated(said: Any, draw: random.Random) -> Any:
    """A copy of what JSON says, with one to three changes."""
    said = copy.deepcopy(said)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        container, key = draw.choice([*places(said)])
        match draw.randrange(8):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[draw.choice(("", "extra", "0", "__metadata__"))] = container.pop(key)
            case 2:
                other, its = draw.choice([*places(said)])
                container[key] = copy.deepcopy(other[its])
            case 3 if type(container[key]) is int:
                container[key] += draw.choice((-1, 1, 8, -8, 4096))
            case _:
                container[key] = copy.deepcopy(draw.choice(VALUES))
    return said


def spoilt(text: bytes, draw: random.Random) -> bytes:
    """A text with a change that JSON does not know, or a wrong byte."""
    at = draw.randrange(len(text))
    match draw.randrange(5):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + b"\xff\xfe" + text[at:]
        case 2:
            return b"[" * 10**5 + text
        case 3:
            return text.replace(b"{", b'{"dtype": "F32", "step": 1, ', 2)
        case _:
            return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]


def is_right(path: Path) -> bool:
    """Whether what is read is right; False where all raise a `CheckpointError`, and what is refused by the spec."""
    P, its = dj.Partition(), specs()
    try:
        got = checkpoint.restore(path, its)
    except dj.CheckpointError:
        return False
    except dj.PlanError as error:
        assert "has no leaf in" in str(error) or "also holds" in str(error) or "but the saved leaf is" in str(error)
        return False
    start, stop = its["w"].box[0]
    np.testing.assert_array_equal(np.asarray(got["w"]), WHOLE[start:stop])
    assert got["key"] == jax.random.key(3) and int(got["step"]) == 7 and P.size
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    dj.simulate(2, save, path)
    return path


def test_changed_manifests(saved: Path) -> None:
    """By two workers, and by one that reads all; more than a few are found by each of the checks."""
    path = saved / "step-0000000000" / "manifest.json"
    text = path.read_bytes()
    outer = json.loads(text)
    found: list[bool] = []

    def program(first: int) -> None:
        for seed in range(first, MUTATIONS, 2):
            draw = random.Random(seed)
            if dj.Partition().rank == 0:
                said = mutated(outer["checkpoint"], draw)
                crc = zlib.crc32(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())
                forged = json.dumps(outer | {"crc32": crc, "checkpoint": said}).encode()
                path.write_bytes(spoilt(forged, draw) if seed % 5 == 0 else forged)
            dj.Partition().allgather_data(None)
            right = dj.Partition().allgather_data(is_right(saved))
            assert len(set(right)) == 1, seed
            found.append(right[0])

    try:
        dj.simulate(1, program, 0)
        dj.simulate(2, program, 1)
    finally:
        path.write_bytes(text)
    assert 20 < sum(found) < len(found) / 2


def header_and_data(content: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length], content[8 + length :]


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    return {"w": WHOLE, "c": np.array([1 + 2j, 3 - 4j], np.complex64), "n": np.arange(4, dtype=np.int32)}


def test_changed_headers(tmp_path: Path) -> None:
    """What is read of safetensors is what another reader would find where the header says."""
    path = tmp_path / "x.safetensors"

    def export() -> None:
        P = dj.Partition()
        checkpoint.export(
            path, tensors(), {name: TensorSpec(x.shape, P, replicated=True) for name, x in tensors().items()}
        )

    dj.simulate(1, export)
    header, data = header_and_data(path.read_bytes())
    errors = 0
    for seed in range(MUTATIONS):
        draw = random.Random(seed)
        text = json.dumps(mutated(json.loads(header), draw)).encode()
        text = spoilt(text, draw) if seed % 4 == 0 else text
        length = draw.choice((0, len(text) + 1, 2**62, 2**64 - 1)) if seed % 10 == 0 else len(text)
        path.write_bytes(length.to_bytes(8, "little") + text + data)
        try:
            found = arrays_in(str(path))
        except dj.CheckpointError as error:
            assert str(path) in str(error)
            errors += 1
            continue
        said = json.loads(text)
        pairs = json.loads((said.pop("__metadata__", None) or {}).get("distdl_jax.complex", "[]"))
        assert said.keys() == found.keys()
        assert sum(stop - start for start, stop in (its["data_offsets"] for its in said.values())) == len(data)
        for name, array in found.items():
            start, stop = said[name]["data_offsets"]
            got = array.read(tuple((0, n) for n in array.shape))
            assert got.tobytes() == data[start:stop] and list(got.shape) + [2] * (name in pairs) == said[name]["shape"]
    assert MUTATIONS / 2 < errors < MUTATIONS


@pytest.mark.parametrize("kind", ["npy", "npz", "compressed"])
def test_changed_files_of_numpy(kind: str, tmp_path: Path) -> None:
    """Bytes of their headers, and the ends of files."""
    path = tmp_path / "x"
    stream = io.BytesIO()
    write: dict[str, Callable[[], None]] = {
        "npy": lambda: np.save(stream, WHOLE),
        "npz": lambda: np.savez(stream, w=WHOLE, n=np.arange(4)),
        "compressed": lambda: np.savez_compressed(stream, w=WHOLE, n=np.arange(4)),
    }
    write[kind]()
    content = stream.getvalue()
    heads = [n for n in range(len(content)) if kind != "npy" or n < 128]
    errors = 0
    for seed in range(MUTATIONS):
        draw = random.Random(seed)
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 4))):
            changed[draw.choice(heads)] = draw.choice((0, 1, 255, draw.randrange(256)))
        if seed % 10 == 0:
            changed = changed[: draw.randrange(len(changed))]
        path.write_bytes(changed)
        try:
            for array in arrays_in(str(path)).values():
                if np.prod(array.shape, dtype=object) * array.dtype.itemsize < 10**6:
                    assert array.read(tuple((0, n) for n in array.shape)).shape == array.shape
        except dj.CheckpointError as error:
            assert str(path) in str(error)
            errors += 1
    assert errors > MUTATIONS / 10


@pytest.mark.parametrize(
    "kind", ["outside", "link", "pipe", "folder", "manifest is a pipe", "manifest is a link", "manifest is a folder"]
)
def test_files_of_other_kinds_are_refused(kind: str, saved: Path, tmp_path: Path) -> None:
    """Out of the folder nothing is read, and no worker waits for a pipe."""
    path = tmp_path / "run"
    shutil.copytree(saved, path)
    folder = path / "step-0000000000"
    file = folder / ("manifest.json" if kind.startswith("manifest") else "worker-00001.safetensors")
    match kind.split()[-1]:
        case "outside":
            (tmp_path / "x").write_bytes(file.read_bytes())
            outer = json.loads((folder / "manifest.json").read_bytes())
            text = json.dumps(outer["checkpoint"]).replace("worker-00001.safetensors", "../../x")
            crc = zlib.crc32(json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")).encode())
            forged = outer | {"crc32": crc, "checkpoint": json.loads(text)}
            (folder / "manifest.json").write_text(json.dumps(forged))
            sentence = r"manifest\.json is damaged: '\.\./\.\./x' is not the name of a file"
        case "link":
            file.rename(tmp_path / "x")
            file.symlink_to(tmp_path / "x")
            sentence = f"{file.name} is a symbolic link"
        case "pipe":
            file.unlink()
            os.mkfifo(file)
            sentence = f"{file.name} is not a file, but a folder, a pipe or a device"
        case "folder":
            file.unlink()
            file.mkdir()
            sentence = f"{file.name} is not a file, but a folder"

    dj.simulate(2, refused, lambda: checkpoint.restore(path, specs()), sentence, dj.CheckpointError)


def test_many_and_long_names_take_no_longer_than_their_bytes(tmp_path: Path) -> None:
    """Of containers around a leaf, and of arrays of complex numbers: the time and memory are not their square."""
    names = [f"{n}" for n in range(100_000)]
    header: dict[str, Any] = {name: {"dtype": "F32", "shape": [0, 2], "data_offsets": [0, 0]} for name in names}
    header["__metadata__"] = {"distdl_jax.complex": json.dumps(names)}
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    assert arrays_in(str(tmp_path / "x"))["7"].dtype == np.complex64

    def program() -> None:
        spec = TensorSpec((), dj.Partition(), replicated=True)
        checkpoint.save(tmp_path, {"w": 1}, {"w": spec})
        path = tmp_path / "step-0000000000" / "manifest.json"
        outer = json.loads(path.read_bytes())
        outer["checkpoint"]["leaves"][0]["path"] = "." * 10**7
        said = json.dumps(outer["checkpoint"], sort_keys=True, separators=(",", ":"))
        path.write_text(json.dumps(outer | {"crc32": zlib.crc32(said.encode())}))
        with pytest.raises(dj.PlanError, match=r"`specs\['w'\]` has no leaf .* characters\) \.\.\."):
            checkpoint.restore(tmp_path, {"w": spec})

    dj.simulate(1, program)


def test_a_step_that_no_manifest_can_have(tmp_path: Path) -> None:
    """It is refused before it is written, not when it is read."""

    def program() -> None:
        spec = TensorSpec((), dj.Partition(), replicated=True)
        for step in (2**63, 10**5000):
            sentence = r"`step` \(=.*\) must be at most 9223372036854775807"
            refused(lambda step=step: checkpoint.save(tmp_path, 1, spec, step), sentence, dj.InvalidArgumentError)
        checkpoint.save(tmp_path, 1, spec, 2**63 - 1)
        assert checkpoint.steps(tmp_path) == [2**63 - 1] and int(checkpoint.restore(tmp_path, spec)) == 1

    dj.simulate(2, program)


def test_a_manifest_of_20_gigabytes(tmp_path: Path) -> None:
    (tmp_path / "step-0000000000").mkdir()
    (tmp_path / "step-0000000000" / "manifest.json").touch()
    os.truncate(tmp_path / "step-0000000000" / "manifest.json", 20 * 10**9)
    sentence = r"manifest\.json is damaged: 20000000000 bytes of text are more"
    dj.simulate(2, refused, lambda: checkpoint.restore(tmp_path, specs()), sentence, dj.CheckpointError)
