"""One file for the whole: what other programs read of it, and what is read of theirs, on any partition."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.recorded_disk import FailingDisk
from checkpoint.trees import blocks, cut, refused, same, specs, wholes

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.checkpoint.disk import Disk, disk
from distdl_jax.partitions.formats.arrays import arrays_in


@pytest.mark.parametrize(("n", "kind"), [(1, 0), (4, 2), (3, 1)])
def test_the_whole_in_one_file(n: int, kind: int, tmp_path: Path) -> None:
    """Every dtype, from blocks of any partition, and back into the blocks of another one."""
    path = tmp_path / "all.safetensors"

    def writes() -> None:
        its = specs(dj.Partition(), kind)
        checkpoint.export(path, blocks(its), its)

    def reads(other: int) -> None:
        its = specs(dj.Partition(), other)
        del its["key"], its["keys"]  # they are numbers in the file
        same(checkpoint.import_(path, its), its, weak=False)

    dj.simulate(n, writes)
    for workers, other in ((1, 0), (2, 0), (3, 1)):
        dj.simulate(workers, reads, other)
    content, keys = path.read_bytes(), wholes({"key": None, "keys": None})
    for name, array in arrays_in(str(path)).items():
        if name in keys:
            got = np.frombuffer(content, array.dtype, keys[name].data.size, array.offset or 0)
            np.testing.assert_array_equal(got.reshape(array.shape), keys[name].data)


def test_plain_safetensors_reads_it(tmp_path: Path) -> None:
    """With PyTorch's names."""
    safetensors = pytest.importorskip("safetensors.numpy")

    def program() -> None:
        P = dj.Partition()
        spec = {
            "conv1": {"weight": TensorSpec((3, 4), P.grid([1, 2]))},
            "layers": [None, {"bias": TensorSpec((3,), P)}],
        }
        weight = np.arange(12, dtype=np.float32).reshape(3, 4)[:, 2 * P.rank : 2 * P.rank + 2]
        tree = {"conv1": {"weight": weight}, "layers": [jax.nn.relu, {"bias": jnp.arange(2 - P.rank)}]}
        checkpoint.export(tmp_path / "x", tree, spec)

    dj.simulate(2, program)
    found = safetensors.load_file(tmp_path / "x")
    assert {name: (value.dtype.name, value.tolist()) for name, value in found.items()} == {
        "conv1.weight": ("float32", np.arange(12).reshape(3, 4).tolist()),
        "layers.1.bias": ("int64", [0, 1, 0]),
    }


def saved(kind: str, path: Path, whole: np.ndarray) -> None:
    """The array, under the name a.b, as numpy writes it."""
    {"npz": np.savez, "compressed": np.savez_compressed}[kind](path, **{"a.b": whole, "other": np.ones(2)})


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["npz", "compressed"])
@pytest.mark.parametrize("dtype", ["float32", ">i8", "complex128"])
def test_files_of_numpy(kind: str, order: Any, dtype: str, tmp_path: Path) -> None:
    """In either order of the elements, of any byte order, compressed or not."""
    whole = np.asarray(np.random.default_rng(0).standard_normal((6, 5, 4)) * 100, dtype=dtype, order=order)
    saved(kind, tmp_path / "x.npz", whole)

    def program(shape: list[int]) -> None:
        spec = TensorSpec((6, 5, 4), dj.Partition().grid(shape, [0, 1]))
        got = checkpoint.import_(tmp_path / "x.npz", {"a": {"b": spec}, "none": None})
        assert got["none"] is None and got["a"]["b"].dtype == whole.dtype.newbyteorder("=")
        np.testing.assert_array_equal(np.asarray(got["a"]["b"]), cut(whole, spec))

    for shape in ([2, 1, 1], [1, 2, 1], [1, 1, 2]):
        dj.simulate(2, program, shape)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_the_only_array_of_a_file(version: tuple[int, int], tmp_path: Path) -> None:
    P = dj.Partition()
    if P.rank == 0:
        with open(tmp_path / "x.npy", "wb") as file:
            np.lib.format.write_array(file, np.arange(5), version)
    P.allgather_data(None)
    got = checkpoint.import_(tmp_path / "x.npy", TensorSpec((5,), P))
    assert got.tolist() == ([3, 4] if P.rank else [0, 1, 2])


def test_what_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(4), text=np.array(["a"]), objects=np.array([None]))
    np.savez(tmp_path / "y.npz", a=np.ones(4), text=np.array(["a", "b"]))
    (tmp_path / "z").write_text("is reserved in")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00")
    whole = (tmp_path / "y.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])

    def program() -> None:
        P = dj.Partition()
        spec = TensorSpec((4,), P)

        def asked(name: str, its: Any) -> Callable[[], Any]:
            return lambda: checkpoint.import_(tmp_path / name, its)

        refused(asked("y.npz", {"b": spec}), r"y.npz has no tensor 'b', for which .* It holds 'a', 'text'\.")
        refused(asked("y.npz", {"a": TensorSpec((5,), P)}), r"'a' has the shape \(4,\) in .*, but its spec has \(5,\)")
        refused(asked("y.npz", {"text": TensorSpec((2,), P)}), "'text' has dtype <U1 in .*, which JAX does not support")
        refused(asked("x.npz", {"a": spec}), "holds Python objects under 'objects', not numbers")
        refused(asked("z", spec), "z is not a safetensors file")
        refused(asked("pipe", spec), "pipe is not a file, but a folder, a pipe or a device")
        refused(asked("cut.npy", spec), "cut.npy is damaged")
        refused(asked("cut.npz", {"a": spec}), "cut.npz is damaged")
        refused(asked("none", spec), r"No such file or directory \(errno 2\): .*none")
        refused(asked(str(P.rank), spec), "All workers must have the same `path`")
        out = tmp_path / "out.safetensors"
        refused(
            lambda: checkpoint.export(out, {"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}, spec),
            r"`tree\['a'\]\['b'\]` and `tree\['a.b'\]` would both be called 'a.b'",
        )
        refused(
            lambda: checkpoint.export(out, {"__metadata__": jnp.ones(2)}, spec),
            r"`tree\['__metadata__'\]` can't be called '__metadata__'",
        )
        token = disk.set(FailingDisk(6) if P.rank == 1 else Disk())
        checkpoint.export(tmp_path / "old.safetensors", jnp.ones(2), spec)
        refused(lambda: checkpoint.export(out, jnp.ones(2), spec), "No space left")
        disk.reset(token)

    dj.simulate(2, program)
    assert sorted(name for name in os.listdir(tmp_path) if "safe" in name) == ["old.safetensors"]
