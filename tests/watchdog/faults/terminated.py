"""One worker gets SIGTERM while it waits in a compiled program, inside an event loop that listens to signals itself.

workers: 2
by: -m distdl_jax
says: Worker 0 has heard of SIGUSR1
says: (most recent call first)
says: terminated.py", line
says: Worker 0 of 2 (process
says: was ended by SIGTERM; the job ends.
"""

import asyncio
import os
import signal
import threading
import time

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
total(jnp.ones(1_000_000))


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
    total(jnp.ones(1_000_000))


asyncio.run(train())
