"""Mistakes in dj.simulate: what would hang raises at once on all workers, and an exception ends them all."""

import random
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce, broadcast, repartition
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.transports.agreement import agree
from distdl_jax.transports.threads import rendezvous
from distdl_jax.transports.threads.rendezvous import Rendezvous

pytestmark = pytest.mark.limit(300)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before]
    assert not [name for name in left if not name.startswith("world of ")]  # the launcher starts worlds beside this


@pytest.fixture(autouse=True)
def workers_come_in_any_order(monkeypatch):
    """Hold each worker up before what it does with others: errors must not depend on who comes first."""
    rng = random.Random(0)

    def held_up(method):
        def later(self, rank, *args):
            time.sleep(rng.choice((0, 0, 0, 0.001, 0.01, 0.03)))
            return method(self, rank, *args)

        return later

    for name in ("perform", "leave"):
        monkeypatch.setattr(Rendezvous, name, held_up(getattr(Rendezvous, name)))


class Parts:
    def __init__(self):
        self.P = P = dj.Partition()
        self.rank = P.rank
        self.root = P.grid([1, 1])
        self.all = P.grid([1, P.size])

    def x(self, *shape, dtype=jnp.float32):
        return jnp.ones(shape, dtype) if self.rank == 0 else dj.zero_volume_tensor(shape[0], dtype)

    def spread(self, x):
        return broadcast(x, self.root, self.all)

    def scatter(self, x):
        return repartition(x, self.root, self.all)

    def total(self, x):
        return all_sum_reduce(x, self.all, axes_keep=())


def layers_swapped(p, jit):
    def forward(x):
        first, second = (p.scatter, p.spread) if p.rank == 0 else (p.spread, p.scatter)
        return first(x), second(x)

    jit(forward)(p.x(4, 6))


def ends_early(p, jit):
    f = jit(p.spread)
    for _ in range(3 if p.rank == 1 else 4):
        f(p.x(4, 6))


def partitions_differ(p, jit):
    P_other = p.P.grid([1, 1], [1])
    jit(lambda x: broadcast(x, P_other if p.rank else p.root, p.all))(jnp.ones((2, 2)))


def scan_lengths_differ(p, jit):
    def step(x):
        return lax.scan(lambda c, _: (p.total(c), None), x, None, length=3 + p.rank)[0]

    jit(step)(jnp.ones(3))


def unused_output(p, jit):
    def step(x):
        def loss(x):
            y = p.spread(x)
            return jnp.sum(y**2) if p.rank == 0 else jnp.sum(x)

        return jax.grad(loss)(x)

    jit(step)(p.x(4, 6))


def different_functions(p, jit):
    def one(x):
        return p.total(x)

    def two(x):
        return p.total(x)

    one, two = jit(one), jit(two)
    one(jnp.ones(3)), two(jnp.ones((2, 2)))  # compiled on all
    for _ in range(2):
        one(jnp.ones(3)) if p.rank else two(jnp.ones((2, 2)))


def traced_on_one(p, jit):
    f = jit(lambda x, n: p.total(n))
    f(jnp.ones(3), jnp.ones(2))
    f(jnp.ones(3 + (p.rank == 1)), jnp.ones(2))


def traced_on_one_that_sends_nothing(p, jit):
    f = jit(lambda x: 2 * x)
    for length in (5, 3):
        f(jnp.ones(length) if p.rank == 0 else dj.zero_volume_tensor())
        p.P.allgather_data(length)
    p.P.allgather_data(None if p.rank == 0 or jit is dj.jit else p.total(jnp.ones(3)))


THREE = ShapeDtype((3,), np.dtype("float32"))


def both_send_first(p, jit):
    transport = p.P.world.transport

    def swap(x):
        return transport.receive(THREE, 1 - p.rank, 5, transport.send(x, 1 - p.rank, 5)) if p.rank < 2 else x

    jit(swap)(jnp.ones(3, jnp.float32))


def tags_differ(p, jit):
    transport = p.P.world.transport

    def pass_on(x):
        if p.rank == 0:
            return transport.send(x, 1, 7)
        if p.rank == 1:
            return transport.receive(THREE, 0, 8, x)
        return x

    jit(pass_on)(jnp.ones(3, jnp.float32))


def agreements_in_a_cycle(p, jit):
    pair = [p.P.create_partition_inclusive([i, (i + 1) % p.P.size]) for i in range(p.P.size)]
    for i in (p.rank, (p.rank + p.P.size - 1) % p.P.size):
        pair[i].allgather_data(0)


