"""Nothing is wrong, or nobody can tell: these programs must end well.

workers: 2
status: 0
"""

import code
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from parts import P, large, on_root, rank, scatter, spread, sum_all, total

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce

LIMIT = float(os.environ["DISTDL_JAX_TIMEOUT"])


def done(what=""):
    print(f"worker {rank} is done{what}", flush=True)


def compile_many(seconds, size):
    """Compile one short program after the other."""
    began, factor = time.monotonic(), 0.0
    while time.monotonic() - began < seconds:
        factor += 1
        function = jax.jit(lambda x, factor=factor: [x := jnp.sin(factor * x) @ x for _ in range(size)][-1])
        function.lower(jnp.ones((2, 2))).compile()


def chain_of_communicators():
    """Three communicators that overlap in one worker each, a compilation longer than the clock's limit at the far end,
    and workers that wait for it in one communicator while others wait for them in the next. Two of them wait at the
    first partition of one more communicator: the neighbour, and the one at the other end, which has none in common. The
    first partition of all is one of COMM_WORLD, whose timeout sees all of that.

    workers: 4
    timeout: 2
    says: worker 0 is done: 2.0
    says: worker 3 is done: 2.0
    """
    group = MPI.COMM_WORLD.group
    pairs = [(first, first + 1) for first in range(3)]
    comms = {pair[0]: MPI.COMM_WORLD.Create_group(group.Incl(pair)) for pair in pairs if rank in pair}
    P_pairs = {first: dj.Partition(comm) for first, comm in comms.items()}
    again = comms[2].Dup() if rank >= 2 else None
    ends = MPI.COMM_WORLD.Create_group(group.Incl((0, 3))) if rank in (0, 3) else None

    if rank == 3:
        compile_many(1.3 * LIMIT, size=40)
    if again is not None:
        P_pairs[2] = dj.Partition(again)
    if ends is not None:
        assert dj.Partition(ends).size == 2
    for first in sorted(P_pairs, reverse=True):  # who waits for the far end comes late to the next pair
        total = dj.jit(lambda x, P=P_pairs[first]: all_sum_reduce(x, P, axes_keep=()))(jnp.ones(()))
    done(f": {float(total)}")


def forked_while_saving():
    """Workers fork processes that end by themselves, while a checkpoint is written and batches are read.

    by: -m distdl_jax
    says: worker 0 is done: [0, 3, 1] [1, 2]
    says: worker 1 is done: [0, 3, 1] [1, 2]
    """
    warnings.filterwarnings("ignore", ".*fork")  # JAX's and Python's: threads are not forked along
    path = P.broadcast_data(tempfile.mkdtemp() if rank == 0 else None)
    whole = dj.TensorSpec((2_000_000,), P.grid([2]))
    rows = np.arange(4000).reshape(2000, 2)
    statuses = []
    without_with = dj.checkpoint.Manager(path)
    without_with.save(large, whole, 1)
    with dj.checkpoint.Manager(path) as manager, dj.data.batches(rows, dj.TensorSpec((2,), P.grid([2])), 2) as batches:
        without_with.wait()
        for _ in range(3):
            next(batches)
            if not statuses:
                manager.save(large, whole, 2)
            if (child := os.fork()) == 0:
                if len(statuses) == 2:
                    raise ValueError("of the process that was forked")
                sys.exit(3 * len(statuses))
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    done(f": {statuses} {manager.steps()}")


