"""Two layers are called in a different order on one worker.

when: long
workers: 2
says: The workers' programs differ
says: broadcast from 1 x 1 (0) to 1 x 2 (0, 1) (layers_swapped.py
says: repartition from 1 x 1 (0) to 1 x 2 (0, 1) (layers_swapped.py
"""

from parts import dj, on_root, rank, scatter, spread


@dj.jit
def forward(x):
    first, second = (scatter, spread) if rank == 0 else (spread, scatter)
    return first(x), second(x)


forward(on_root(4, 6))
