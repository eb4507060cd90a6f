"""The program trains in a thread of its own; on one worker it has ended, and the main thread goes on alone.

workers: 2
timeout: 6
says: Worker 0 is about to run allgather_data on 2 (0, 1) (training_in_a_thread.py:
says: Worker 1 is at training_in_a_thread.py:
"""

import threading
import time

import distdl_jax as dj

P = dj.Partition()


def train():
    P.allgather_data(0)
    if P.rank == 0:
        P.allgather_data(0)


thread = threading.Thread(target=train)
thread.start()
thread.join()
time.sleep(10_000)
