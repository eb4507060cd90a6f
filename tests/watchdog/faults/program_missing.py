"""The program's file is missing on one host.

workers: 2
says: there is no file 'no_such_program.py'
says: Worker 1 of 2 (process
says: ended with exit status 1, before it had a partition with others; the job ends.
"""

import os
import sys

is_there = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) != "1"
program = ["-c", "import distdl_jax as dj; dj.Partition()"] if is_there else ["no_such_program.py"]
os.execv(sys.executable, [sys.executable, "-m", "distdl_jax", *program])
