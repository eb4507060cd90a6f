"""What is saved comes back to the bit, on any partition; what does not fit is refused in words, on all workers."""

import json
import os
import stat
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.recorded_disk import disk_used
from checkpoint.trees import blocks, cut, refused, same, specs

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.checkpoint.disk import Disk


def saves(path: Path, kind: int, step: int = 0) -> None:
    its = specs(dj.Partition(), kind)
    checkpoint.save(path, blocks(its), its, step)


def restores(path: Path, kind: int) -> None:
    its = specs(dj.Partition(), kind)
    same(checkpoint.restore(path, its), its)


@pytest.mark.parametrize("before", [(1, 0), (4, 0), (4, 1), (4, 2)])
def test_any_tree_on_any_partition(before: tuple[int, int], tmp_path: Path) -> None:
    """Every dtype, keys, scalars, copies, empty tensors; cut in one way, read in others, by any number of workers."""
    n, kind = before
    dj.simulate(n, saves, tmp_path, kind)
    for workers in (1, 2, 3, 4):
        for other in range(workers - 1 if workers > 2 else 1):
            dj.simulate(workers, restores, tmp_path, other)


@pytest.mark.world(2, 4)
def test_over_mpi(tmp_path: Path) -> None:
    P = dj.Partition()
    path = Path(P.broadcast_data(str(tmp_path)))
    saves(path, 0, step=3)
    saves(path, 1, step=4)
    restores(path, 0)
    assert checkpoint.steps(path) == [3, 4]
    wrong = jnp.ones(3 if P.rank == 1 else 2)
    refused(
        lambda: checkpoint.save(path, wrong, TensorSpec((2 * P.size,), P), step=5),
        r"`tree` has shape \(3,\), but its spec",
    )
    with disk_used(Absent() if P.rank == 1 else Disk()):
        refused(lambda: saves(path, 0, step=6), ", which is being written, is not", dj.CheckpointError)
    assert checkpoint.latest_step(path) == 4
    whole, rows, columns = np.arange(35.0).reshape(5, 7), P.grid([P.size, 1]), P.grid([1, P.size])
    for times in (2, 1):  # the second file takes the place of the first
        checkpoint.export(path / "x", times * cut(whole, TensorSpec((5, 7), columns)), TensorSpec((5, 7), columns))
    got = checkpoint.import_(path / "x", TensorSpec((5, 7), rows))
    np.testing.assert_array_equal(got, cut(whole, TensorSpec((5, 7), rows)))
    if P.rank == 0:  # which takes away what was begun; the others need not wait for that
        assert not [name for name in os.listdir(path) if name.startswith(".")]


class Absent(Disk):
    """A machine that does not see what others have made."""

    def create(self, path: str) -> int:
        raise FileNotFoundError(2, "No such file or directory", path)


def test_a_replaced_step(tmp_path: Path) -> None:
    """The newer one counts; the older is gone, and so is what a killed job had left of that step."""

    def program() -> None:
        P = dj.Partition()
        spec = TensorSpec((4,), P)
        checkpoint.save(tmp_path, jnp.zeros(2), spec, step=4)
        for value in (1.0, 2.0, 3.0):
            checkpoint.save(tmp_path, jnp.full(2, value), spec, step=5)
            assert checkpoint.restore(tmp_path, spec).tolist() == [value] * 2

    (tmp_path / ".step-0000000005.abc").mkdir()
    (tmp_path / ".step-0000000006.abc").mkdir()
    dj.simulate(2, program)
    assert sorted(os.listdir(tmp_path)) == [".step-0000000006.abc", "step-0000000004", "step-0000000005.2"]


@pytest.mark.simulated(2)
def test_steps_and_latest(tmp_path: Path) -> None:
    path, spec = tmp_path / "deep" / "er", TensorSpec((), dj.Partition(), replicated=True)
    assert checkpoint.latest_step(tmp_path / "none") is None
    for step in (9, 12345678901, 20):
        checkpoint.save(path, step, spec, step=step)
    assert checkpoint.latest_step(path) == int(checkpoint.restore(path, spec)) == 12345678901
    assert int(checkpoint.restore(path, spec, step=9)) == 9
    refused(
        lambda: checkpoint.restore(path, spec, step=10),
        r"`step` \(=10\) is not a step with a checkpoint in .*: 9, 20, 12345678901\.",
        dj.InvalidArgumentError,
    )
    assert checkpoint.steps(path) == [9, 20, 12345678901]


