"""One worker leaves before the first partition, by a wrong option, say; the others wait for it in MPI's start.

workers: 2
by: -m distdl_jax
says: error: unrecognized arguments: --fast
says: Worker 1 of 2 (process
says: ended with exit status 2, before it had a partition with others; the job ends.
"""

import argparse
import os

import distdl_jax as dj

worker = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
argparse.ArgumentParser().parse_args(["--fast"] if worker == "1" else [])
dj.Partition()
