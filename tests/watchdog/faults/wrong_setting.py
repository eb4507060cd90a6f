"""A setting is wrong on one worker: all refuse it, each with the same sentence, and none waits for the others.

workers: 2
status: 0
says: worker 0 refuses: The environment variable DISTDL_JAX_ONEDNN (='lots', on worker 1) must be on or off
says: worker 1 refuses: The environment variable DISTDL_JAX_ONEDNN (='lots', on worker 1) must be on or off
"""

import os

from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
if rank == 1:
    os.environ["DISTDL_JAX_ONEDNN"] = "lots"

import distdl_jax as dj  # noqa: E402

try:
    dj.Partition()
except dj.SetupError as error:
    print(f"worker {rank} refuses: {error}")
