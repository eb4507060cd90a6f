"""Workers that wait or hang.

workers: 2
"""

import os
import resource
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
from mpi4py import MPI
from parts import P, large, on_root, others_wait, rank, scatter, spread, sum_all, total

import distdl_jax as dj


def take_all_descriptors():
    try:
        while True:
            os.open(os.devnull, os.O_RDONLY)
    except OSError:
        pass


def compilation_hangs():
    """One worker's compiler hangs: a function in the place, and with the name, of JAX's own never returns.

    timeout: 1
    when: long
    says: distdl_jax: worker 1 has compiled for
    says: Worker 1 compiles ({file}:
    """
    if rank == 1:
        compiler = jax.__path__[0] + "/_src/compiler.py"
        names = {}
        exec(compile("def hangs():\n    import time\n    while True: time.sleep(1)", compiler, "exec"), names)
        jax._src.compiler.backend_compile_and_load = lambda *args, **kwargs: names["hangs"]()
    dj.jit(lambda x: sum_all(x))(jnp.ones(3))


def coordinator_stopped():
    """Worker 0, which knows of all others, is stopped; the other one waits for it.

    timeout: 6
    says: Worker 0, which knows of all others, was not heard from
    """
    others_wait(os.kill, os.getpid(), signal.SIGSTOP, worker=0)


def no_descriptors():
    """A worker that waits has no file descriptor left, without which JAX itself can't be asked; the other one sleeps.

    timeout: 4
    says: Worker 0 has waited for
    says: Worker 1 did not come to call 2
    """
    total(large).block_until_ready()
    if rank == 1:
        time.sleep(10_000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    take_all_descriptors()
    total(large).block_until_ready()


def nothing_to_open():
    """One worker has no file descriptor left, no temporary folder and no stderr, and sleeps: its watchdog goes on.

    timeout: 6
    says: Worker 1 is at {file}:{+12} in nothing_to_open
    """
    if rank == 1:
        os.environ["TMPDIR"] = "/nowhere"
        sys.stderr.close()
        most = len(os.listdir("/dev/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        take_all_descriptors()
        time.sleep(10_000)
    P.allgather_data(0)


def recorded_operations():
    """A worker that waits is asked what it did last: with DISTDL_JAX_DEBUG=1 its last operations are recorded.

    when: long
    timeout: 3
    environment: DISTDL_JAX_DEBUG=1
    says: Its last operations:
    says: s ago send to worker 1 (1000000 x float32): took
    says: s ago recv from worker 0 (1000000 x float32): goes on
    says: What worker 0 knows:
    """
    move = dj.jit(lambda x: jnp.sum(spread(x)) + jnp.sum(scatter(x)))
    x = on_root(1000, 1000)
    jax.block_until_ready(move(x))
    if rank == 0:
        time.sleep(10_000)
    jax.block_until_ready(move(x))


def sleeps_forever():
    """One worker never comes: it hangs in something of its own, beside many threads. Each has one that calls functions.

    workers: 3
    timeout: 2
    says: The job goes on; the limit is {timeout} s (DISTDL_JAX_TIMEOUT
    says: the limit is {timeout} s (DISTDL_JAX_TIMEOUT, in seconds
    says: Worker 2 did not come to call 2, of total
    says: of its plan
    says: Worker 2 is at {file}:
    says: in wait_for_a_file, outside any operation
    says: What worker 0 was told last, and did, by its own clock:
    says: s: the job ends, because of worker 2
    """
    augment = dj.jit(lambda x: x + 1)

    def load():
        while True:
            augment(batch)
            time.sleep(0.01)

    def wait_for_a_file():
        time.sleep(10_000)

    total(large)
    augment(batch := jnp.ones(3))
    threading.Thread(target=load, daemon=True).start()
    if rank == 2:
        for _ in range(120):  # more than faulthandler writes the stacks of
            threading.Thread(target=time.sleep, args=(10_000,), daemon=True).start()
        wait_for_a_file()
    total(large)


def stopped():
    """One worker is stopped (SIGSTOP), as by a debugger or a system that is out of memory; the other one waits for it.

    timeout: 6
    says: Worker 1 was not heard from for {timeout} s.
    """
    others_wait(os.kill, os.getpid(), signal.SIGSTOP)


def training_in_a_thread():
    """The program trains in a thread of its own; on one worker it has ended, and the main thread goes on alone.

    timeout: 6
    says: Worker 0 is about to run allgather_data on 2 (0, 1) ({file}:
    says: Worker 1 is at {file}:
    """

    def train():
        P.allgather_data(0)
        if rank == 0:
            P.allgather_data(0)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    time.sleep(10_000)


def two_threads_agree():
    """A thread agrees with others all the time, over a communicator of its own; the program waits for a worker in vain.

    timeout: 4
    when: long
    says: Worker 0 has waited for
    says: Worker 0 is about to run allgather_data on 2 (0, 1) ({file}:{+19} in two_threads_agree)
    says: and waits for worker 1.
    """
    P_own = dj.Partition(MPI.COMM_WORLD.Dup())

    def exchange():
        while True:
            P_own.allgather_data(0)
            time.sleep(0.01)

    threading.Thread(target=exchange, daemon=True).start()
    if rank == 1:
        time.sleep(10_000)
    P.allgather_data(1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
