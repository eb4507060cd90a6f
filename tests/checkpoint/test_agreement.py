"""Work that takes long: who is done meets the others from time to time, so that no clock takes it for a hang."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoint.recorded_disk import FailingDisk, disk_used

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint
from distdl_jax.checkpoint import agreement, manager
from distdl_jax.checkpoint.agreement import together
from distdl_jax.checkpoint.disk import Disk
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


@pytest.mark.simulated(3)
@pytest.mark.usefixtures("at_every_pause")
@pytest.mark.parametrize("fails", [0, 2])
def test_a_failure_ends_the_work_of_all(fails: int) -> None:
    """At the next meeting, and not when they are done, which they never are."""
    rank = dj.Partition().rank

    def work(pause: Any) -> None:
        for piece in range(5) if rank == fails else iter(int, 1):
            if piece == 4:
                raise OSError(28, "No space left on device")
            pause()

    with pytest.raises(dj.CheckpointError, match=f"^On worker {fails}: No space left on device"):
        together(dj.Partition().world, "some work", work)


def fails(pause: Any) -> None:
    raise OSError(28, "No space left on device")


def fails_by_itself(pause: Any) -> None:
    raise KeyError("mine")


def suppresses(pause: Any) -> None:
    with contextlib.suppress(dj.CheckpointError):
        pause()


@pytest.mark.simulated(2)
@pytest.mark.usefixtures("at_every_pause")
@pytest.mark.parametrize(
    ("of_first", "of_second", "raised", "words"),
    [
        # it fails all the same: nobody else comes to the meeting at its end
        (suppresses, fails, dj.CheckpointError, "No space left on device"),
        # an error of the program's own goes on as it is where it was raised
        (lambda pause: None, fails_by_itself, KeyError, "mine"),
    ],
)
def test_work_that_fails_on_the_second_worker(of_first: Any, of_second: Any, raised: Any, words: str) -> None:
    rank = dj.Partition().rank
    with pytest.raises(raised if rank == 1 else dj.CheckpointError, match=words):
        together(dj.Partition().world, "some work", (of_first, of_second)[rank])


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
        failing = disk_used(FailingDisk(9) if P.rank == 2 else Disk())
        with failing, pytest.raises(dj.CheckpointError, match=r"earlier ones are unchanged\. On worker 2: No space"):
            checkpoint.save(tmp_path / "run", mine, spec, 2)

    dj.simulate(3, program)
