"""All workers of an exchange in one process: plans carried out on numpy arrays, under the rules of blocking messages.

A send completes only when the receiver has posted the matching receive (rendezvous, no buffering anywhere); a round
completes when both its halves have. What can't complete under these rules may hang over MPI, so it is an error here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from distdl_jax.plans.messages import ExchangePlan, Round

UNWRITTEN = -(10**9) - 7  # what memory holds that no one has written; must never be seen in a result


class DeadlockError(AssertionError):
    """Some workers wait for ever."""


class MismatchError(AssertionError):
    """Sender and receiver disagree about a message."""


Block = np.ndarray
Worker = Generator[tuple[Round, Block | None], Block | None, Block]


def simulate(
    programs: Mapping[int, Sequence[ExchangePlan]],
    blocks: Mapping[int, Block],
    traffic: Counter[tuple[int, int]] | None = None,
) -> dict[int, Block]:
    """Run every worker's plans, one after the other and without a barrier between them, on its block.

    `traffic` counts the elements that move from each worker to each, local copies as those to oneself.
    """
    traffic = Counter() if traffic is None else traffic
    scheduler = _Scheduler(traffic)
    for rank, plans in programs.items():
        scheduler.start(rank, _worker(rank, plans, blocks[rank], traffic))
    return scheduler.finish()


def adjoint(programs: Mapping[int, Sequence[ExchangePlan]]) -> dict[int, list[ExchangePlan]]:
    """Return the programs of the adjoint: every plan reversed, in reverse order."""
    return {rank: [plan.reverse() for plan in reversed(plans)] for rank, plans in programs.items()}


def _worker(rank: int, plans: Sequence[ExchangePlan], block: Block, traffic: Counter[tuple[int, int]]) -> Worker:
    """Run one worker: yield each round with its packed message, and take the message that it receives."""
    for plan in plans:
        if block.shape != plan.in_shape:
            raise MismatchError(f"rank {rank} holds {block.shape}, but its plan starts from {plan.in_shape}")
        # The promises of the plan are taken at their word, so that a wrong one shows in the result.
        output = np.full(plan.out_shape, UNWRITTEN if plan.covers_output else 0, block.dtype)
        for piece in plan.copies:
            _put(output, piece.dest, block[piece.source], plan.out_disjoint)
            traffic[rank, rank] += piece.size
        for step in plan.rounds:
            outgoing = None
            if step.send is not None:
                outgoing = np.concatenate([block[piece.source].ravel() for piece in step.send.pieces])
                if outgoing.size != step.send.size:
                    raise MismatchError(f"rank {rank} packs {outgoing.size}, not {step.send.size} elements")
            incoming = yield step, outgoing
            if step.recv is not None:
                _unpack(output, step, incoming, plan.out_disjoint)
        block = output
    return block


def _unpack(output: Block, step: Round, incoming: Block | None, write: bool) -> None:
    assert step.recv is not None and incoming is not None
    start = 0
    for piece in step.recv.pieces:
        _put(output, piece.dest, incoming[start : start + piece.size].reshape(piece.shape), write)
        start += piece.size


def _put(output: Block, dest: tuple[slice, ...], values: Block, write: bool) -> None:
    if output[dest].shape != values.shape:
        raise MismatchError(f"a piece of shape {values.shape} doesn't fit at {dest} of a block of {output.shape}")
    if write:
        output[dest] = values
    else:
        np.add.at(output, dest, values)  # rows may be there more than once


class _Scheduler:
    """Lets workers go on as their messages meet."""

    def __init__(self, traffic: Counter[tuple[int, int]]) -> None:
        self.traffic = traffic
        self.workers: dict[int, Worker] = {}
        self.sending: dict[int, tuple[int, Block]] = {}  # rank -> (to whom, what): posted and not yet met
        self.receiving: dict[int, tuple[int, int]] = {}  # rank -> (from whom, how many)
        self.received: dict[int, Block | None] = {}
        self.results: dict[int, Block] = {}

    def start(self, rank: int, worker: Worker) -> None:
        self.workers[rank] = worker

    def finish(self) -> dict[int, Block]:
        ready = list(self.workers)
        while ready:
            rank = ready.pop()
            if self._advance(rank):
                ready.extend(self._meet(rank))
        if self.sending or self.receiving:
            raise DeadlockError(f"sends {[(a, b) for a, (b, _) in self.sending.items()]}, receives {self.receiving}")
        return self.results

    def _advance(self, rank: int) -> bool:
        """Let a worker run until it posts its next round; False when it has ended."""
        try:
            step, outgoing = self.workers[rank].send(self.received.pop(rank, None))
        except StopIteration as end:
            self.results[rank] = end.value
            return False
        assert step.send is not None or step.recv is not None, "a round with nothing to do"
        if step.send is not None:
            assert outgoing is not None and step.send.partner != rank, "a message to oneself"
            self.sending[rank] = (step.send.partner, outgoing)
        if step.recv is not None:
            assert step.recv.partner != rank, "a message from oneself"
            self.receiving[rank] = (step.recv.partner, step.recv.size)
        return True

    def _meet(self, rank: int) -> list[int]:
        """Carry out the messages that this worker's new round makes possible; return who completed a round by that."""
        touched = set()
        if rank in self.sending:
            touched |= self._transfer(rank, self.sending[rank][0])
        if rank in self.receiving:
            touched |= self._transfer(self.receiving[rank][0], rank)
        return [r for r in touched if r not in self.sending and r not in self.receiving]

    def _transfer(self, source: int, dest: int) -> set[int]:
        if self.sending.get(source, (None,))[0] != dest or self.receiving.get(dest, (None,))[0] != source:
            return set()
        message, expected = self.sending.pop(source)[1], self.receiving.pop(dest)[1]
        if message.size != expected:
            raise MismatchError(f"rank {source} sends {message.size}, rank {dest} expects {expected} elements")
        self.received[dest] = message
        self.traffic[source, dest] += message.size
        return {source, dest}
