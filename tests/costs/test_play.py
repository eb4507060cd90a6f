"""The play of a step in time: cases worked out by hand, and drawn programs against one that goes event by event."""

from types import SimpleNamespace

import numpy as np
import pytest

from distdl_jax.costs.meetings import meetings
from distdl_jax.costs.play import Met, Own, play
from distdl_jax.errors import PlanError
from distdl_jax.programs.ir import Operation


class Links:
    """A message takes 1 s and 1 s a byte; a collective 10 s; those of up to `eager_bytes` are eager."""

    def __init__(self, eager_bytes=-1):
        self.eager_bytes = eager_bytes

    def message_seconds(self, sender, receiver, nbytes):
        return 1.0 + nbytes

    def eager(self, sender, receiver, nbytes):
        return nbytes <= self.eager_bytes

    def collective_seconds(self, kind, team, nbytes):
        return 10.0


def send(dest, count=1):
    return Operation("send", (), dest=dest, count=count, itemsize=1)


def receive(source):
    return Operation("recv", (), source=source, count=0, received=1, itemsize=1)


def exchange(dest, source, count=1):
    return Operation("sendrecv", (), dest=dest, source=source, count=count, itemsize=1)


def played(programs, work, links=None, **options):
    """Play one layer of work, by worker, and then one of messages."""
    meet = Met.on(links or Links(), 1, meetings(programs))
    return play([Own(0, np.array(work, float)), meet], 2, len(work), **options)


def test_a_worker_waits_for_one_that_has_more_work():
    found = played({0: [exchange(1, 1)], 1: [exchange(0, 0)]}, [3, 5])
    assert found.spent.computing[0].tolist() == [3, 5]
    assert found.spent.communicating[1].tolist() == [2, 2]
    assert found.spent.waiting[1].tolist() == [2, 0]
    assert found.passes.tolist() == [7] and found.repeats


def test_in_a_ring_that_shifts_the_slowest_sets_the_pace():
    ring = {w: [exchange((w + 1) % 4, (w - 1) % 4)] for w in range(4)}
    found = played(ring, [1, 4, 1, 1])
    assert found.passes.tolist() == [6] and found.spent.total.tolist() == [6] * 4


def test_a_tree_takes_a_message_a_level():
    tree = {0: [send(2), send(1)], 1: [receive(0)], 2: [receive(0), send(3)], 3: [receive(2)]}
    found = played(tree, [0, 0, 0, 0])
    assert found.spent.communicating[1].tolist() == [4, 2, 4, 2]
    # the first pass leaves workers 1 and 3 at 4, as 0 and 2: then all go on together, and 1 and 3 wait for 2 s
    assert found.spent.waiting[1].tolist() == [0, 2, 0, 2]
    assert found.passes.tolist() == [4]


def test_an_all_reduce_ends_a_collective_after_the_last():
    programs = {w: [Operation("allreduce", (0, 1, 2), count=1, itemsize=1)] for w in range(3)}
    found = played(programs, [1, 2, 6])
    assert found.spent.waiting[1].tolist() == [5, 4, 0] and found.passes.tolist() == [16]


def test_an_eager_message_lets_its_sender_go_on():
    late = {0: [send(1)], 1: [receive(0)]}
    assert played(late, [1, 4]).spent.waiting[1].tolist() == [3, 0]
    assert played(late, [1, 4], Links(1)).spent.waiting[1, 0] == 0


def test_noise_makes_a_step_longer_where_workers_meet():
    def step(workers):
        programs = {w: [Operation("allreduce", tuple(range(workers)), itemsize=1)] for w in range(workers)}
        return played(programs, [100.0] * workers, noise=0.02).passes.mean()

    # the largest of 256 normal numbers is 2.8 in the mean
    assert step(256) == pytest.approx(110 + 100 * 0.02 * 2.8, rel=0.01)
    assert step(256) > step(16) > step(2) > 110


