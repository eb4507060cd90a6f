"""A thread agrees with others all the time, over a communicator of its own; the program waits for a worker in vain.

workers: 2
timeout: 4
when: long
says: Worker 0 has waited for
says: Worker 0 is about to run allgather_data on 2 (0, 1) (two_threads_agree.py:29 in <module>), and waits for worker 1.
"""

import threading
import time

from mpi4py import MPI

import distdl_jax as dj

P, P_own = dj.Partition(), dj.Partition(MPI.COMM_WORLD.Dup())


def exchange():
    while True:
        P_own.allgather_data(0)
        time.sleep(0.01)


threading.Thread(target=exchange, daemon=True).start()
if P.rank == 1:
    time.sleep(10_000)
P.allgather_data(1)
