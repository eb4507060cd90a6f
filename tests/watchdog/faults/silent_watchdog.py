"""Nothing is wrong: a worker has waited, goes on, and keeps the interpreter's lock, so that it cannot say so.

A library that reads files for seconds without releasing the lock does that. Meanwhile the worker that it waited for
ends.

workers: 3
status: 0
says: worker 0 got what worker 1 has read
"""

import ctypes
import time

from parts import P, rank

P_reader = P.create_partition_inclusive([1, 2])
P_first = P.create_partition_inclusive([0, 1])
if P_reader.active:
    if rank == 2:
        time.sleep(3)
    P_reader.broadcast_data(rank)
if rank == 1:
    ctypes.PyDLL(None).sleep(5)
if P_first.active:
    what = P_first.broadcast_data("what worker 1 has read", root=1)
if rank == 0:
    print(f"worker 0 got {what}")
