"""Workers that raise, or leave as if they had.

workers: 2
"""

import os
import queue
import signal
import sys
import threading

import jax
import jax.numpy as jnp
from parts import P, between_steps, dj, large, rank, sum_all, total


def compilation_fails():
    """The program does not compile on one worker.

    says: Worker 1 of 2 raised
    says: {file}
    """

    @dj.jit
    def total(x):
        if rank == 1:
            x = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return sum_all(x)

    total(large)


def excepthook_replaced():
    """One worker raises, and the program has a hook of its own in the place of `sys.excepthook`, which ends nothing.

    says: the program's own hook: no such configuration
    says: Worker 1 has ended its program with exit status 1
    """
    sys.excepthook = lambda kind, error, trace: print(f"the program's own hook: {error}", file=sys.stderr)
    if rank == 1:
        raise ValueError("no such configuration")
    P.allgather_data(0)


def exception_in_data_loading():
    """Loading data fails on one worker while the others wait for it.

    workers: 3
    says: Worker 2 of 3 raised
    says: FileNotFoundError
    says: in load
    """

    def load(number):
        return open("/does/not/exist") if rank == 2 and number == 3 else large

    for number in range(6):
        total(load(number))


def keyboard_interrupt():
    """One worker is interrupted.

    says: Worker 1 of 2 raised
    says: KeyboardInterrupt
    """
    between_steps(os.kill, os.getpid(), signal.SIGINT)


def out_of_memory():
    """One worker asks for more memory than there is.

    says: Worker 1 of 2 raised
    says: RESOURCE_EXHAUSTED
    """
    between_steps(lambda: jnp.ones((1 << 20, 1 << 20, 64)).block_until_ready())


def output_closed():
    """One worker's output is closed, as when a terminal or a full disk is behind it; then it fails.

    says: ValueError: nothing is open
    """
    total(large)
    if rank == 1:
        sys.stdout.close()
        sys.stderr.close()
        raise ValueError("nothing is open")
    total(large)


def system_exit_under_python():
    """One worker raises SystemExit itself under plain `python`, which up to Python 3.11 keeps the status to itself.

    timeout: 2
    says: Worker 1 has ended its program
    """
    total = jax.jit(lambda x: sum_all(x))
    total(large).block_until_ready()
    if rank == 1:
        raise SystemExit("no data")
    total(large).block_until_ready()


def thread_raises():
    """A thread of one worker raises, which ends only that thread; the program waits for what it was to bring.

    timeout: 5
    says: Exception in thread loader:
    says: OSError: no such file
    says: Worker 1 is at {file}:{+16} in thread_raises
    """
    batches = queue.Queue()

    def load():
        if rank == 1:
            raise OSError("no such file")
        batches.put(4)

    threading.Thread(target=load, name="loader").start()
    x = jnp.ones(batches.get())
    jax.jit(lambda x: sum_all(x))(x).block_until_ready()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
