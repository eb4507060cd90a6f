"""Workers that end otherwise than by an exception, under the supervisor.

workers: 2
by: -m distdl_jax
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from os import _exit  # before the library is there

import jax
from parts import P, between_steps, large, others_wait, rank, sum_all, total


def exit_of_the_system():
    """One worker ends by `os._exit(0)`, which no code in the worker sees, while another one waits for it.

    says: Worker 1 of 2 (process {...}) ended with exit status 0, by os._exit, os.exec... or exit() in C
    says: (dj.close() and MPI.Finalize() come before such an end); the job ends.
    """
    others_wait(_exit, 0)


def exit_with_an_error():
    """One worker calls sys.exit with an error while the others go on, under plain jax.jit.

    when: long
    workers: 3
    says: Worker 1 has ended its program with exit status 3
    """
    total = jax.jit(lambda x: sum_all(x))
    total(large)
    if rank == 1:
        sys.exit(3)
    total(large)


def killed():
    """One worker is killed (SIGKILL), as by a system that has run out of memory.

    says: Worker 1 of 2 (process {...}) was ended by SIGKILL: most often the system was out of memory; the job ends.
    """
    between_steps(os.kill, os.getpid(), signal.SIGKILL)


def os_exit_with_an_error():
    """One worker ends by `os._exit(3)`, taken from `os` before the library was there.

    says: Worker 1 of 2 (process {...}) ended with exit status 3, by os._exit, os.exec... or exit() in C; the job ends.
    """
    others_wait(_exit, 3)


def replaced_by_another_program():
    """One worker replaces its program by another one, which fails: the others would wait for it.

    says: Worker 1 of 2 (process {...}) ended with exit status 5
    """
    others_wait(os.execv, sys.executable, [sys.executable, "-c", "raise SystemExit(5)"])


def segmentation_fault():
    """One worker's process crashes in C code: its Python stack is printed, and the job ends.

    says: Fatal Python error: Segmentation fault
    says: {file}", line {+7} in segmentation_fault
    says: was ended by SIGSEGV; the job ends.
    """
    others_wait(ctypes.string_at, 8)


def system_exit_raised():
    """One worker raises SystemExit itself, which Python tells nobody: the program that runs it sees it.

    says: Worker 1 has ended its program with exit status 3
    """
    if rank == 1:
        raise SystemExit(3)
    P.allgather_data(0)


def terminated():
    """One worker gets SIGTERM while it waits in a compiled program, in an event loop that listens to signals itself.

    says: Worker 0 has heard of SIGUSR1
    says: (most recent call first)
    says: {file}", line {+21} in train
    says: Worker 0 of 2 (process {...}) was ended by SIGTERM; the job ends.
    """
    total(large)

    async def train():
        heard = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, heard.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await heard.wait()
        print(f"Worker {rank} has heard of SIGUSR1", flush=True)
        if rank == 0:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            time.sleep(10_000)
        total(large)

    asyncio.run(train())


def terminated_at_the_end():
    """A worker whose program has ended gets SIGTERM while it waits for the other's end.

    says: Worker 1 of 2 (process {...}) was ended by SIGTERM; the job ends.
    """
    pids = P.allgather_data(os.getpid())
    if rank == 0:
        time.sleep(1)
        os.kill(pids[1], signal.SIGTERM)
        time.sleep(10_000)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
