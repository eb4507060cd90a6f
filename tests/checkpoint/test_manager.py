"""Checkpoints that are written in a thread: training goes on, errors reach all workers, and old ones go."""

import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.recorded_disk import FailingDisk, disk_used
from jobs import run, run_alone
from launcher.settings import long_run

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.checkpoint.disk import Disk
from distdl_jax.checkpoint.manager import _Writer


class SlowDisk(Disk):
    """Its syncs wait until they may go on; how many go on at once is counted."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.threads: set[int] = set()

    def sync(self, descriptor: int) -> None:
        self.threads.add(threading.get_ident())
        assert self.may_go_on.wait(60)
        super().sync(descriptor)


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is what was there when save was called, though the array is donated right after it; a second save
    returns when the first checkpoint is complete, and not before. A disk that stands still is no work that goes on: its
    worker comes to no meeting, so that the clock of those who wait goes on."""
    slow, pauses, own_part = SlowDisk(), [], _Writer.own_part
    monkeypatch.setattr("distdl_jax.checkpoint.manager.LOOKS_EVERY", 0.001)
    monkeypatch.setattr(_Writer, "own_part", lambda self, pause: own_part(self, lambda: pauses.append(self) or pause()))

    def program() -> None:
        P = dj.Partition()
        spec = TensorSpec((4,), P)
        add = jax.jit(lambda x: x + 1, donate_argnums=0)
        x = jnp.arange(2.0) + 2 * P.rank
        with disk_used(slow), checkpoint.Manager(tmp_path) as manager:
            manager.save(x, spec, step=1)
            for _ in range(5):
                x = add(x)
            assert checkpoint.latest_step(tmp_path) is None
            assert np.asarray(x).tolist() == [5 + 2 * P.rank, 6 + 2 * P.rank]
            P.allgather_data(None)
            if P.rank == 0:
                threading.Timer(0.2, slow.may_go_on.set).start()
            manager.save(x, spec, step=2)
            assert slow.may_go_on.is_set() and 1 in checkpoint.steps(tmp_path)
        assert checkpoint.steps(tmp_path) == [1, 2]
        assert checkpoint.restore(tmp_path, spec, 1).tolist() == [2 * P.rank, 2 * P.rank + 1]

    dj.simulate(2, program)
    assert threading.get_ident() not in slow.threads and len(slow.threads) >= 2
    assert len(pauses) <= 4 * 5  # as many as there are pieces at most, though there were hundreds of looks


@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [(2, None, [50, 60]), (1, 20, [20, 40, 60]), (None, None, [10, 20, 30, 40, 50, 60]), (2, 30, [30, 50, 60])],
)
def test_manager_keeps_the_last_steps(
    keep: int | None, keep_every: int | None, kept: list[int], tmp_path: Path
) -> None:
    """And nothing else is in the folder; not what a killed job left, either."""
    (tmp_path / ".step-0000000007.ab").mkdir()

    def program() -> list[int]:
        spec = TensorSpec((), dj.Partition(), replicated=True)
        with checkpoint.Manager(tmp_path, keep, keep_every) as manager:
            assert manager.latest_step() is None
            for step in range(10, 70, 10):
                manager.save(step, spec, step)
            assert int(manager.restore(spec)) == 60
            return manager.steps()

    assert dj.simulate(2, program) == [kept, kept]
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:010d}" for step in kept]


def value_spec() -> TensorSpec:
    return TensorSpec((), dj.Partition(), replicated=True)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("keep", [3, None])
def test_a_new_run_in_the_folder_of_an_old_one(keep: int | None, tmp_path: Path) -> None:
    """Its first save is refused on all workers, whatever is kept, and nothing is lost; so is one that goes back."""
    with checkpoint.Manager(tmp_path, keep=None) as old:
        for step in (100, 200, 300):
            old.save(step, value_spec(), step)
        with pytest.raises(dj.InvalidArgumentError, match=r"`step` \(=150\) must not .* in .*, 300: this"):
            old.save(150, value_spec(), 150)
    for restored in (False, True):
        with checkpoint.Manager(tmp_path, keep) as new:
            if restored:  # but counts from 0 again
                assert int(new.restore(value_spec())) == 300
            with pytest.raises(dj.InvalidArgumentError, match=r"`step` \(=1\) must not .* another folder for"):
                new.save(1, value_spec(), 1)
            assert new.steps() == [100, 200, 300]
            new.save(300, value_spec(), 300)
    assert sorted(os.listdir(tmp_path)) == ["step-0000000100", "step-0000000200", "step-0000000300.2"]


