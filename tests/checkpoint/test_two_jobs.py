"""Two jobs save into one folder: a requeued one begins while the one before is ending.

Every operation on files waits for its turn, and turns are drawn: so each seed is an interleaving of two jobs, which
repeats. The files of a folder are removed one by one. Some jobs are killed at an operation that is drawn as well.
"""

import os
import random
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from checkpoint.recorded_disk import FailingDisk, Killed, disk_used

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.checkpoint.disk import Disk, disk, remove_folder

SEEDS = 600
STEPS = 1, 2


class Turns:
    """Who is next, of some jobs: one is drawn when all of them wait at an operation, or are over."""

    def __init__(self, seed: int, jobs: int) -> None:
        self._draw = random.Random(seed)
        self._changed = threading.Condition()
        self._live, self._waiting, self._next = jobs, set[int](), -1

    def wait(self, job: int) -> None:
        with self._changed:
            self._waiting.add(job)
            self._choose()
            assert self._changed.wait_for(lambda: self._next == job, 60)
            self._next = -1

    def leave(self) -> None:
        with self._changed:
            self._live -= 1
            self._choose()

    def _choose(self) -> None:
        if self._waiting and len(self._waiting) == self._live:
            self._next = self._draw.choice(sorted(self._waiting))
            self._waiting.remove(self._next)
            self._changed.notify_all()


