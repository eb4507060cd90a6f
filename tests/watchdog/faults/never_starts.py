"""One worker hangs before it starts MPI (a file system that doesn't answer, say); the other one waits in MPI's start.

workers: 2
timeout: 3
says: Worker 0 of 2 (process
says: has waited for {timeout} s (DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off) for MPI to start
"""

import os
import sys
import time

if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    time.sleep(10_000)
os.execv(sys.executable, [sys.executable, "-m", "distdl_jax", "-c", "import distdl_jax as dj; dj.Partition()"])
