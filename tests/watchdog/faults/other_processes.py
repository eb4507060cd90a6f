"""Nothing is wrong: workers fork processes that end in many ways, catch exits, have a SIGTERM handler of their own, and
a descriptor that wakes up for signals.

workers: 2
status: 0
says: worker 0 is done: [0, 1, 4]
says: worker 1 is done: [0, 1, 4]
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings

wakes, wakeup = socket.socketpair()
wakeup.setblocking(False)
signal.set_wakeup_fd(wakeup.fileno())  # before the library wants to know of signals, too

parts = importlib.import_module("parts")
P_all, dj, jnp, rank = parts.P_all, parts.dj, parts.jnp, parts.rank
warnings.filterwarnings("ignore", "os.fork")  # JAX's: its threads are not forked along
total = dj.jit(lambda x: dj.functional.all_sum_reduce(x, P_all, axes_keep=()))
fork = multiprocessing.get_context("fork")


def square(x):
    return x * x


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
