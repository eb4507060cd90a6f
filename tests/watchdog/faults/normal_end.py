"""Nothing is wrong: exits that are caught, errors that all handle, or that a console shows before it goes on, and
workers that end at different times, each in its own way.

workers: 2
by: -m distdl_jax
status: 0
says: worker 0 is done
says: worker 1 is done
says: worker 0 has ended last
"""

import code
import contextlib
import os
import sys
import time

from mpi4py import MPI
from parts import dj, jnp, on_root, rank, scatter, spread

with contextlib.suppress(SystemExit):
    sys.exit(1)
try:
    dj.jit(lambda x: scatter(x) if rank else spread(x))(on_root(4, 6))
except dj.PlanError:
    dj.jit(lambda x: jnp.sum(spread(x)))(on_root(4, 6))
console = code.InteractiveConsole()
for line in ("1 / 0", "no_such_name"):
    console.runsource(line)
time.sleep(3 - 3 * rank)
print(f"worker {rank} is done", flush=rank == 1)
dj.close()
MPI.Finalize()
if rank == 1:
    os._exit(0)
time.sleep(0.5)
print("worker 0 has ended last")
