"""One worker calls the layer jitted, the other without jit.

workers: 2
timeout: 2
says: Worker 0 is about to run the plan of <lambda>
says: Worker 1 is in a compiled program (jit_and_eager.py
"""

from parts import dj, on_root, rank, spread

forward = dj.jit(lambda x: spread(x)) if rank == 0 else spread
forward(on_root(4, 6))
