"""Whether programs complete: decided by playing them, against a play of every message one by one."""

import random
import time
from dataclasses import replace

import pytest
from speed import python_slowdown

from distdl_jax.watchdog.programs.ir import Cond, Loop, Operation, Place, operations, simplified
from distdl_jax.watchdog.programs.matching import find_mismatch, find_stops


def send(dest, count=4, tag=0):
    return Operation("send", (0, 1, 2, 3), dest=dest, send_tag=tag, count=count, dtype="float32", itemsize=4)


def recv(source, count=4, tag=0):
    return Operation("recv", (0, 1, 2, 3), source=source, recv_tag=tag, received=count, dtype="float32", itemsize=4)


def both(dest, source, count=4):
    return replace(send(dest, count), kind="sendrecv", source=source, received=count)


def allreduce(*team, count=4):
    return Operation("allreduce", team, count=count, dtype="float32", itemsize=4, op="SUM")


def reason(programs):
    mismatch = find_mismatch(programs)
    return mismatch and (mismatch.reason, *(stop.worker for stop in mismatch.stops))


RING = {w: (both((w + 1) % 4, (w - 1) % 4),) for w in range(4)}


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ({0: (), 1: ()}, None),
        ({0: (send(1),), 1: (recv(0),)}, None),
        ({0: (send(1), recv(1)), 1: (recv(0), send(0))}, None),
        ({0: (both(1, 1),), 1: (both(0, 0),)}, None),
        (RING, None),
        ({0: (both(1, None),), 1: (both(None, 0),)}, None),
        ({0: (send(1), recv(1)), 1: (send(0), recv(0))}, ("partner", 0, 1)),
        ({0: (send(1, tag=1),), 1: (recv(0, tag=2),)}, ("partner", 0, 1)),
        ({0: (send(1, count=5),), 1: (recv(0),)}, ("amount", 1, 0)),
        ({0: (replace(send(1), dtype="int32"),), 1: (recv(0),)}, ("amount", 1, 0)),
        ({0: (send(1), send(1)), 1: (recv(0),)}, ("ended", 0, 1)),
        ({0: (send(1),), 1: ()}, ("ended", 0, 1)),
        ({0: (recv(1), send(2)), 1: (recv(2), send(0)), 2: (recv(0), send(1))}, ("cycle", 0, 1, 2)),
        ({0: (allreduce(0, 1),), 1: (allreduce(0, 1),)}, None),
        ({0: (allreduce(0, 1),), 1: (allreduce(0, 1, count=5),)}, ("amount", 1, 0)),
        ({0: (allreduce(0, 1), send(1)), 1: (recv(0), allreduce(0, 1))}, ("partner", 0, 1)),
        ({0: (allreduce(0, 1),), 1: (allreduce(0, 1),), 2: (allreduce(0, 1, 2),)}, ("ended", 2, 0)),
        ({0: (allreduce(0, 1), allreduce(0, 2)), 1: (allreduce(0, 1),), 2: (allreduce(0, 2),)}, None),
        # A reduction that is another on one worker.
        ({0: (allreduce(0, 1),), 1: (replace(allreduce(0, 1), op="MAX"),)}, ("amount", 1, 0)),
    ],
)
def test_small_programs(programs, expected):
    assert reason(programs) == expected


def test_any_tag_is_every_tag():
    anything = replace(recv(0), recv_tag=None)
    assert reason({0: (send(1, tag=7), send(1)), 1: (anything, anything)}) is None
    assert reason({0: (send(1, count=5, tag=7),), 1: (anything,)}) == ("amount", 1, 0)


def test_nothing_is_said_of_programs_that_receive_from_any_worker():
    """Who is the first to send decides what is received; a play decides that in one way of many."""
    anyone = replace(recv(None), from_any=True)
    assert reason({0: (anyone, recv(2)), 1: (send(0),), 2: (send(0),)}) is None
    assert "from any worker" in str(anyone)


def test_a_mismatch_says_where_each_worker_stands():
    mismatch = find_mismatch(
        {0: (allreduce(0, 1), Loop(3, (send(1),)), recv(1)), 1: (allreduce(0, 1), Loop(3, (recv(0),)))}
    )
    waiting, ended = mismatch.stops
    assert (waiting.worker, waiting.place, waiting.total, waiting.operation) == (0, 3, 3, recv(1))
    assert (ended.worker, ended.operation, ended.total) == (1, None, 2)


