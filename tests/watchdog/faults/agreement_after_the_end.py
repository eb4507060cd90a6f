"""An exit handler that was there before the first partition agrees with others, on one worker only.

workers: 2
timeout: 4
when: long
says: distdl_jax ends the job: the programs of all workers have ended, but
says: is still at agreement_after_the_end.py:17 in last
"""

import atexit

import distdl_jax as dj


def last():
    if P.rank == 0:
        P.allgather_data(0)


atexit.register(last)
P = dj.Partition()
