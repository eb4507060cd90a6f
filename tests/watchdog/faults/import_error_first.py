"""One worker can't import what the program needs, before it imports distdl_jax; the others wait for it in MPI.

workers: 2
by: -m distdl_jax
says: ended with exit status 1, before it had a partition with others; the job ends.
says: No module named 'no_such_module'
"""

import os

if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    import no_such_module  # noqa: F401

import distdl_jax as dj

dj.Partition()
