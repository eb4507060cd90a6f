"""The small test files that the launcher's own tests run: what passes, fails, hangs and dies, and how."""

HEAD = """
import atexit, os, signal, sys, time, warnings
import pytest
from hypothesis import given, strategies
from mpi4py import MPI
world = MPI.COMM_WORLD

def wait(request):  # without keeping a core busy
    while not request.Test():
        time.sleep(0.02)
"""
IN_TWO = HEAD + "pytestmark = pytest.mark.world(2)\n"

OUTCOMES = """
@pytest.fixture(scope="module")
def team():
    return world.Dup()

def test_pass(team, world_size, tmp_path):
    assert team.allreduce(1) == world_size == 2

@pytest.mark.parametrize("k", [1, 2])
def test_parametrised(k):
    assert world.bcast(k) == k

@pytest.mark.world(1, 2)
def test_sizes(world_size):
    assert world.size == world_size

def test_skip():
    pytest.skip("all of us")

def test_skip_on_one():
    if world.rank == 1:
        pytest.skip("just me")

def test_fail_on_one():
    print("I am", world.rank)
    assert world.rank == 0

def test_fail_on_all():
    raise ValueError("together")

@pytest.mark.xfail
def test_xfail_on_one():
    assert world.rank == 1

def test_sys_exit():
    sys.exit(3)

def test_pytest_exit():
    if world.rank == 1:
        pytest.exit("bye")

@given(strategies.integers())
def test_same_draws(n):
    assert world.allreduce(n) == 2 * n

@given(strategies.integers())
def test_failing_example(n):
    assert n < 10

@pytest.fixture
def broken():
    yield
    assert world.rank == 0

def test_teardown_fails(broken):
    pass

def test_warns():
    warnings.warn("lukewarm")

def test_long():
    time.sleep(2)

def test_last():
    assert world.allreduce(1) == 2
"""

HANG = """
@pytest.mark.limit(3)
def test_hang():
    if world.rank == 0:
        wait(world.irecv(source=1, tag=99))

def test_stuck_after_failure():
    if world.rank == 1:
        raise RuntimeError("without me")
    wait(world.Ibarrier())

def test_next():
    pass
"""

DEATH = """
def test_killed():
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait(world.Ibarrier())

def test_leaves():
    if world.rank == 1:
        os._exit(0)
    wait(world.Ibarrier())

def test_abort():
    if world.rank == 1:
        world.Abort(5)
    wait(world.Ibarrier())

def test_next():
    pass
"""

NOT_COLLECTED = """
if MPI.Is_initialized() and world.rank == 1:
    raise OSError("no such library here")

def test_one():
    pass
"""

ENDLESS_START = """
if MPI.Is_initialized() and world.rank == 1:
    time.sleep(1000)

def test_one():
    pass

def test_two():
    pass
"""

ENDLESS_END = """
def test_one():
    pass

def test_two():
    atexit.register(time.sleep, 1000)  # on both: a rank that waits for the other in MPI takes a core
"""

PLAIN = (
    HEAD
    + """
def test_no_mpi_here():
    assert not MPI.Is_initialized()

@pytest.mark.limit(1)
def test_sleeps():
    time.sleep(1000)

def test_next():
    pass
"""
)

PLAIN_DEAF = (
    HEAD
    + """
@pytest.mark.limit(1)
def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(1000)
"""
)

CHOICE = """
def test_one(): pass
def test_two(): assert False
def test_three(): pass
@pytest.mark.chosen
@pytest.mark.world(1, 2)
def test_four(): pass
"""

HOOKS = """
import os
import pytest

pytest_plugins = ["launcher.plugin"]

def pytest_world_environment(environment, size):
    environment.setdefault("COLOUR", f"green for {size}")

def pytest_world_start():
    import mpi4py
    mpi4py.rc.thread_level = "single"

def pytest_world_settle():
    with open(f"settled-{os.getpid()}", "a") as file:
        file.write("once\\n")

def pytest_world_simulate(size, test):
    for _ in range(size):
        test()
"""

HOOKED = """
import pathlib

calls = []

@pytest.mark.simulated(3, 1)
def test_simulated(world_size):
    calls.append(world_size)
    assert not MPI.Is_initialized()

@pytest.mark.simulated(1)
def test_calls():
    assert calls == [3, 3, 3, 1]

@pytest.mark.simulated(1)
def test_dies():
    os._exit(3)

@pytest.mark.simulated(1)
def test_after_a_death():
    assert not calls

@pytest.mark.world(2)
def test_environment_and_start():
    assert os.environ["COLOUR"] == "green for 2"
    assert MPI.Query_thread() == MPI.THREAD_SINGLE

@pytest.mark.world(2)
def test_settled():
    assert pathlib.Path(f"settled-{os.getpid()}").read_text() == "once\\n"
"""

SIDE_BY_SIDE = (
    HEAD
    + """
import pathlib

def met(mine, other):
    pathlib.Path(mine).touch()
    while not pathlib.Path(other).exists():
        time.sleep(0.01)

def test_plain():
    met("plain", "two")

@pytest.mark.world(1)
def test_in_one():
    met("one", "three")

@pytest.mark.world(2)
def test_in_two():
    met("two", "plain")

@pytest.mark.world(3)
def test_in_three():
    met("three", "one")
"""
)

IN_TURN = (
    HEAD
    + """
import pathlib

def test_plain():
    assert not list(pathlib.Path(".").glob("ran*"))
    time.sleep(1)
    assert not list(pathlib.Path(".").glob("ran*"))

@pytest.mark.world(1)
def test_in_one():
    pathlib.Path("ran1").touch()
    time.sleep(1)
    assert not pathlib.Path("ran2").exists()

@pytest.mark.world(2)
def test_in_two():
    pathlib.Path("ran2").touch()
"""
)

NO_WORLD = """#!/bin/sh
shift 2
exec "$@"
"""

OF_A_PARAMETER = """
import pytest

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.simulated(2))])
def test_one(x): pass
"""
