"""The messages of workers' programs in the order in which they go, for a picture; and who is left waiting."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.programs.ir import Operation, Program, operations
from distdl_jax.programs.matching import fit


@dataclass
class _At:
    """A worker at an operation, and which halves of it still wait."""

    rank: int
    steps: Iterator[tuple[Operation, int | None]]
    operation: Operation | None = None
    times: int | None = 1
    sends: bool = False
    receives: bool = False
    joins: bool = False

    def advance(self) -> bool:
        """Go to the next operation; false at the end."""
        self.operation, self.times = next(self.steps, (None, 1))
        if (op := self.operation) is None:
            return False
        self.sends, self.joins = op.dest is not None, not op.is_message
        self.receives = op.source is not None or op.from_any
        return True

    @property
    def waits(self) -> bool:
        return self.sends or self.receives or self.joins


Happening = tuple[Operation, Workers, int | None]
"""An operation, the sender and the receiver or the whole team, and how often it is done; None where only data say."""


def play_back(programs: Mapping[int, Program]) -> tuple[list[Happening], dict[int, Operation]]:
    """Return what happens, in order, and the operations in which workers are left waiting.

    A loop's body is played once; of a conditional, the first branch.
    """
    workers = {rank: _At(rank, operations(program, first_branch=True)) for rank, program in sorted(programs.items())}
    arrived: Counter[Workers] = Counter()
    happened: list[Happening] = []
    ready = deque(workers.values())
    while ready:
        worker = ready.popleft()
        while not worker.waits and worker.advance():
            op = worker.operation
            assert op is not None
            if worker.joins:
                arrived[op.team] += 1
                if arrived[op.team] == len(op.team) and all(workers[rank].joins for rank in op.team):
                    arrived[op.team] = 0
                    happened.append((op, op.team, worker.times))
                    for rank in op.team:
                        workers[rank].joins = False
                        ready.append(workers[rank])
                continue
            for sender, receiver in _partners(worker, op, workers):
                if not _fits(sender, receiver):
                    continue
                assert sender.operation is not None
                happened.append((sender.operation, (sender.rank, receiver.rank), sender.times))
                sender.sends = receiver.receives = False
                ready.append(receiver if sender is worker else sender)
    return happened, {rank: at.operation for rank, at in workers.items() if at.waits and at.operation is not None}


def _partners(worker: _At, op: Operation, workers: Mapping[int, _At]) -> Iterator[tuple[_At, _At]]:
    if op.dest is not None and op.dest in workers:
        yield worker, workers[op.dest]
    if op.source is not None and op.source in workers:
        yield workers[op.source], worker
    if op.from_any:
        for rank in op.team:
            if worker.receives:
                yield workers[rank], worker


def _fits(sender: _At, receiver: _At) -> bool:
    sent, received = sender.operation, receiver.operation
    if received is not None and received.from_any:
        return bool(sent and sender.sends and receiver.receives and sent.dest == receiver.rank)
    return fit(sender, receiver)
