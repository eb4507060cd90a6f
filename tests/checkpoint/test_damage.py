"""Files that are damaged, short or missing are named on all workers; few of them are open at a time."""

import os
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint.recorded_disk import disk_used
from checkpoint.trees import refused

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.checkpoint.disk import Disk
from distdl_jax.checkpoint.manifest import Manifest, worker_file
from distdl_jax.checkpoint.reading import Files


@pytest.mark.parametrize(
    "place", ["block", "checksums", "manifest", "short", "missing", "not json", "version", "a block too few"]
)
def test_damage_is_named(place: str, tmp_path: Path) -> None:
    """One bit, on the one worker that reads it; all raise, and name the file, the leaf and the block."""

    def program(save: bool) -> None:
        P = dj.Partition()
        its = {"w": TensorSpec((4, 3), P.grid([2, 1]))}
        if save:
            checkpoint.save(tmp_path, {"w": jnp.ones((2, 3))}, its)
            return
        refused(lambda: checkpoint.restore(tmp_path, its), sentence, dj.CheckpointError)

    dj.simulate(2, program, True)
    folder = tmp_path / "step-0000000000"
    file = folder / "worker-00001.safetensors"
    manifest = folder / "manifest.json"
    match place:
        case "block" | "checksums":
            content = bytearray(file.read_bytes())
            content[-1 if place == "checksums" else -5] ^= 1
            file.write_bytes(content)
            sentence = r"worker-00001.* damaged in the block 2:4 x 0:3 of the leaf \['w'\]: "
            sentence += "the checksum of its checksums does" if place == "checksums" else "the checksum does"
        case "short":
            file.write_bytes(file.read_bytes()[:-1])
            sentence = r"worker-00001.* damaged in the block 2:4 x 0:3 of the leaf \['w'\]: it ends too early"
        case "missing":
            file.unlink()
            sentence = r"No such file or directory.*worker-00001"
        case "manifest":
            manifest.write_text(manifest.read_text().replace('"box": [[2, 4]', '"box": [[2, 3]'))
            sentence = r"manifest\.json is damaged: its checksum does not match"
        case "not json":
            manifest.write_text(manifest.read_text()[:-10])
            sentence = r"manifest\.json is damaged: it is not valid JSON"
        case "version":
            manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 99'))
            sentence = r"is of version 99, but this distdl_jax reads version 2"
        case "a block too few":  # of a manifest that fits its checksum
            told = Manifest.from_json(manifest.read_bytes(), "here")
            (leaf,) = told.leaves
            manifest.write_text(replace(told, leaves=(replace(leaf, blocks=leaf.blocks[:1]),)).to_json())
            sentence = r"its blocks do not cover the leaf \['w'\]"
    dj.simulate(2, program, False)


def test_a_file_that_is_short(tmp_path: Path) -> None:
    """A file system that loses the end of it, and says nothing: no checkpoint is made of that."""

    class Lossy(Disk):
        def write(self, descriptor: int, data: memoryview, offset: int) -> int:
            lost = int(offset > 0)
            return super().write(descriptor, data[: len(data) - lost], offset) + lost

    def program() -> None:
        P = dj.Partition()
        with disk_used(Lossy() if P.rank == 1 else Disk()):
            refused(
                lambda: checkpoint.save(tmp_path, jnp.ones(2), TensorSpec((4,), P)),
                r"worker-00001\.safetensors should have \d+ bytes, but has \d+",
                dj.CheckpointError,
            )

    dj.simulate(2, program)
    assert os.listdir(tmp_path) == []


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    """Of a checkpoint of many workers: the one that was not read for the longest time is closed."""
    names = [worker_file(worker) for worker in range(40)]
    for name in names:
        (tmp_path / name).write_text(name)

    def count_open() -> int:
        """Those of this test: other threads of the process open some, too."""
        return sum(
            os.path.realpath(f"/proc/self/fd/{fd}").startswith(f"{tmp_path}/") for fd in os.listdir("/proc/self/fd")
        )

    files = Files(str(tmp_path))
    for name in [*names, *names[:4], names[20]]:
        assert os.pread(files.file(name).descriptor, 99, 0).decode() == name
        assert 1 <= count_open() <= 32
    assert os.pread(files.file(names[39]).descriptor, 99, 0).decode() == names[39]
    del files
    assert count_open() == 0
