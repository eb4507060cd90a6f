"""Nothing is wrong: programs that must end well, and do something before the first partition, or before all imports.

workers: 2
status: 0
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from os import getpid, kill  # before the library is there


def square(x):
    return x * x


def late_exit_handler():
    """An exit handler that was there before the first partition takes long, or waits for another worker.

    timeout: 4
    says: distdl_jax: the programs of all workers have ended, but
    says: is still at {file}:{+11} in wait
    says: worker 0 is done
    """

    def wait():
        if P.rank == 0:
            time.sleep(float(os.environ["DISTDL_JAX_TIMEOUT"]) + 3)
            print("worker 0 is done")

    atexit.register(wait)
    import distdl_jax as dj

    P = dj.Partition()


def other_processes():
    """Workers fork processes that end in many ways, catch exits, have a SIGTERM handler of their own, and a descriptor
    that wakes up for signals.

    says: worker 0 is done: [0, 1, 4]
    says: worker 1 is done: [0, 1, 4]
    """
    import socket

    wakes, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())  # before the library wants to know of signals, too

    from parts import jnp, rank, total

    warnings.filterwarnings("ignore", "os.fork")  # JAX's: its threads are not forked along
    fork = multiprocessing.get_context("fork")

    total(jnp.ones(3))
    with fork.Pool(2) as pool:  # ends its processes with SIGTERM
        squares = pool.map(square, range(3))
    loader = fork.Process(target=time.sleep, args=(1000,), daemon=True)
    loader.start()
    loader.terminate()
    loader.join()
    assert loader.exitcode == -signal.SIGTERM, loader.exitcode
    for ends, status in ((sys.exit, 3), (square, 1)):  # the latter raises
        other = fork.Process(target=ends, args=(3,) if status == 3 else ())
        other.start()
        other.join()
        assert other.exitcode == status, other.exitcode

    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    wakes.settimeout(60)
    assert wakes.recv(1)[0] == signal.SIGUSR1
    assert signal.set_wakeup_fd(-1) == wakeup.fileno()
    told = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)  # for the watchdog to see it too
    assert told == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, before)
    for seconds in (0.0, 0.02, 0.07) * 4:  # handlers that are gone before the watchdog sees the signal
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        time.sleep(seconds)
        signal.signal(signal.SIGTERM, before)
        time.sleep(0.3)
    with contextlib.suppress(SystemExit):
        sys.exit(2)
    if rank == 0:
        time.sleep(2)  # the other one waits meanwhile, in a program
    total(jnp.ones(3))
    print(f"worker {rank} is done: {squares}")
    if rank == 0:
        time.sleep(2)


def own_signal_handler():
    """A program has a handler of SIGTERM for a moment, by names that it imported before the library.

    by: -m distdl_jax
    says: worker 0 has heard of 15
    says: worker 1 has heard of 15
    """
    from signal import SIGTERM, signal

    import distdl_jax as dj

    P = dj.Partition()
    heard = []
    before = signal(SIGTERM, lambda number, frame: heard.append(number))
    kill(getpid(), SIGTERM)
    time.sleep(0.3)
    signal(SIGTERM, before)
    P.allgather_data(0)
    print(f"worker {P.rank} has heard of {heard[0]}", flush=True)


def prompt():
    """Lines at Python's own prompt raise, on all workers or on one, and the prompt goes on.

    by: python
    says: worker 0 holds 2
    says: worker 1 holds 2
    """
    text = r"""
import os, jax.numpy as jnp, distdl_jax as dj
P = dj.Partition()
1 / 0
what is no Python
no_such_name if P.rank else None
total = dj.functional.all_sum_reduce(jnp.ones(()), P, axes_keep=())
os.write(1, f"worker {P.rank} holds {total}\n".encode())  # whole, among the prompts of others
"""
    with tempfile.TemporaryFile() as lines:
        lines.write(text.encode())
        lines.seek(0)
        os.dup2(lines.fileno(), 0)
        os.execv(sys.executable, [sys.executable, "-i", "-q"])


def spawned_processes():
    """Workers have a pool of processes that import the program, and so the library, anew.

    says: worker 0 is done: [0, 1, 4]
    says: worker 1 is done: [0, 1, 4]
    """
    import distdl_jax as dj

    P = dj.Partition()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square_with_the_library, range(3))
    P.allgather_data(0)
    print(f"worker {P.rank} is done: {squares}", flush=True)


def square_with_the_library(x):
    import distdl_jax as dj

    return x * x if dj else None


def teams():
    """Two of three workers have a communicator of their own, made first, and call functions of their own.

    workers: 3
    says: worker 0 is done: 3.0
    says: worker 1 is done: 3.0
    says: worker 2 is done: 3.0
    """
    from mpi4py import MPI

    import distdl_jax as dj
    from distdl_jax.functional import all_sum_reduce

    rank = MPI.COMM_WORLD.rank
    P_team = dj.Partition(MPI.COMM_WORLD.Split(rank > 0))

    import jax.numpy as jnp

    def loss(x):
        return jnp.sum(all_sum_reduce(x, P_team, axes_keep=())) / P_team.size

    of_the_only_ones = dj.jit(lambda x: dj.value_and_grad(loss)(x))  # as long as there is no partition of all workers
    in_team = dj.jit(lambda x: dj.value_and_grad(loss, partition=P_team)(x))

    for size in range(2, 2 + P_team.size):
        value, gradient = of_the_only_ones(jnp.ones(size))
        assert float(value) == size * P_team.size and gradient.tolist() == [1.0] * size, (value, gradient)

    P = dj.Partition()
    P_some = P.create_partition_inclusive([0, 2])
    in_all = dj.jit(lambda x: all_sum_reduce(x, P, axes_keep=()) + all_sum_reduce(x, P_some, axes_keep=()) * 0)

    for size in range(1, 1 + P_team.size):
        in_team(jnp.ones(size + 7))
    total = in_all(jnp.ones(()))
    for _ in range(3 * P_team.size):
        in_team(jnp.ones(2))
    total = in_all(jnp.ones(()))
    print(f"worker {rank} is done: {float(total)}", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
