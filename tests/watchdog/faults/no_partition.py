"""One worker makes no partition: it has gone another way before the first one.

when: long
workers: 2
timeout: 3
says: A worker has waited for {timeout} s
says: no_partition.py
says: to come to the first partition of a communicator. The job goes on.
says: for others to come to the first partition of a communicator
"""

import time

from mpi4py import MPI

import distdl_jax as dj

if MPI.COMM_WORLD.rank == 0:
    dj.Partition()
time.sleep(10_000)
