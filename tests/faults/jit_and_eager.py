"""One worker calls the layer jitted, the other without jit.

workers: 2
says: the plan of <lambda>
says: Worker 1 has ended its program
"""

from parts import dj, on_root, rank, spread

forward = dj.jit(lambda x: spread(x)) if rank == 0 else spread
forward(on_root(4, 6))