@pytest.mark.simulated(3)
def test_each_worker_writes_its_own_blocks_once(tmp_path: Path) -> None:
    """Plain safetensors reads a worker's file; copies are in one of them; who holds nothing writes no file."""
    safetensors = pytest.importorskip("safetensors.numpy")
    P = dj.Partition()
    its = {"cut": TensorSpec((5,), P.grid([2], [0, 2])), "copied": TensorSpec((2,), P, replicated=True)}
    mine = {0: jnp.arange(3.0), 2: jnp.arange(3.0, 5.0)}.get(P.rank, jnp.zeros(0))
    checkpoint.save(tmp_path, {"cut": mine, "copied": jnp.ones(2)}, its)
    folder = tmp_path / "step-0000000000"
    assert sorted(os.listdir(folder)) == ["manifest.json", "worker-00000.safetensors", "worker-00002.safetensors"]
    found = safetensors.load_file(folder / "worker-00000.safetensors")
    assert {name: value.tolist() for name, value in found.items() if name != "distdl_jax.crc32"} == {
        "['cut']": [0, 1, 2],
        "['copied']": [1, 1],
    }
    assert safetensors.load_file(folder / "worker-00002.safetensors")["['cut']"].tolist() == [3, 4]
    manifest = json.loads((folder / "manifest.json").read_text())["checkpoint"]
    for leaf in manifest["leaves"]:
        for block in leaf["blocks"]:
            content = (folder / block["file"]).read_bytes()
            values = content[block["offset"] :][: 8 * np.prod([stop - start for start, stop in block["box"]])]
            sums = content[block["checksums"]["offset"] :][:4]
            assert zlib.crc32(values) == int.from_bytes(sums, "little") and len(values) < block["chunk"]
            assert zlib.crc32(sums) == block["checksums"]["crc32"]


