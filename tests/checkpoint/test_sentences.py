"""What the file system refuses, and what is no path or no checkpoint: a sentence on every worker, and nothing left."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.recorded_disk import FailingDisk, Killed, KilledDisk, disk_used

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.checkpoint.disk import Disk, remove_folder
from distdl_jax.partitions.formats import plain_files
from distdl_jax.partitions.formats.plain_files import open_to_read


def spec() -> TensorSpec:
    return TensorSpec((6,), dj.Partition())


def block() -> np.ndarray[Any, Any]:
    (box,) = spec().box or ()
    return np.arange(6.0)[slice(*box)]


CALLS: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: checkpoint.save(path, block(), spec()),
    "export": lambda path: checkpoint.export(path, block(), spec()),
    "restore": lambda path: checkpoint.restore(path, spec()),
    "import_": lambda path: checkpoint.import_(path, spec()),
    "steps": checkpoint.steps,
}


def raised(call: Callable[[], Any]) -> tuple[type, str]:
    """What a call raises: the same on all workers, but that the others name the worker that failed."""
    with pytest.raises(dj.DistDLError) as error:
        call()
    everyone = dj.Partition().allgather_data((type(error.value), str(error.value)))
    assert len(set(everyone)) == 1
    return max(everyone, key=lambda raised: len(raised[1]))


@pytest.mark.simulated(2)
@pytest.mark.parametrize("name", CALLS)
def test_invalid_paths_are_refused(name: str) -> None:
    """On one worker only, too."""
    for wrong in ("a\0b", "\udc00\ud800", b"a\0"):
        for path in (wrong, wrong if dj.Partition().rank == 1 else "fine"):
            kind, text = raised(lambda path=path: CALLS[name](path))  # type: ignore[misc]
            assert kind is dj.InvalidArgumentError and "must be a valid path, without NUL" in text
    kind, text = raised(lambda: CALLS[name](3.5 if dj.Partition().rank else "fine"))
    assert kind is dj.InvalidTypeError and text.startswith("On worker 1: `path` (=3.5)")
    assert not os.path.exists("fine")


@pytest.mark.parametrize("name", CALLS)
def test_a_relative_path_in_a_folder_that_is_gone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    sentence = "`path` (='run') is relative to the working folder, which has been removed."
    try:
        found = dj.simulate(2, lambda: raised(lambda: CALLS[name]("run")))
    finally:
        os.chdir(tmp_path)
    assert all(kind is dj.CheckpointError and text.endswith(sentence) for kind, text in found)


@pytest.mark.parametrize("name", ["save", "export"])
def test_a_file_that_gets_too_large(name: str, tmp_path: Path) -> None:
    """By the limit of the system; what there was of it is removed."""

    def program() -> None:
        P = dj.Partition()
        large = TensorSpec((2**17,), P, replicated=False)
        call = checkpoint.save if name == "save" else checkpoint.export
        kind, text = raised(lambda: call(tmp_path / "out", jnp.ones(2**16), large))
        assert kind is dj.CheckpointError
        assert f"On worker 0: File too large (errno 27): {tmp_path}" in text
        assert ("worker-00000.safetensors" if name == "save" else ".out.") in text

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, before[1]))
    try:
        dj.simulate(2, program)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = [name for _, folders, files in os.walk(tmp_path) for name in [*folders, *files]]
    assert left in ([], ["out"])


@pytest.mark.simulated(2)
@pytest.mark.parametrize("kind", ["write", "sync", "close", "replace"])
def test_a_full_disk(kind: str, tmp_path: Path) -> None:
    """An export names the file, its folder and the worker, whichever operation it is that fails."""
    failing = FailingDisk(1, kind)
    with disk_used(failing if dj.Partition().rank == 1 or kind == "replace" else Disk()):
        _, text = raised(lambda: CALLS["export"](tmp_path / "out"))
    worker = 0 if kind == "replace" else 1
    assert f"On worker {worker}: No space left on device (errno 28): {tmp_path}/" in text, text


def test_a_file_with_the_name_of_a_step(tmp_path: Path) -> None:
    """It is no checkpoint, and in nobody's way."""
    for name in ("step-0000000000", "step-0000000005", ".step-0000000000.ab"):
        (tmp_path / name).write_text("mine")

    def program() -> None:
        _, text = raised(lambda: CALLS["restore"](tmp_path))
        assert text == f"{tmp_path} has no complete checkpoint."
        kind, text = raised(lambda: checkpoint.restore(tmp_path / "step-0000000005", spec()))
        assert kind is dj.CheckpointError and "Not a directory" in text
        CALLS["save"](tmp_path)
        assert checkpoint.steps(tmp_path) == [0]
        assert CALLS["restore"](tmp_path).tolist() == block().tolist()
        with checkpoint.Manager(tmp_path, keep=1) as manager:
            manager.save(block(), spec(), 5)
            manager.save(block(), spec(), 6)
        assert checkpoint.steps(tmp_path) == [6]

    dj.simulate(2, program)
    assert (tmp_path / "step-0000000000").read_text() == (tmp_path / "step-0000000005").read_text() == "mine"


@pytest.mark.parametrize("when", ["before its manifest is read", "after", "when a file is opened"])
def test_a_checkpoint_that_is_removed_while_it_is_read(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens(path: str, **kwargs: Any) -> int:
        if when == "when a file is opened" and path.endswith("manifest.json"):
            return open_to_read(path, **kwargs)
        if when == "after":
            descriptor = open_to_read(path, **kwargs)
            remove_folder(Disk(), str(tmp_path), "step-0000000000")
            return descriptor
        remove_folder(Disk(), str(tmp_path), "step-0000000000")
        return open_to_read(path, **kwargs)

    def program() -> None:
        CALLS["save"](tmp_path)
        with monkeypatch.context() as patch:
            dj.Partition().allgather_data(None)
            patch.setattr(plain_files, "open_to_read", opens)
            kind, text = raised(lambda: CALLS["restore"](tmp_path))
            dj.Partition().allgather_data(None)
        assert kind is dj.CheckpointError
        assert "step-0000000000, which worker 0 has found, is not there on" in text and "was removed while" in text

    dj.simulate(2, program)


def test_leftovers_of_a_killed_export_are_removed(tmp_path: Path) -> None:
    """The next export to the same file removes it, and nothing else."""
    others = [".out.txt", ".out", ".other.0123abcd", ".out.0123abcd.mine"]
    for name in others:
        (tmp_path / name).write_text("mine")
    left = 0

    def program() -> None:
        nonlocal left
        for at in range(1, 9):
            its = KilledDisk(at)
            with disk_used(its):
                try:
                    CALLS["export"](tmp_path / "out")
                except Killed:
                    left += len({*os.listdir(tmp_path)} - {*others, "out"})
            CALLS["export"](tmp_path / "out")
            assert sorted(os.listdir(tmp_path)) == sorted([*others, "out"])
            assert CALLS["import_"](tmp_path / "out").tolist() == block().tolist()

    dj.simulate(1, program)
    assert left >= 5
