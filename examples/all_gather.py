"""All-gather: every worker gets the blocks of all workers along some dimensions; the adjoint is reduce-scatter.

mpirun -n 4 python -m distdl_jax examples/all_gather.py
python examples/all_gather.py --simulate 4
"""

import distdl_jax as dj
import jax.numpy as jnp

import show

P_world = show.world(at_least=4)
P_x = P_world.grid([2, 2])

show.say(P_world, "A 2 x 4 tensor in 1 x 2 blocks on P_x, 2 x 2 (workers 0 1 / 2 3); 12 is row 1, column 2.")
show.say(P_world, "All-gather along dimension 1: every worker gets its whole row.\n")
if P_x.active:
    row, column = P_x.index
    x = 10.0 * row + 2 * column + jnp.arange(2.0).reshape(1, 2)
else:
    x = dj.zero_volume_tensor()
show.movement(P_world, lambda x: dj.functional.all_gather(x, P_x, axes=1), x)
show.say(P_world, "Adjoint: the cotangents of a row are added, and each worker gets its block of the sum.")
