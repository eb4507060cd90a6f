"""mpirun belongs to another MPI than Python's: every process believes that it is alone.

workers: none
environment: PMI_SIZE=4
says: The launcher started 4 processes, but this one believes that it is alone
"""

import distdl_jax as dj

dj.Partition()
