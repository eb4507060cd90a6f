"""The workers make a partition of different shapes.

when: long
workers: 4
says: The workers' programs differ
says: to 1 x 4 (0-3)
says: to 2 x 2 (0-3)
"""

from parts import P, P_root, dj, nn, on_root, rank

P_grid = P.grid([1, 4] if rank < 2 else [2, 2])
dj.jit(nn.Repartition(P_root, P_grid))(on_root(4, 6))
