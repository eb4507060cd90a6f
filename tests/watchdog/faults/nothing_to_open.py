"""One worker has no file descriptor left, no temporary folder and no stderr, and sleeps: its watchdog goes on.

workers: 2
timeout: 6
says: Worker 1 is at nothing_to_open.py:26 in <module>
"""

import os
import resource
import sys
import time

import distdl_jax as dj

P = dj.Partition()
if P.rank == 1:
    os.environ["TMPDIR"] = "/nowhere"
    sys.stderr.close()
    most = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        time.sleep(10_000)
P.allgather_data(0)