def folders(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.mark.simulated(2)
def test_a_manager_that_never_went_back_sets_nothing_aside(tmp_path: Path) -> None:
    """Neither before its first checkpoint nor after it, when another job saves a higher step in its folder."""
    with checkpoint.Manager(tmp_path) as manager, checkpoint.Manager(tmp_path) as another_job:
        another_job.save(40, value_spec(), 40)
        another_job.wait()
        with pytest.raises(dj.InvalidArgumentError, match=r"`step` \(=20\) must not be below .*, 40: this"):
            manager.save(20, value_spec(), 20)
        manager.save(50, value_spec(), 50)
        manager.wait()
        another_job.save(90, value_spec(), 90)
        another_job.wait()
        before = folders(tmp_path)
        for step in (60, 50):
            with pytest.raises(dj.InvalidArgumentError, match=rf"`step` \(={step}\) .* below 90, .*another job saves"):
                manager.save(step, value_spec(), step)
        assert folders(tmp_path) == before and manager.steps() == [40, 50, 90]
        manager.save(100, value_spec(), 100)
        assert manager.steps() == [50, 90, 100]


@pytest.mark.simulated(2)
@pytest.mark.parametrize("when", ["after the restore", "after a save", "with the names of earlier ones"])
def test_going_back_sets_nothing_aside_that_came_later(when: str, tmp_path: Path) -> None:
    """Only what was there when the manager went back; another job's steps that were completed since are refused."""
    with checkpoint.Manager(tmp_path, keep=None) as manager, checkpoint.Manager(tmp_path, keep=None) as another_job:
        for step in (10, 20, 30, 40):
            manager.save(step, value_spec(), step)
        assert int(manager.restore(value_spec(), 10)) == 10
        if when == "after a save":
            for step in (20, 30):
                manager.save(-step, value_spec(), step)
            manager.wait()
        another_job.restore(value_spec(), 10 if when == "with the names of earlier ones" else None)
        for step in (20, 30, 40) if when == "with the names of earlier ones" else (45, 50):
            another_job.save(100 * step, value_spec(), step)
        another_job.wait()
        before = folders(tmp_path)
        highest = manager.latest_step()
        for step in (35, 37):
            with pytest.raises(dj.InvalidArgumentError, match=rf"`step` \(={step}\) .* below {highest}, .*another job"):
                manager.save(step, value_spec(), step)
        assert folders(tmp_path) == before and int(manager.restore(value_spec())) == 100 * highest
        assert int(manager.restore(value_spec(), 30)) in (30, -30, 3000)  # the user knows what is there, and goes back
        manager.save(36, value_spec(), 36)
        assert manager.latest_step() == 36


def test_continuing_from_an_earlier_step(tmp_path: Path) -> None:
    """What was saved after it is kept under other names, and the new run's steps count; in the same job or another."""

    def program() -> list[list[int]]:
        seen = []
        with checkpoint.Manager(tmp_path, keep=3) as manager:
            for step in range(10, 15):
                manager.save(step, value_spec(), step)
            assert int(manager.restore(value_spec(), 12)) == 12 and manager.steps() == [12, 13, 14]
            manager.save(15, value_spec(), 15)  # it has only looked at an earlier one
            seen.append(manager.steps())
            manager.restore(value_spec(), 13)
            manager.save(-14, value_spec(), 14)
            seen.append(manager.steps())
        with checkpoint.Manager(tmp_path, keep=3) as manager:
            manager.restore(value_spec(), 13)
            assert checkpoint.latest_step(tmp_path) == 14
            for step in (13, 14, 15, 16):
                manager.save(100 * step, value_spec(), step)
                assert int(manager.restore(value_spec())) == 100 * step
            return [*seen, manager.steps()]

    assert dj.simulate(2, program)[1] == [[13, 14, 15], [13, 14], [14, 15, 16]]
    aside = [name for name in os.listdir(tmp_path) if "abandoned" in name]
    assert sorted(name.split(".")[0] for name in aside) == ["step-0000000014", "step-0000000015"]
    (tmp_path / "again").mkdir()
    for name in aside:
        (tmp_path / name).rename(tmp_path / "again" / name.split(".")[0])
    assert dj.simulate(1, lambda: [int(checkpoint.restore(tmp_path / "again", value_spec(), n)) for n in (14, 15)]) == [
        [-14, 15]
    ]


@pytest.mark.simulated(2)
@pytest.mark.parametrize(
    ("how", "fails_at"), [("save", 1), ("wait", 2), ("close", 3), ("wait", 4), ("close", 7), ("save", 9)]
)
def test_an_error_in_the_thread_reaches_all_workers(how: str, fails_at: int, tmp_path: Path) -> None:
    """Of one worker's disk; the checkpoint before is there, and the next one can be saved."""
    P = dj.Partition()
    spec = TensorSpec((4,), P)
    manager = checkpoint.Manager(tmp_path)
    manager.save(np.full(2, 1.0), spec, step=1)
    manager.wait()
    with disk_used(FailingDisk(fails_at) if P.rank == 1 else Disk()):
        manager.save(np.full(2, 2.0), spec, step=2)
    calls = {"save": lambda: manager.save(np.full(2, 3.0), spec, step=3), "wait": manager.wait, "close": manager.close}
    with pytest.raises(dj.CheckpointError, match=r"of step 2 could not be saved.* On worker 1: No space left"):
        calls[how]()
    assert checkpoint.restore(tmp_path, spec).tolist() == [1, 1]
    if how != "close":
        calls["save"]()
        assert manager.restore(spec).tolist() == [3, 3]
        manager.close()
    with pytest.raises(dj.InvalidArgumentError, match="This Manager is closed"):
        calls["save"]()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_an_exception_in_the_program_waits_for_no_worker(tmp_path: Path) -> None:
    """The `with` of the one worker that raises does not wait for others that don't come."""

    def program() -> None:
        P = dj.Partition()
        with checkpoint.Manager(tmp_path) as manager:
            manager.save(jnp.ones(2), TensorSpec((4,), P), step=1)
            if P.rank == 0:
                raise KeyError("mine")
            P.allgather_data(None)

    with pytest.raises(KeyError, match="mine"):
        dj.simulate(2, program)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"keep": 0}, r"`keep` \(=0\) must be 1 or more"),
        ({"keep_every": 2.5}, r"`keep_every` \(=2.5\) must be an integer"),
    ],
)
def test_wrong_arguments(arguments: dict, sentence: str) -> None:
    with pytest.raises(dj.DistDLError, match=sentence):
        checkpoint.Manager("somewhere", **arguments)


