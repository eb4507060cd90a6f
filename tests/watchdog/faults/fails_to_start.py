"""One worker's environment is such that JAX can't be imported there; the other one would wait for it in MPI's start.

workers: 2
says: Worker 1 of 2 (process
says: ended with exit status 1, before it had a partition with others; the job ends.
says: ValueError: invalid truth value 'lots' for environment 'JAX_ENABLE_X64'
"""

import os
import sys

if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    os.environ["JAX_ENABLE_X64"] = "lots"
os.execv(sys.executable, [sys.executable, "-m", "distdl_jax", "-c", "import distdl_jax as dj; dj.Partition()"])
