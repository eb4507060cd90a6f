"""One worker raises, and the program has a hook of its own in the place of `sys.excepthook`, which ends nothing.

workers: 2
says: the program's own hook: no such configuration
says: Worker 1 has ended its program with exit status 1
"""

import sys

import distdl_jax as dj

P = dj.Partition()
sys.excepthook = lambda kind, error, trace: print(f"the program's own hook: {error}", file=sys.stderr)
if P.rank == 1:
    raise ValueError("no such configuration")
P.allgather_data(0)