DIFFER = "The workers' programs differ: worker 0 is about to run "
UNLIKE = "must have the same shape and dtype on all workers that are summed"
ENDED = "worker 0 has ended its program, after"
MISTAKES = {  # what is said, or what is said under jax.jit and under dj.jit
    "layers swapped": (layers_swapped, f"{DIFFER}repartition from 1 x 1 (0) to"),
    "if rank 0": (
        lambda p, jit: p.spread(p.x(4, 6)) if p.rank == 0 else None,
        "has ended its program, but worker 0 is about to run broadcast from",  # any of them
    ),
    "ends early": (ends_early, "but worker 1 has ended its program, after"),
    "shapes": (lambda p, jit: jit(p.total)(jnp.ones(3 + p.rank)), UNLIKE),
    "dtypes": (lambda p, jit: jit(p.total)(jnp.ones(3, jnp.int32 if p.rank else jnp.float32)), UNLIKE),
    "partitions": (partitions_differ, f"{DIFFER}broadcast from 1 x 1 (0) to"),
    "branches of cond": (
        lambda p, jit: jit(lambda x, n: lax.cond(n > 0, p.total, lambda x: x, x))(jnp.ones(3), p.rank),
        ENDED,
    ),
    "lengths of scan": (scan_lengths_differ, ENDED, "without its part in that. Nothing was run."),
    "lengths of while": (
        lambda p, jit: jit(lambda x: lax.while_loop(lambda c: c[0] < 40.0 + 1e3 * p.rank, p.total, x))(jnp.ones(3)),
        ENDED,
    ),
    "unused output": (
        unused_output,
        "dj.grad and dj.value_and_grad, used in place of JAX's",
        "let the loss use every output on every",
    ),
    "other functions": (different_functions, "(4 x float", "The workers call different functions: call 3 is"),
    "traced on one": (traced_on_one, "is about to run all_sum_reduce", "Worker 1 traces traced_on_one"),
    "traced on one that sends nothing": (
        traced_on_one_that_sends_nothing,
        "for a loop that one of them leaves first.",
        "Or `traced_on_one_that_sends_nothing.<lambda>` has been called on all, and is traced again on some:",
    ),
    "both send first": (both_send_first, "neither can go on", "The plan of both_send_first.swap"),
    "tags": (tags_differ, "the message has tag 7, and one with tag 8 is expected"),
    "agreements in a cycle": (agreements_in_a_cycle, "allgather_data on"),
}


