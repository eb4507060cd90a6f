"""One worker skips a layer.

when: long
workers: 3
says: The workers' programs differ
says: repartition from 1 x 1 (0) to 1 x 3 (0-2) (layer_skipped.py
says: the plan of forward
"""

from parts import dj, on_root, rank, scatter, spread


@dj.jit
def forward(x):
    y = spread(x)
    return y if rank == 2 else scatter(x)


forward(on_root(4, 6))
