"""One worker's process crashes in C code: its Python stack is printed, and the job ends.

workers: 2
by: -m distdl_jax
says: Fatal Python error: Segmentation fault
says: segmentation_fault.py", line 19 in crash
says: was ended by SIGSEGV; the job ends.
"""

import ctypes

import distdl_jax as dj

P = dj.Partition()


def crash():
    if P.rank == 1:
        ctypes.string_at(8)


crash()
P.allgather_data(0)
