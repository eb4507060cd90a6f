"""A layer stands under `if rank == 0`, in a plain loop without jit: the others end without it.

when: long
workers: 2
says: Worker 1 has ended its program
says: worker 0 is about to run broadcast from 1 x 1 (0) to 1 x 2 (0, 1) (if_rank_zero.py
"""

from parts import on_root, rank, spread

if rank == 0:
    spread(on_root(4, 6))
