"""Nothing is wrong: a program has a handler of SIGTERM for a moment, by names that it imported before the library.

workers: 2
by: -m distdl_jax
status: 0
says: worker 0 has heard of 15
says: worker 1 has heard of 15
"""

from os import getpid, kill
from signal import SIGTERM, signal
from time import sleep

import distdl_jax as dj

P = dj.Partition()
heard = []
before = signal(SIGTERM, lambda number, frame: heard.append(number))
kill(getpid(), SIGTERM)
sleep(0.3)
signal(SIGTERM, before)
P.allgather_data(0)
print(f"worker {P.rank} has heard of {heard[0]}", flush=True)