@pytest.mark.parametrize("chunk", [7, 64])
def test_checksums_of_several_chunks(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of many chunks and pieces, cut across them, and read in long runs and in short ones."""
    monkeypatch.setattr("distdl_jax.checkpoint.writing.chunk_of", lambda shape, itemsize: chunk)
    monkeypatch.setattr("distdl_jax.checkpoint.writing.PIECE", 3 * chunk)
    monkeypatch.setattr("distdl_jax.checkpoint.writing.UNSYNCED", 100)
    monkeypatch.setattr("distdl_jax.partitions.formats.boxes_in_files.RUN", 20)
    monkeypatch.setattr("distdl_jax.partitions.formats.boxes_in_files.SLAB", 90)
    monkeypatch.setattr("distdl_jax.partitions.formats.boxes_in_files.ROW", 30)
    whole = np.random.default_rng(0).standard_normal((13, 11))

    def program(shape: list[int]) -> None:
        P = dj.Partition()
        spec = TensorSpec((13, 11), P.grid(shape, [*range(P.size)]))
        mine = whole[tuple(slice(start, stop) for start, stop in spec.box)]
        if not checkpoint.steps(tmp_path):
            checkpoint.save(tmp_path, mine, spec)
        np.testing.assert_array_equal(checkpoint.restore(tmp_path, spec), mine)

    for shape in ([2, 1], [1, 3], [1, 4], [2, 2], [1, 11]):
        dj.simulate(shape[0] * shape[1], program, shape)


def test_placeholders_come_back(tmp_path: Path) -> None:
    """Those of parameters in a stack, for `lax.scan`, say; by another number of workers, or where the spec knows."""

    def program() -> list[tuple[int, ...]]:
        P = dj.Partition()
        spec = TensorSpec((3, 2), P.grid([1, 1]))
        its = {"w": spec, "key": TensorSpec((3,), P.grid([1]))}
        if P.size == 2:
            keys = jax.random.split(jax.random.key(1), 3)
            mine = {"w": jnp.ones((3, 2)), "key": keys} if P.rank == 0 else {"w": jnp.ones((3, 0)), "key": keys[:0]}
            checkpoint.save(tmp_path, mine, its)
        got = checkpoint.restore(tmp_path, its)
        known = checkpoint.restore(tmp_path, its | {"w": spec.with_placeholders({1: (7, 0)})})
        return [got["w"].shape, got["key"].shape, known["w"].shape]

    assert dj.simulate(2, program) == [[(3, 2), (3,), (3, 2)], [(3, 0), (0,), (7, 0)]]
    assert dj.simulate(3, program) == [[(3, 2), (3,), (3, 2)], [(0,), (0,), (7, 0)], [(0,), (0,), (0,)]]


@pytest.mark.simulated(2)
def test_save_refuses_wrong_arguments(tmp_path: Path) -> None:
    P = dj.Partition()
    spec, one, last = TensorSpec((2,), P), jnp.ones(1), P.rank == 1
    every, half = TensorSpec((), P, replicated=True), jnp.ones(1, "int32" if last else "float32")
    for arguments, sentence in (
        ((tmp_path, ["text"], [spec]), r"`tree\[0\]` \(='text'\) must be an array"),
        ((tmp_path, jnp.ones(1, "int4"), spec), "with a dtype that"),
        ((tmp_path, {}, {}), r"`specs` \(=\{\}\) must have at least one TensorSpec"),
        ((tmp_path, {"a": one}, {"b": spec}), "`specs` must have the structure of `tree`"),
        ((tmp_path, one, spec, -1), r"`step` \(=-1\) must be 0 or more"),
        ((3.5, one, spec), r"`path` \(=3.5\) must be the path of a folder"),
        (("", one, spec), r"`path` \(=''\) must name a folder"),
        ((tmp_path, one, spec, P.rank), "All workers must have the same `step`, but"),
        ((tmp_path / str(P.rank), one, spec), "All workers must have the same `path`"),
        ((tmp_path, half, spec), "one dtype on all .* part of it, but is float32 on worker 0 and int32 on worker 1"),
        (
            (tmp_path, {"a": one} | ({} if last else {"b": one}), spec),
            r"`tree\['b'\]` is of the spec .* on worker 0 and missing from `tree` on worker 1",
        ),
        (
            (tmp_path, jnp.ones(1 + last), TensorSpec((2,), P, replicated=last)),
            "must have the same leaves with the same specs on all workers",
        ),
        ((tmp_path, 2**70, every), "must be an array of num"),
    ):
        refused(lambda its=arguments: checkpoint.save(*its), sentence)  # type: ignore[misc]
    refused(lambda: jax.jit(lambda x: checkpoint.save(tmp_path, x, spec))(one), "is traced: a checkpoint can't be")
    assert os.listdir(tmp_path) == []


@pytest.mark.simulated(2)
def test_restore_refuses_wrong_arguments(tmp_path: Path) -> None:
    P = dj.Partition()
    spec = TensorSpec((2,), P)
    checkpoint.save(tmp_path, {"a": jnp.ones(1), "b": [jnp.ones(1)] * 2}, spec)

    def restore(its: Any) -> Any:
        return checkpoint.restore(tmp_path, its)

    refused(lambda: restore({"a": spec}), r"also holds tree\['b'\]\[0\], tree\['b'\]\[1\], for which `specs` has no")
    refused(lambda: restore({"a": spec, "b": [spec] * 3}), r"`specs\['b'\]\[2\]` has no leaf .* It holds tree\['a'\]")
    refused(lambda: restore({"a": spec, "b": spec}), r"`specs\['b'\]` is one spec, but 2 leaves were saved below it")
    wrong = TensorSpec((3,), P)
    refused(lambda: restore({"a": wrong, "b": None}), r"`specs\['a'\]` has the global shape \(3,\), but .* \(2,\)")
    refused(lambda: restore({"a": "x"}), r"`specs\['a'\]` \(='x'\) must be a TensorSpec, or None")
    refused(lambda: checkpoint.restore(tmp_path / "no", spec), "no has no complete checkpoint")
    refused(lambda: checkpoint.restore(tmp_path / str(P.rank), spec), "All workers must have the same `path`")
    refused(lambda: checkpoint.restore(tmp_path, spec, step=P.rank), "All workers must have the same `step`")
    assert restore({"a": spec, "b": None}) == {"a": jnp.ones(1), "b": None}


def test_no_worker_holds_more_than_its_block(tmp_path: Path) -> None:
    """32 MiB on four workers, written by rows and read by columns: a block and a few MiB on each at any time. What is
    saved was there before; a Manager copies it."""
    n = 2048
    mine: dict[int, Any] = {}

    def spec(shape: list[int]) -> TensorSpec:
        return TensorSpec((n, n), dj.Partition().grid(shape))

    def begin() -> None:
        rows = jnp.arange(*spec([4, 1]).box[0], dtype=float)
        mine[dj.Partition().rank] = jnp.broadcast_to(rows[:, None], spec([4, 1]).local_shape).block_until_ready()

    def save() -> None:
        checkpoint.save(tmp_path / "run", mine[dj.Partition().rank], spec([4, 1]))

    def save_in_a_thread() -> None:
        with checkpoint.Manager(tmp_path / "run 2") as manager:
            manager.save(mine[dj.Partition().rank], spec([4, 1]), 1)

    def export() -> None:
        checkpoint.export(tmp_path / "all", {"x": mine[dj.Partition().rank]}, {"x": spec([4, 1])})

    def restore() -> None:
        got = checkpoint.restore(tmp_path / "run", spec([1, 4]))
        dj.Partition().allgather_data(None)  # all hold theirs
        assert got[:, 5].tolist() == list(range(n))

    def import_() -> None:
        got = checkpoint.import_(tmp_path / "all", {"x": spec([1, 4])})["x"]
        dj.Partition().allgather_data(None)
        assert got[:, 5].tolist() == list(range(n))

    dj.simulate(4, begin)
    blocks = 8 * n * n / 2**20
    for action, most in (
        *((save, 4), (save_in_a_thread, blocks + 4), (export, 4)),
        *((restore, blocks + 4 * 6), (import_, blocks + 4 * 6)),
    ):
        tracemalloc.start()
        dj.simulate(4, action)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        assert peak < most, action
        assert peak > blocks / 4 or most < blocks  # what numpy holds is seen: of one worker at least, at any time


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    refused(lambda: dj.simulate(2, saves, tmp_path, 0), "Permission denied", dj.CheckpointError)


def test_no_folder_can_be_made_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(lambda: dj.simulate(2, saves, tmp_path / "file", 0), "could not|Not a directory", OSError)
