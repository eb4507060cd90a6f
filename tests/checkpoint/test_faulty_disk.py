"""At every operation on files: a disk that fails, and a machine that stops, leave the checkpoint before as it was."""

from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
from checkpoint.recorded_disk import (
    OPERATIONS,
    FailingDisk,
    Operation,
    RecordedDisk,
    ShortDisk,
    after_a_crash,
    disk_used,
)

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.checkpoint.disk import Disk, remove_folder

WHOLE = np.arange(6.0)


def spec() -> TensorSpec:
    return TensorSpec((6,), dj.Partition())


def saves(path: Path, value: float, step: int, its: Disk) -> None:
    with disk_used(its):
        checkpoint.save(path, WHOLE[slice(*spec().box[0])] + value, spec(), step)


def read(path: Path) -> list[float]:
    (got,) = dj.simulate(1, lambda: np.asarray(checkpoint.restore(path, spec())).tolist())
    return got


def plus(value: float) -> list[float]:
    return (WHOLE + value).tolist()


def test_short_writes(tmp_path: Path) -> None:
    dj.simulate(2, saves, tmp_path, 5.0, 0, ShortDisk())
    assert read(tmp_path) == plus(5)


@pytest.mark.parametrize("step", [1, 0])
def test_every_operation_that_fails(step: int, tmp_path: Path) -> None:
    """All workers raise the same, and can continue; the checkpoint before (or of the same step) is untouched."""
    # Of each kind the first fails, the second and so on: which worker comes first differs from save to save.
    disks = {(kind, n): FailingDisk(n, kind) for kind in OPERATIONS for n in range(1, 30)}
    failed: set[str] = set()
    never: set[str] = set()  # they fail no more

    def program() -> None:
        P = dj.Partition()
        saves(tmp_path, 0.0, 0, Disk())
        for n, ((kind, _), failing) in enumerate(disks.items(), 1):
            if kind in never:
                continue
            try:
                saves(tmp_path, 100.0 * n, step, failing)
            except dj.CheckpointError as error:
                text = str(error)
            else:
                text = ""
            texts = P.allgather_data(text)
            assert len(set(texts)) == 1, texts
            if not failing.failed:
                never.add(kind)
                before[P.rank] = n
                continue
            failed.add(kind)
            parts = P.allgather_data(np.asarray(checkpoint.restore(tmp_path, spec())).tolist())
            value = parts[0][0]
            assert [*chain(*parts)] == plus(value)
            # Once the new one has its name, what fails is said to have failed, unless it is tidying up.
            is_new = value == 100 * n
            assert is_new or value == 100 * before[0]
            before[P.rank] = n if is_new else before[P.rank]
            if text:
                assert "No space left on device (errno 28)" in text
                assert f": {tmp_path}" in text
                assert not is_new or failing.failed == "sync_folder"
            else:
                assert is_new and failing.failed in ("rename", "remove_folder")

    before = [0, 0]
    dj.simulate(2, program)
    assert failed == {*OPERATIONS} - {"open", "replace"}


@pytest.mark.parametrize("kept", ["synced", "names", "half"])
@pytest.mark.parametrize("second", [2, 1])
def test_a_crash_after_every_operation(second: int, kept: str, tmp_path: Path) -> None:
    """What a crash leaves is the checkpoint before or the new one, never a mixture; once save is over, the new one. One
    that is being removed is there as a whole, or no longer."""
    recorded = RecordedDisk()
    path = tmp_path / "run"
    path.mkdir()
    dj.simulate(2, saves, path, 1.0, 1, recorded)
    first = len(recorded.operations)
    dj.simulate(2, saves, path, 2.0, second, recorded)
    if second == 2:
        remove_folder(recorded, str(path), "step-0000000001")
    assert read(path) == plus(2)
    found = []

    def program() -> None:
        for n in range(first, len(recorded.operations) + 1):
            left = tmp_path / f"{n}"
            after_a_crash(recorded.operations[:n], path, left, kept)
            wholes = [np.asarray(checkpoint.restore(left, spec(), step)) for step in checkpoint.steps(left)]
            for whole in wholes:
                np.testing.assert_array_equal(whole, WHOLE + whole[0])
            found.append(wholes[-1][0])

    dj.simulate(1, program)
    assert found == sorted(found) and found[0] == 1 and found[-1] == 2


def number() -> TensorSpec:
    return TensorSpec((), dj.Partition(), replicated=True)


def goes_back(path: Path, step: int, value: int) -> None:
    with checkpoint.Manager(path, keep=None) as manager:
        manager.restore(number(), 10)
        manager.save(value, number(), step)


def kept_renames(operations: list[Operation], run: Path) -> Iterator[list[Operation]]:
    """The operations without some of the renames of checkpoints that are not on disk for sure: in every combination."""
    synced = max(
        (n for n, its in enumerate(operations) if its.kind == "sync_folder" and its.path == str(run)), default=0
    )
    unsure = [
        n
        for n, its in enumerate(operations)
        if n > synced and its.kind == "rename" and "/step-" in its.to[len(str(run)) :]
    ]
    for count in range(len(unsure) + 1):
        for lost in combinations(unsure, count):
            yield [its for n, its in enumerate(operations) if n not in lost]


@pytest.mark.parametrize("step", [15, 20])
def test_a_kill_and_a_crash_after_every_operation_of_a_run_that_goes_back(step: int, tmp_path: Path) -> None:
    """What is left of the abandoned steps is a beginning, and never above the new one; the next run goes back again."""
    recorded = RecordedDisk()
    path = tmp_path / "run"
    path.mkdir()
    states = set()

    def program() -> None:
        with disk_used(recorded):
            for old in (10, 20, 30, 40):
                checkpoint.save(path, old, number(), old)
            first = len(recorded.operations)
            goes_back(path, step, -1)
        crashes = [
            operations
            for n in range(first, len(recorded.operations) + 1)
            for operations in kept_renames(recorded.operations[:n], path)
        ]
        for n, operations in enumerate(crashes):
            for kept in ("synced", "names"):
                left = tmp_path / f"{n}-{kept}"
                after_a_crash(operations, path, left, kept)
                values = [int(checkpoint.restore(left, number(), its)) for its in checkpoint.steps(left)]
                states.add(tuple(values))
                goes_back(left, step, -2)
                assert [int(checkpoint.restore(left, number(), its)) for its in checkpoint.steps(left)] == [10, -2]

    dj.simulate(1, program)
    others = {(10,)} if step == 15 else set()
    assert states == {(10, 20, 30, 40), (10, 20, 30), (10, 20), (10, -1)} | others


def test_folders_above_are_there_for_good(tmp_path: Path) -> None:
    """Where a crash leaves what was synced and nothing else."""
    recorded = RecordedDisk()
    root = tmp_path / "root"
    root.mkdir()
    dj.simulate(2, saves, root / "deep" / "er", 1.0, 1, recorded)
    after_a_crash(recorded.operations, root, tmp_path / "left", "synced")
    assert read(tmp_path / "left" / "deep" / "er") == plus(1)
