"""Nothing is wrong: an exit handler that was there before the first partition takes long, or waits for another worker.

workers: 2
timeout: 4
status: 0
says: distdl_jax: the programs of all workers have ended, but
says: is still at late_exit_handler.py:20 in wait
says: worker 0 is done
"""

import atexit
import os
import time

import distdl_jax as dj


def wait():
    if P.rank == 0:
        time.sleep(float(os.environ["DISTDL_JAX_TIMEOUT"]) + 3)
        print("worker 0 is done")


atexit.register(wait)
P = dj.Partition()