@pytest.mark.parametrize("jit", [jax.jit, dj.jit], ids=["jax.jit", "dj.jit"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_on_all_workers(name, size, jit):
    """On those that still run; the first of the errors is raised in the end, and names a line of this file."""
    (mistake, *sentences), raised = MISTAKES[name], {}

    def program():
        p = Parts()
        try:
            mistake(p, jit)
        except Exception as error:
            raised[p.rank] = error
            raise

    with pytest.raises(dj.PlanError) as error:
        dj.simulate(size, program)
    text = str(error.value)
    assert sentences[-1 if jit is dj.jit else 0] in text
    assert "test_mistakes.py" in text or "must have the same shape and dtype" in text
    assert any("of dj.simulate" in note or "in dj.simulate" in note for note in error.value.__notes__)
    assert raised


@pytest.mark.parametrize("wrong, sentence", [((0, 1, 2), "too large"), ((1,), "On worker 1: too large")])
def test_all_workers_say_the_same_sentence(wrong, sentence):
    """With the worker whose mistake it is, if it isn't that of all; and a worker's own lines are kept."""

    def number_of(rank):
        if rank in wrong:
            raise dj.PlanError("too large")

    def program():
        P = dj.Partition()
        with pytest.raises(dj.PlanError) as caught:
            agree(P.world, (0, 1, 2), "a number", lambda: number_of(P.rank))
        assert (caught.traceback[-1].name == "number_of") == (P.rank in wrong)
        return str(caught.value)

    assert dj.simulate(3, program) == [sentence] * 3


def test_workers_continue_after_a_mistake():
    """As over MPI: an agreement that fails raises on all of them, once."""

    def program():
        p = Parts()
        for _ in range(10):
            with pytest.raises(dj.PlanError, match="The workers' programs differ"):
                p.scatter(p.x(4, 6)) if p.rank == 0 else p.spread(p.x(4, 6))
            np.testing.assert_array_equal(p.spread(p.x(4, 6)), np.ones((4, 6)))
        return p.rank

    assert dj.simulate(3, program) == [0, 1, 2]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_exception_ends_waiting_workers(compiled):
    """In a call, and in a compiled program that has run before."""

    def program():
        p = Parts()
        f = jax.jit(p.total) if p.rank == 0 or compiled else p.total
        if compiled:
            f(jnp.ones(3))
        if p.rank == 2:
            raise KeyError("no such file")
        f(jnp.ones(3))

    with pytest.raises(KeyError, match="no such file") as error:
        dj.simulate(4, program)
    assert any("worker 2 of 4" in note for note in error.value.__notes__)


def test_an_exception_ends_computing_workers():
    """Workers that never communicate again are interrupted, between two lines of Python."""
    stopped = []

    def program():
        if dj.Partition().rank == 0:
            raise ValueError("data")
        try:
            while True:
                time.sleep(0.01)
        except BaseException as error:
            stopped.append(type(error).__name__)
            raise

    with pytest.raises(ValueError, match="data"):
        dj.simulate(3, program)
    assert stopped == ["WorkerStopped"] * 2


def test_exits():
    """An exit with success ends a worker as a return does; another one ends them all, with its status."""

    def program(status):
        p = Parts()
        p.spread(p.x(2, 2))
        if p.rank == 1:
            raise SystemExit(status)
        return p.rank

    assert dj.simulate(2, program, 0) == [0, None]
    with pytest.raises(SystemExit) as end:
        dj.simulate(2, program, 3)
    assert end.value.code == 3


@pytest.mark.parametrize("end", [int, sys.exit])
@pytest.mark.parametrize("first", [0, 1])
def test_pending_work_of_a_device_is_part_of_the_program(first, end):
    """Its data come later, from another device: a worker that returns or exits before has not left the others."""
    late = jax.jit(lambda x: lax.fori_loop(0, 300, lambda _, y: y @ y / 400, x))(jnp.ones((400, 400)))
    found = [None, None]

    def program():
        p = Parts()
        found[p.rank] = jax.jit(p.total)(late)
        return end(0) if p.rank == first else None

    assert dj.simulate(2, program) == [0 if end is int and rank == first else None for rank in range(2)]
    assert all(y.is_ready() for y in found)
    np.testing.assert_array_equal(found[1], np.full((400, 400), 2.0))


def test_ctrl_c_ends_all_workers():
    import _thread

    def program():
        p = Parts()
        if p.rank == 0:
            time.sleep(0.3)  # until the main thread waits: no system call of it hears of this interrupt
            _thread.interrupt_main()
            while True:
                time.sleep(0.01)
        p.spread(p.x(2, 2))

    with pytest.raises(KeyboardInterrupt):
        dj.simulate(3, program)


def test_bad_arguments_are_refused_in_a_sentence():
    for n, program, kind, words in (
        (0, print, dj.InvalidArgumentError, "`n` (=0) must be 1 or more"),
        ("2", print, dj.InvalidTypeError, "`n` (='2') must be an integer"),
        (2, "train.py", dj.InvalidTypeError, "`program` (='train.py') must be a function"),
    ):
        with pytest.raises(kind) as error:
            dj.simulate(n, program)
        assert words in str(error.value)
    with pytest.raises(dj.SetupError, match=r"can't call dj\.simulate itself"):
        dj.simulate(2, dj.simulate, 2, print)
    with pytest.raises(dj.InvalidArgumentError, match=r"this worker is a thread of dj\.simulate"):
        dj.simulate(2, dj.Partition, "is an MPI communicator")


@pytest.mark.parametrize("wrap", [jax.grad, lambda fun: jax.jit(jax.grad(fun))], ids=["eager", "jit"])
def test_a_movement_that_is_missing_in_the_backward_pass(wrap):
    """What is advised is right: with dj.grad the same program runs."""

    def program(wrap):
        P = dj.Partition()
        P_all = P.grid([2])

        def loss(x):
            y = all_sum_reduce(x, P_all, axes_keep=())
            return jnp.sum(y) if P.rank == 0 else jnp.sum(x)

        gradient = wrap(loss)(jnp.ones(3))
        P.allgather_data(0)
        return gradient.tolist()

    with pytest.raises(
        dj.PlanError, match=r"is missing there: dj\.grad and dj\.value_and_grad, used in place of JAX's"
    ):
        dj.simulate(2, program, wrap)
    assert dj.simulate(2, program, dj.grad) == [[1, 1, 1], [2, 2, 2]]


def test_a_long_wait_is_reported_and_nothing_ends(monkeypatch, capsys):
    """Once for each place, though every step waits; with two workers that wait."""
    monkeypatch.setattr(rendezvous, "LINES", (0.3, 60.0))

    def program():
        P = dj.Partition()
        total = jnp.ones(2)
        for _ in range(2):
            if P.rank == 1:
                time.sleep(1.0)
            total = all_sum_reduce(total, P, axes_keep=())
        return float(total[0])

    assert dj.simulate(3, program) == [9.0] * 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "has waited" in line]
    assert "test_mistakes.py" in line and "is about to run all_sum_reduce" in line
    assert "Worker 1 is at test_mistakes.py" in line and "waits, too. The job goes on." in line
