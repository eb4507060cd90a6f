"""Nothing is wrong: lines at Python's own prompt raise, on all workers or on one, and the prompt goes on.

workers: 2
by: python
status: 0
says: worker 0 holds 2
says: worker 1 holds 2
"""

import os
import sys
import tempfile

LINES = r"""
import os, jax.numpy as jnp, distdl_jax as dj
P = dj.Partition()
1 / 0
what is no Python
no_such_name if P.rank else None
total = dj.functional.all_sum_reduce(jnp.ones(()), P, axes_keep=())
os.write(1, f"worker {P.rank} holds {total}\n".encode())  # whole, among the prompts of others
"""

with tempfile.TemporaryFile() as lines:
    lines.write(LINES.encode())
    lines.seek(0)
    os.dup2(lines.fileno(), 0)
    os.execv(sys.executable, [sys.executable, "-i", "-q"])