def test_operations_that_wait_in_a_circle_are_refused():
    with pytest.raises(PlanError, match="wait for each other"):
        meetings({0: [receive(1), send(1)], 1: [receive(0), send(0)]})
    with pytest.raises(PlanError, match="worker 0 that it doesn't send"):
        meetings({0: [], 1: [receive(0)]})
    with pytest.raises(PlanError, match="worker 1 a message that it doesn't receive"):
        meetings({0: [send(1)], 1: []})


@pytest.mark.parametrize("seed", range(30))
def test_a_play_of_arrays_ends_as_one_of_events(seed):
    draw = np.random.default_rng(seed)
    size, links = int(draw.integers(2, 7)), Links(int(draw.integers(-1, 4)))
    programs = drawn_programs(draw, size)
    work = draw.integers(0, 9, size).astype(float)
    clock, last = np.zeros(size), np.zeros(size)
    for _ in range(30):
        last, clock = clock, by_events(programs, clock + work, links)
    assert played(programs, work, links).passes[-1] == pytest.approx((clock - last).max())


def drawn_programs(draw, size):
    """Draw programs that complete: what is drawn next is done by workers after all that was drawn before."""
    programs = {worker: [] for worker in range(size)}
    for _ in range(12):
        chosen = draw.permutation(size)[: draw.integers(2, size + 1)].tolist()
        count = int(draw.integers(0, 5))
        match draw.integers(3):
            case 0:
                programs[chosen[0]].append(send(chosen[1], count))
                programs[chosen[1]].append(receive(chosen[0]))
            case 1:
                for before, worker, after in zip(np.roll(chosen, 1), chosen, np.roll(chosen, -1), strict=True):
                    programs[worker].append(exchange(int(after), int(before), count + worker))
            case 2:
                for worker in chosen:
                    programs[worker].append(Operation("allreduce", tuple(chosen), count=1, itemsize=1))
    return programs


def by_events(programs, clock, links):
    """Return the clocks at the end, of a play that asks every worker again and again whether it can go on."""
    clock, at = clock.copy(), dict.fromkeys(programs, 0)
    halves = {}  # of (worker, place): the ends of its sending and receiving half

    def start(worker, place):
        return clock_at[worker, place]

    clock_at = {(worker, 0): clock[worker] for worker in programs}
    sends = {w: [i for i, op in enumerate(p) if op.is_message and op.dest is not None] for w, p in programs.items()}
    while any(at[worker] < len(programs[worker]) for worker in programs):
        for worker, program in programs.items():
            if at[worker] == len(program):
                continue
            place, op = at[worker], program[at[worker]]
            if not op.is_message:
                others = [
                    (w, at[w]) for w in op.team if at[w] < len(programs[w]) and programs[w][at[w]].team == op.team
                ]
                if len(others) == len(op.team):
                    end = max(start(*other) for other in others) + 10.0
                    for w, other in others:
                        at[w], clock_at[w, other + 1] = other + 1, end
                continue
            mine = halves.setdefault((worker, place), SimpleNamespace(send=None, receive=None))
            if op.source is not None and mine.receive is None:
                number = [i for i, o in enumerate(program) if o.is_message and o.source == op.source].index(place)
                theirs = [i for i in sends[op.source] if programs[op.source][i].dest == worker][number]
                if (op.source, theirs) in clock_at:
                    nbytes = programs[op.source][theirs].count
                    end = max(start(worker, place), start(op.source, theirs)) + 1.0 + nbytes
                    mine.receive = end
                    other = halves.setdefault((op.source, theirs), SimpleNamespace(send=None, receive=None))
                    other.send = start(op.source, theirs) + 1.0 + nbytes if nbytes <= links.eager_bytes else end
            ends = [mine.send] * (op.dest is not None) + [mine.receive] * (op.source is not None)
            if None not in ends:
                at[worker], clock_at[worker, place + 1] = place + 1, max(ends)
    return np.array([clock_at[worker, len(programs[worker])] for worker in programs])