ENDS_WITHOUT_CLOSING = """
import sys, time
import numpy as np
import distdl_jax as dj
from distdl_jax.checkpoint.disk import Disk, disk

class Slow(Disk):
    def sync(self, descriptor):
        time.sleep(0.3)
        if sys.argv[2] == "fails":
            raise OSError(28, "No space left on device")
        super().sync(descriptor)

P = dj.Partition()
disk.set(Slow())
manager = dj.checkpoint.Manager(sys.argv[1])
manager.save(np.ones(3), dj.TensorSpec((3 * P.size,), P), step=1)
"""


def starts() -> list:
    return [run_alone, lambda *arguments: run(2, *arguments)] if long_run() else [run_alone]


@pytest.mark.parametrize("start", starts())
@pytest.mark.parametrize("how", ["well", "fails"])
def test_the_end_of_the_program_waits(start, how: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """And where the last checkpoint can't be written, it does not end with status 0."""
    (tmp_path / "program.py").write_text(ENDS_WITHOUT_CLOSING)
    status, output = start(tmp_path / "program.py", tmp_path / "run", how)
    if how == "well":
        assert status == 0, output
        assert (tmp_path / "run" / "step-0000000001" / "manifest.json").exists()
    else:
        assert status != 0
        assert "The checkpoint of step 1 could not be saved" in output, output
