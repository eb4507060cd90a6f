"""Work that takes long: who is done meets the others from time to time, so that no clock takes it for a hang."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoint.recorded_disk import FailingDisk

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.checkpoint import agreement, manager
from distdl_jax.checkpoint.agreement import together
from distdl_jax.checkpoint.disk import Disk, disk
from distdl_jax.settings import Settings, TimeLimits


@pytest.fixture
def at_every_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LONGEST", -1.0)
    monkeypatch.setattr(agreement, "PART_OF_LIMIT", 0.0)


@pytest.mark.usefixtures("at_every_pause")
def test_no_worker_waits_for_more_than_a_piece() -> None:
    """Worker r has 3 r pieces; each of the busy ones goes on only when all have met, those that are done too."""
    done = [0, 0, 0]

    def program() -> Any:
        rank = dj.Partition().rank

        def work(pause: Any) -> int:
            for piece in range(3 * rank):
                done[rank] = piece + 1
                pause()
                assert all(done[other] >= min(piece + 1, 3 * other) for other in range(3))
            return rank

        return together(dj.Partition().world, "some work", work, lambda told: sorted(told.items()))

    assert dj.simulate(3, program) == [[(0, 0), (1, 1), (2, 2)]] * 3
    assert done == [0, 3, 6]


@pytest.mark.parametrize(("limit", "meetings"), [(16.0, 11), (80.0, 3), (0.0, 1)])
def test_a_worker_that_is_done_waits_for_a_part_of_the_limit(
    limit: float, meetings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an eighth, and for a minute at most: ten pieces of three seconds each, and the end."""
    seconds, met = [0.0], []
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(agreement, "current_settings", lambda: Settings(timeout=TimeLimits(limit, limit)))

    def work(pause: Any) -> None:
        for _ in range(10):
            seconds[0] += 3
            pause()

    agree = agreement.agree

    def counted(*args: Any) -> Any:
        met.append(seconds[0])
        return agree(*args)

    monkeypatch.setattr(agreement, "agree", counted)
    dj.simulate(1, lambda: together(dj.Partition().world, "some work", work))
    assert len(met) == meetings


@pytest.mark.usefixtures("at_every_pause")
@pytest.mark.parametrize("fails", [0, 2])
def test_a_failure_ends_the_work_of_all(fails: int) -> None:
    """At the next meeting, and not when they are done, which they never are."""

    def program() -> None:
        rank = dj.Partition().rank

        def work(pause: Any) -> None:
            for piece in range(5) if rank == fails else iter(int, 1):
                if piece == 4:
                    raise OSError(28, "No space left on device")
                pause()

        where = f"On worker {fails}: "
        with pytest.raises(dj.CheckpointError, match=f"^{where}No space left on device"):
            together(dj.Partition().world, "some work", work)

    dj.simulate(3, program)


@pytest.mark.usefixtures("at_every_pause")
def test_work_that_catches_the_failure_of_another_worker() -> None:
    """It fails all the same: nobody else comes to the meeting at its end."""

    def program() -> None:
        rank = dj.Partition().rank

        def work(pause: Any) -> None:
            if rank == 1:
                raise OSError(28, "No space left on device")
            with contextlib.suppress(dj.CheckpointError):
                pause()

        with pytest.raises(dj.CheckpointError, match="No space left on device"):
            together(dj.Partition().world, "some work", work)

    dj.simulate(2, program)


@pytest.mark.usefixtures("at_every_pause")
def test_an_error_of_the_programs_own() -> None:
    """It goes on as it is where it was raised; elsewhere it is told of."""

    def program() -> None:
        rank = dj.Partition().rank

        def work(pause: Any) -> None:
            if rank == 1:
                raise KeyError("mine")

        with pytest.raises(KeyError if rank == 1 else dj.CheckpointError, match="mine"):
            together(dj.Partition().world, "some work", work)

    dj.simulate(2, program)


@pytest.mark.limit(20)
def test_a_worker_meets_the_others_while_its_thread_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not, while a disk stands still: the clock has to see that."""
    monkeypatch.setattr(manager, "LOOKS_EVERY", 0.001)
    writer: Any = SimpleNamespace(_own_part=threading.Event(), _pieces=0, _error=None)
    met = []

    def pause() -> None:
        met.append(writer._pieces)
        if len(met) < 4:
            writer._pieces += 1
        else:
            threading.Timer(0.05, writer._own_part.set).start()

    manager._Writer.own_part(writer, pause)
    assert met == [0, 1, 2, 3]


@pytest.mark.usefixtures("at_every_pause")
def test_save_and_restore_with_many_meetings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that may take long, in pieces of 64 bytes of which the workers have different numbers: three or more each."""
    met: list[Any] = []
    agree = agreement.agree
    monkeypatch.setattr(agreement, "agree", lambda *args: met.append(args) or agree(*args))
    for name in ("checkpoint.writing.PIECE", "partitions.formats.boxes_in_files.SLAB"):
        monkeypatch.setattr(f"distdl_jax.{name}", 64)
    monkeypatch.setattr("distdl_jax.checkpoint.writing.chunk_of", lambda shape, itemsize: 64)
    whole = np.arange(70.0).reshape(10, 7)

    def with_meetings(work: Callable[[], Any]) -> Any:
        before = dj.Partition().allgather_data(len(met))[0]
        result = work()
        assert max(dj.Partition().allgather_data(len(met))) >= before + 3 * 3
        return result

    def program() -> None:
        P = dj.Partition()
        spec = TensorSpec((10, 7), P.grid([3, 1]))
        mine = whole[slice(*spec.box[0])]
        with_meetings(lambda: checkpoint.save(tmp_path / "run", mine, spec))
        np.testing.assert_array_equal(with_meetings(lambda: checkpoint.restore(tmp_path / "run", spec)), mine)
        with checkpoint.Manager(tmp_path / "run") as manager:
            manager.save(mine, spec, 1)
            np.testing.assert_array_equal(manager.restore(spec), mine)
        with_meetings(lambda: checkpoint.export(tmp_path / "one", {"x": mine}, {"x": spec}))
        got = with_meetings(lambda: checkpoint.import_(tmp_path / "one", {"x": spec})["x"])
        np.testing.assert_array_equal(got, mine)
        token = disk.set(FailingDisk(9) if P.rank == 2 else Disk())
        where = "On worker 2: "
        with pytest.raises(dj.CheckpointError, match=f"earlier ones are unchanged. {where}No space left"):
            checkpoint.save(tmp_path / "run", mine, spec, 2)
        disk.reset(token)

    dj.simulate(3, program)


def test_a_worker_with_a_blocked_disk_comes_to_no_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Manager's thread that does not go on is no work that does: its worker comes to no meeting, so the clock of
    those who wait goes on."""
    monkeypatch.setattr("distdl_jax.checkpoint.manager.LOOKS_EVERY", 0.001)
    may_go_on = threading.Event()

    class Standing(Disk):
        def sync(self, descriptor: int) -> None:
            assert may_go_on.wait(60)

    pauses: list[int] = []

    def program() -> None:
        token = disk.set(Standing())
        manager = checkpoint.Manager(tmp_path)
        manager.save(np.ones(3), TensorSpec((3,), dj.Partition()), 1)
        disk.reset(token)
        threading.Timer(0.3, may_go_on.set).start()
        writer = manager._writer
        assert writer is not None
        writer.own_part(lambda: pauses.append(1))
        manager.close()

    dj.simulate(1, program)
    assert len(pauses) <= 5  # as many as there are pieces at most, though there were hundreds of looks
