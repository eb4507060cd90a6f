"""Agreements of small and large teams: who is told what, by which messages."""

import random
import threading
from collections import deque

import pytest

from distdl_jax.plans.trees import BRANCHES
from distdl_jax.transports.mpi.control import ControlChannel
from distdl_jax.watchdog.watch.call_log import CallLog
from distdl_jax.watchdog.watch.status import WorkerStatus, acting_as, worker_status


class Letters:
    """Mailboxes of one process, in place of MPI's."""

    def __init__(self, rank, boxes):
        self.rank, self.boxes = rank, boxes

    def post(self, message, to):
        self.boxes[to].append((self.rank, message))

    def next(self):
        return self.boxes[self.rank].popleft() if self.boxes[self.rank] else None


class Nobody:
    """A monitor that knows of no failure."""

    epoch = 0

    def __init__(self):
        self.calls = CallLog()

    def raise_if_failed(self):
        pass


@pytest.mark.parametrize("size", [2, BRANCHES + 1, BRANCHES + 2, 70])
def test_every_worker_gets_what_the_first_decides_on_all_contributions(size):
    team = tuple(random.Random(size).sample(range(size), size))
    boxes = [deque() for _ in range(size)]
    channels = [ControlChannel(Letters(rank, boxes), rank, Nobody()) for rank in range(size)]
    agreed, objects = {}, set()

    def decide(contributions):
        assert list(contributions) == list(team)
        objects.update(map(id, contributions.values()))
        return {worker: ours for worker, (ours, _) in contributions.items()}

    def work(rank):
        with acting_as(WorkerStatus(rank, size)):
            agreed[rank] = channels[rank].agree(team, "a sum", (rank % 3, "of the same kind"), decide)
            assert worker_status().waiting is None

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    decision = {rank: rank % 3 for rank in team}
    assert len(agreed) == size and all(found == decision for found in agreed.values())
    assert len(objects) == min(size, 3)  # what many say alike is read once
    assert max(len(channel.received) for channel in channels) <= BRANCHES + 1
    for sender, channel in enumerate(channels):
        for receiver, count in channel.sent.items():
            assert channels[receiver].received[sender] == count