class TurnDisk(FailingDisk):
    """Waits for its job's turn before every operation that another job can see."""

    def __init__(self, turns: Turns, job: int, killed_at: int) -> None:
        super().__init__()
        self._turns, self._job, self._left = turns, job, killed_at

    def _next(self, kind: str, path: object = None) -> None:
        if kind in ("make_folder", "create", "rename", "remove"):
            self.turn()

    def turn(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise Killed
        self._turns.wait(self._job)

    def sync(self, descriptor: int) -> None:
        """Nothing: no machine stops here."""

    def sync_folder(self, path: str) -> None:
        self.turn()

    def remove_folder(self, path: str) -> None:
        with suppress(OSError):
            folder = os.open(path, os.O_RDONLY)
            for name in os.listdir(folder):
                self.turn()
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
            os.close(folder)
            self.turn()
            os.rmdir(path)


def saves(
    path: Path, its: TurnDisk, steps: list[int], value: float, managed: bool, seen: set[float] | None
) -> list[tuple[int, float, bool]]:
    """What a job of one worker has tried to save: the step, the value, and whether that was said to be saved. With
    `seen`, its manager goes back to step 1 before, and adds the values of the checkpoints that are there."""
    said = []
    spec = TensorSpec((3,), dj.Partition())
    disk.set(its)
    manager = checkpoint.Manager(path, keep=None) if managed else None
    if manager is not None and seen is not None:
        manager.restore(spec, 1)
        seen |= {float(checkpoint.restore(path, spec, step)[0]) for step in checkpoint.steps(path)}
    for n, step in enumerate(steps):
        its_value = value + n
        try:
            if manager is None:
                checkpoint.save(path, np.full(3, its_value), spec, step)
            else:
                manager.save(np.full(3, its_value), spec, step)
                manager.wait()
        except (dj.CheckpointError, dj.InvalidArgumentError):  # or the other job has saved a higher step
            said.append((step, its_value, False))
        except Killed:
            said.append((step, its_value, False))
            break
        else:
            said.append((step, its_value, True))
    return said


def two_jobs(path: Path, seed: int) -> tuple[list[tuple[int, float, bool]], set[float]]:
    """What the jobs have said, and the values that one of them may have set aside."""
    draw = random.Random(seed)
    turns = Turns(seed, 2)
    said: list[tuple[int, float, bool]] = []

    def job(number: int) -> None:
        managed = number == 1 and draw_managed
        try:
            back = seen if managed and goes_back else None
            (mine,) = dj.simulate(1, saves, path, disks[number], orders[number], 10.0 * (number + 1), managed, back)
            said.extend(mine)
        finally:
            turns.leave()

    draw_managed = draw.random() < 0.3
    orders = [[draw.choice(STEPS) for _ in range(2)] for _ in range(2)]
    ends = [draw.randrange(1, 40) if draw.random() < 0.4 and not (n == 1 and draw_managed) else 10**6 for n in range(2)]
    disks = [TurnDisk(turns, n, end) for n, end in enumerate(ends)]
    goes_back, seen = draw_managed and draw.random() < 0.7, set[float]()
    if goes_back:

        def before() -> None:
            for step in STEPS:
                checkpoint.save(path, np.full(3, float(step)), TensorSpec((3,), dj.Partition()), step)
                said.append((step, float(step), True))

        dj.simulate(1, before)
    threads = [threading.Thread(target=job, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return said, seen


@pytest.mark.parametrize("part", range(3))
def test_drawn_interleavings(part: int, tmp_path: Path) -> None:
    """A step that a save returned for is whole, and every step that is listed; the next job's Manager tidies up."""
    broken: list[str] = []

    def check(path: Path, said: list[tuple[int, float, bool]], seen: set[float], seed: int) -> None:
        spec = TensorSpec((3,), dj.Partition())
        steps = checkpoint.steps(path)
        aside = set()
        for name in [name for name in os.listdir(path) if "abandoned" in name]:
            step, other = int(name[5:15]), path / name.replace("step", "aside")
            other.mkdir()
            (path / name).rename(other / name.split(".")[0])
            if (value := float(checkpoint.restore(other, spec)[0])) not in seen:
                broken.append(f"seed {seed}: {value} of {step} was set aside")
            aside.add(step)
            asides.append(seed)
        if missing := {step for step, _, saved in said if saved} - {*steps} - aside:
            broken.append(f"seed {seed}: lacks {missing}")
        for step in steps:
            try:
                found = np.asarray(checkpoint.restore(path, spec, step)).tolist()
            except dj.CheckpointError as error:
                broken.append(f"seed {seed}: {error}")
            else:
                if not any(found == [value] * 3 for its_step, value, _ in said if its_step == step):
                    broken.append(f"seed {seed}: {found} of {step}")
        with checkpoint.Manager(path, keep=1) as manager:
            manager.save(np.zeros(3), spec, 9)
        if [name for name in os.listdir(path) if "abandoned" not in name] != ["step-0000000009"]:
            broken.append(f"seed {seed}: left {os.listdir(path)}")

    raised = saved = 0
    asides: list[int] = []
    for seed in range(part, SEEDS, 3):
        path = tmp_path / f"{seed}"
        said, seen = two_jobs(path, seed)
        dj.simulate(1, check, path, said, seen, seed)
        raised += sum(not is_saved for *_, is_saved in said)
        saved += sum(is_saved for *_, is_saved in said)
    assert not broken, f"{len(broken)}: {broken[:3]}"
    assert raised > 10 and saved > 50 and len(asides) > 5, (raised, saved, len(asides))


class TakenDisk(Disk):
    """Another job removes the folder once all that is in it is written."""

    def rename(self, path: str, to: str) -> None:
        super().rename(path, to)
        if to.endswith(".json"):
            remove_folder(Disk(), str(Path(to).parents[1]), Path(to).parent.name)


@pytest.mark.simulated(1)
@pytest.mark.parametrize("managed", [False, True])
def test_files_that_are_gone(managed: bool, tmp_path: Path) -> None:
    """`save` raises, or the next call of the Manager does."""
    spec = TensorSpec((3,), dj.Partition())
    with disk_used(TakenDisk()), pytest.raises(dj.CheckpointError, match="another job that saves"):
        if managed:
            manager = checkpoint.Manager(tmp_path)
            manager.save(np.zeros(3), spec, 1)
            manager.wait()
        else:
            checkpoint.save(tmp_path, np.zeros(3), spec, 1)
    assert checkpoint.steps(tmp_path) == []