def test_places_are_of_no_weight():
    here, there = Place("a.py:1 in f", "Linear"), Place("b.py:2 in g")
    assert find_mismatch({0: (replace(send(1), place=here),), 1: (replace(recv(0), place=there),)}) is None


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ({0: (Loop(10**9, (both(1, 1), recv(1))),), 1: (Loop(10**9, (both(0, 0), send(0))),)}, None),
        ({0: (Loop(10**9, (both(1, 1),)),), 1: (Loop(10**9 - 1, (both(0, 0),)),)}, ("ended", 0, 1)),
        ({0: (Loop(10**6, (send(1),)),), 1: (Loop(5 * 10**5, (recv(0), recv(0))),)}, None),
        ({0: (Loop(10**6, (Loop(10**6, (send(1),)),)),), 1: (Loop(10**6, (Loop(10**6, (recv(0),)),)),)}, None),
        ({0: (send(1),) * 7, 1: (recv(0), Loop(5, (recv(0),)), recv(0))}, None),
        ({0: (Loop(None, (send(1),)),), 1: (Loop(None, (recv(0),)),)}, None),
        # What one pass leaves behind meets the next: each alone would complete.
        ({0: (Loop(None, (send(1), recv(1))),), 1: (recv(0), Loop(None, (send(0), recv(0))))}, ("ended", 1, 0)),
        ({0: (Loop(0, (send(1),)),), 1: ()}, None),
        ({w: (Loop(10**7, RING[w]),) for w in range(4)}, None),
    ],
)
def test_long_loops_are_decided_at_once(programs, expected):
    start = time.process_time()
    assert reason(programs) == expected
    assert time.process_time() - start < 2 * python_slowdown()


def test_a_play_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr("distdl_jax.watchdog.programs.matching.MOST_PLAYED", 1000)
    nested = {w: (Loop(10**6, (Loop(10**6 - w, (both(1 - w, 1 - w),)),)),) for w in range(2)}
    assert reason(nested)[0] == "undecided"


def test_each_branch_is_played():
    one, other = (send(1),), (send(1), send(1))
    fits = {0: (Cond((one, other)),), 1: (Cond(((recv(0),), (recv(0), recv(0)))),)}
    assert find_mismatch(fits) is None
    mismatch = find_mismatch({**fits, 1: (recv(0),)})
    assert (mismatch.reason, mismatch.branch) == ("ended", 1)
    # A conditional with equal branches is none.
    assert simplified((Cond((one, one)), Cond(((), ())), Loop(3, ()))) == one


def test_stops_without_some_workers():
    programs = {0: (send(1), recv(2)), 1: (recv(0), recv(2)), 2: (send(0), send(1))}
    stops = find_stops(programs, frozenset({2}))
    assert [(stop.worker, stop.place, stop.operation) for stop in stops] == [
        (0, 2, recv(2)),
        (1, 2, recv(2)),
        (2, 0, None),
    ]


def test_operations_are_listed_with_how_often_they_run():
    program = (send(1), Loop(3, (Loop(2, (recv(1),)), Loop(None, (send(2),)))), Cond(((send(3),), (recv(3),))))
    assert [times for _, times in operations(program)] == [1, 6, None, None, None]


def played_one_by_one(programs):
    """Whether flat programs complete: an independent play, with what waits kept in tables instead of on workers."""
    queues = {worker: list(program) for worker, program in programs.items()}
    moved = True
    halves = {worker: None for worker in queues}
    while moved:
        moved = False
        for worker, queue in queues.items():
            if halves[worker] is None and queue:
                op = queue[0]
                halves[worker] = {("s", op.dest)} if op.dest is not None else set()
                if op.source is not None:
                    halves[worker].add(("r", op.source))
        for a in queues:
            for b in queues:
                if halves[a] and halves[b] and ("s", b) in halves[a] and ("r", a) in halves[b]:
                    halves[a].discard(("s", b))
                    halves[b].discard(("r", a))
                    moved = True
        for worker in queues:
            if halves[worker] == set():
                queues[worker].pop(0)
                halves[worker] = None
                moved = True
    return not any(queues.values())


def test_random_programs_are_decided_like_one_by_one():
    """Messages between random pairs, in one global order, then disturbed: swapped or dropped."""
    draw, completed = random.Random(0), 0
    for _ in range(1500):
        workers = draw.randint(2, 5)
        programs = {worker: [] for worker in range(workers)}
        for _ in range(draw.randint(1, 8)):
            a, b = draw.sample(range(workers), 2)
            if draw.random() < 0.3:
                programs[a].append(both(b, b))
                programs[b].append(both(a, a))
            else:
                programs[a].append(send(b))
                programs[b].append(recv(a))
        victim = programs[draw.randrange(workers)]
        match draw.randrange(3):
            case 0 if len(victim) > 1:
                i = draw.randrange(len(victim) - 1)
                victim[i], victim[i + 1] = victim[i + 1], victim[i]
            case 1 if victim:
                victim.pop(draw.randrange(len(victim)))
        programs = {worker: tuple(program) for worker, program in programs.items()}
        mismatch = find_mismatch(programs)
        assert (mismatch is None) == played_one_by_one(programs), programs
        completed += mismatch is None
        looped = {worker: (Loop(5, program),) for worker, program in programs.items()}
        unrolled = {worker: program * 5 for worker, program in programs.items()}
        assert (find_mismatch(looped) is None) == played_one_by_one(unrolled), programs
    assert 300 < completed < 1200


def test_five_hundred_operations_on_four_workers_take_no_time():
    programs = {w: RING[w] * 500 for w in range(4)}
    start = time.process_time()
    assert find_mismatch(programs) is None
    assert time.process_time() - start < 1 * python_slowdown()
