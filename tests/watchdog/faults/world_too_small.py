"""The program wants more workers than were started.

workers: 2
says: `ranks` (=(0, 1, 2, 3)) names rank 2, but the partition of 2 workers has ranks 0 to 1
says: To start 4 workers: `mpiexec -n 4 python -m distdl_jax PROGRAM`
"""

from parts import P

P.create_partition_inclusive(range(4))
