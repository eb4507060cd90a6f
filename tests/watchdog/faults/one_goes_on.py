"""Nothing is wrong, or nobody can tell: one worker has ended; the other one works on, or waits for it in its own way.

workers: 2
timeout: 4
status: 0
says: s ago or more; the job goes on: worker 0 is at one_goes_on.py:19 in <module>
says: worker 0 is done
"""

import os
import time

import distdl_jax as dj

P = dj.Partition()
if P.rank == 0:
    # Any call that lasts: a barrier of the program's own would, too.
    limit = float(os.environ["DISTDL_JAX_TIMEOUT"])
    time.sleep(limit + 4)
    print("worker 0 is done")
