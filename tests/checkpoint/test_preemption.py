"""A signal to one worker ends the training of all, after the same step."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import distdl_jax as dj
from distdl_jax.checkpoint import Preemption


def steps_until_stopped(preemption: Preemption, rank: int, tells: dict[int, int], how: Any, n: int = 10) -> int:
    """How many steps there were; worker `rank` is told in the step `tells[rank]`."""
    for step in range(n):
        if tells.get(rank) == step:
            how()
        if preemption.stop():
            assert rank or preemption.stop()  # which asks nobody any more
            return step
    return n


@pytest.mark.simulated(3)
@pytest.mark.parametrize(
    ("tells", "every", "expected"),
    [({}, 1, 10), ({1: 4}, 1, 4), ({0: 6, 2: 3}, 1, 3), ({2: 0}, 1, 0), ({1: 4}, 3, 5), ({0: 9}, 4, 10)],
)
def test_all_stop_after_the_same_step(tells: dict[int, int], every: int, expected: int) -> None:
    with Preemption(every=every) as preemption:
        assert steps_until_stopped(preemption, dj.Partition().rank, tells, preemption.request) == expected


@pytest.mark.simulated(3)
def test_of_some_workers() -> None:
    """Others need not call it."""
    P = dj.Partition().create_partition_inclusive([2, 0])
    if P.active:
        preemption = Preemption(P)
        assert steps_until_stopped(preemption, P.world.rank, {0: 2}, preemption.request) == 2


@pytest.mark.world(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_worker(number: signal.Signals) -> None:
    """And afterwards signals do what they did before."""
    P = dj.Partition()
    before = signal.getsignal(number)

    def tell() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.01)

    with Preemption() as preemption:
        assert signal.getsignal(number) != before
        assert steps_until_stopped(preemption, P.rank, {1: 3}, tell) == 3
    assert signal.getsignal(number) == before


def test_a_forked_process_ends_by_it(tmp_path: Path) -> None:
    """It is no worker: it must not live on because the job would have saved first."""
    with Preemption() as preemption:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not preemption._requested


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"every": 0}, r"`every` \(=0\) must be 1 or more"),
        ({"P": 3}, r"`P` \(=3\) must be a partition"),
        ({"signals": [15]}, r"`signals` \(=\[15\]\) must be members of signal.Signals"),
    ],
)
def test_wrong_arguments(arguments: dict, sentence: str) -> None:
    with pytest.raises(dj.DistDLError, match=sentence):
        Preemption(**arguments)
