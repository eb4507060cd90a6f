"""Binomial trees, carried out in one process with blocking messages that complete only when both sides have come."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from distdl_jax.plans.trees import Step, broadcast_steps, gathered, reduction_steps

SIZES = range(1, 41)
Act = Callable[[int, int], None]


def run(steps: list[tuple[Step, ...]], deliver: Act) -> int:
    """Carry out all participants' steps, in each one's order; the number of rounds if all go at once.

    A message goes when its sender's and its receiver's next steps name each other. Where none can go, all would wait
    for ever.
    """
    done = [0] * len(steps)
    rounds = 0
    while any(at < len(mine) for at, mine in zip(done, steps, strict=True)):
        matched = [
            (sender, steps[sender][done[sender]].partner)
            for sender in range(len(steps))
            if done[sender] < len(steps[sender]) and steps[sender][done[sender]].action == "send"
        ]
        matched = [
            (sender, receiver)
            for sender, receiver in matched
            if done[receiver] < len(steps[receiver]) and steps[receiver][done[receiver]] == Step("receive", sender)
        ]
        assert matched, f"deadlock after {done}"
        for sender, receiver in matched:
            deliver(sender, receiver)
            done[sender] += 1
            done[receiver] += 1
        rounds += 1
    return rounds


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_brings_the_data_to_everyone_once(size):
    """Only who has the data sends it, everyone but position 0 receives it once, in ceil(log2 n) rounds at the most."""
    holders = {0}

    def deliver(sender: int, receiver: int) -> None:
        assert sender in holders and receiver not in holders
        holders.add(receiver)

    rounds = run([broadcast_steps(size, position) for position in range(size)], deliver)
    assert holders == set(range(size))
    assert rounds <= math.ceil(math.log2(size))


@pytest.mark.parametrize("size", SIZES)
def test_reduction_sums_every_term_once_at_position_0(size):
    """Terms are powers of two, so that a term that is lost or counted twice shows in the sum."""
    values = [1 << position for position in range(size)]

    def deliver(sender: int, receiver: int) -> None:
        values[receiver] += values[sender]
        values[sender] = 0

    rounds = run([reduction_steps(size, position) for position in range(size)], deliver)
    assert values == [2**size - 1] + [0] * (size - 1)
    assert rounds <= math.ceil(math.log2(size))


@pytest.mark.parametrize("size", SIZES)
def test_reduction_is_the_broadcast_backwards(size):
    """The same messages in the opposite direction and order, so that one is the other's adjoint."""
    for position in range(size):
        there, back = broadcast_steps(size, position), reduction_steps(size, position)
        assert [step.partner for step in back] == [step.partner for step in there][::-1]
        assert all(a.action != b.action for a, b in zip(there[::-1], back, strict=True))
        assert all(0 <= step.partner < size and step.partner != position for step in there)
        # Received before sent, and from a lower position: what keeps trees of different teams from forming a cycle.
        assert [step.action for step in there] == sorted(step.action for step in there)
        assert [step.action for step in there].count("receive") == (position > 0)
        assert all((step.partner < position) == (step.action == "receive") for step in there)


@pytest.mark.parametrize("size", [1, 2, 33, 34, 65, 500])
def test_all_but_the_first_are_heard_by_one_other(size):
    """Also where the tree has several levels: by the one whom they tell, who is nearer to the first."""
    team = tuple(range(size, 0, -1))
    steps = {worker: gathered(team, worker) for worker in team}
    pairs = [(one, other) for one, (_, others) in steps.items() for other in others]
    assert sorted(pairs) == sorted((to, worker) for worker, (to, _) in steps.items() if to is not None)
    assert steps[team[0]][0] is None and len(pairs) == size - 1
    assert all(one > other for one, other in pairs)