def functions_in_threads():
    """A thread trains beside the program, over a communicator of its own; and one that loads data calls functions that
    need nobody, first of all before the program does anything, or after everything else.

    says: worker 0 is done: 12.0
    says: worker 1 is done: 12.0
    """
    P_own = dj.Partition(MPI.COMM_WORLD.Dup())
    step_in_thread = dj.jit(lambda x: all_sum_reduce(2 * x, P_own, axes_keep=()))
    augment = dj.jit(lambda x: x[::-1])

    def load():
        loader = threading.Thread(target=augment, args=(jnp.ones(3),))
        loader.start()
        loader.join()

    def train():
        for number in range(6):
            step_in_thread(jnp.ones(1 + number // 3)).block_until_ready()
            time.sleep(0.1 * rank)

    training = threading.Thread(target=train)
    if rank == 0:
        load()
        training.start()
    for number in range(6):
        total(jnp.ones(6 - number // 3))
        time.sleep(0.1 * (1 - rank))
        if number == 1 and rank == 1:
            training.start()
    training.join()
    if rank == 1:
        load()
    done(f": {float(total(jnp.ones(6)).sum())}")


def late_in_an_agreement():
    """One worker is late, and the others wait for it in one agreement, each in its own place of it.

    workers: 5
    says: worker 4 is done
    """
    if rank == 2:
        time.sleep(2)
    dj.jit(lambda x: jnp.sum(spread(x)))(on_root(4, 6))
    done()


def lowered_late():
    """All workers lower a checked function anew, one of them late, while the other waits in its trace.

    says: worker 0 is done
    """
    step = dj.jit(lambda x: sum_all(2 * x))
    assert float(step(jnp.ones(2))[0]) == 4
    if rank == 0:
        time.sleep(5)
    step.lower(jnp.ones(3))
    assert float(step(jnp.ones(3))[0]) == 4
    done()


def normal_end():
    """Exits that are caught, errors that all handle, or that a console shows before it goes on, and workers that end at
    different times, each in its own way.

    by: -m distdl_jax
    says: worker 0 is done
    says: worker 1 is done
    says: worker 0 has ended last
    """
    with contextlib.suppress(SystemExit):
        sys.exit(1)
    try:
        dj.jit(lambda x: scatter(x) if rank else spread(x))(on_root(4, 6))
    except dj.PlanError:
        dj.jit(lambda x: jnp.sum(spread(x)))(on_root(4, 6))
    console = code.InteractiveConsole()
    for line in ("1 / 0", "no_such_name"):
        console.runsource(line)
    time.sleep(3 - 3 * rank)
    print(f"worker {rank} is done", flush=rank == 1)
    dj.close()
    MPI.Finalize()
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
    print("worker 0 has ended last")


def one_goes_on():
    """One worker has ended; the other one works on, or waits for it in its own way.

    timeout: 4
    says: s ago or more; the job goes on: worker 0 is at {file}:{+8} in one_goes_on
    says: worker 0 is done
    """
    if rank == 0:
        time.sleep(LIMIT + 4)  # any call that lasts: a barrier of the program's own would, too
        done()


def silent_watchdog():
    """A worker has waited, goes on, and keeps the interpreter's lock, so that it cannot say so.

    A library that reads files for seconds without releasing the lock does that. Meanwhile the worker that it waited for
    ends.

    workers: 3
    says: worker 0 got what worker 1 has read
    """
    import ctypes

    P_reader = P.create_partition_inclusive([1, 2])
    P_first = P.create_partition_inclusive([0, 1])
    if P_reader.active:
        if rank == 2:
            time.sleep(3)
        P_reader.broadcast_data(rank)
    if rank == 1:
        ctypes.PyDLL(None).sleep(5)
    if P_first.active:
        what = P_first.broadcast_data("what worker 1 has read", root=1)
    if rank == 0:
        print(f"worker 0 got {what}")


def slow_but_healthy():
    """All takes longer than the clock allows a wait: compilation, a suspended job, a last program.

    And all clear their caches, while one still runs the step before.

    timeout: 2
    says: worker 0 is done
    says: worker 1 is done
    """
    evaluate = dj.jit(lambda x: jnp.sum(sum_all(2 * x)))
    local = dj.jit(lambda x: x + 1)

    @dj.jit
    def last(x):
        x = sum_all(x)
        return jax.lax.while_loop(lambda state: state[0] < end, lambda state: (clock(), state[1]), (clock(), x))[1]

    def clock():
        def passed():
            time.sleep(0.01)
            return np.float32(time.monotonic() - began)

        return jax.pure_callback(passed, jax.ShapeDtypeStruct((), jnp.float32))

    total(large), local(large)

    # A step still runs on worker 1 while it comes late to the trace of the next function.
    if rank == 0:
        time.sleep(1.5)
    total(large)
    if rank == 1:
        time.sleep(1.5)
    evaluate(large)

    jax.clear_caches()
    total(large), local(large), evaluate(large)

    # Many compilations take longer than the limit, in a thread of the program's own. None of them is long: on a busy
    # machine to trace and lower one, which counts as waiting, would take longer than the limit, too.
    if rank == 0:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(compile_many, 1.3 * LIMIT, size=8).result()
    total(large).block_until_ready()

    # The whole job is suspended while one worker waits for the other.
    pid, pause = os.getpid(), 1.3 * LIMIT
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {pid}; sleep {pause}; kill -CONT {pid}"])
    if rank == 0:
        time.sleep(pause + 1)
    total(large).block_until_ready()

    # The last program is long on one worker; the other one leaves.
    began, end = time.monotonic(), 1.3 * LIMIT if rank == 0 else 0.0
    last(large).block_until_ready()
    done()


def steps_until_ended():
    """Take steps without an end, after a line that says that they have begun: for `hosts/`, which ends them."""
    total(large).block_until_ready()
    if rank == 0:
        print("steps have begun", flush=True)
    while True:
        total(large).block_until_ready()
        time.sleep(0.1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
