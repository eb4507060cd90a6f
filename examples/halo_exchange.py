"""Halo exchange: every block with what its neighbours hold around it, corners too.

mpirun -n 4 python -m distdl_jax examples/halo_exchange.py
python examples/halo_exchange.py --simulate 4
"""

import distdl_jax as dj
import jax.numpy as jnp

import show

P_world = show.world(at_least=4)
P_x = P_world.grid([2, 2])
halo = ((1, 1), (0, 1))  # a row above and a row below, a column to the right

show.say(P_world, "A 4 x 4 tensor in 2 x 2 blocks on P_x, 2 x 2 (workers 0 1 / 2 3); 12 is row 1, column 2.")
show.say(P_world, "Each worker asks for a row above, a row below and a column to the right, where there are any.\n")
if P_x.active:
    row, column = P_x.index
    x = 10.0 * (2 * row + jnp.arange(2.0)[:, None]) + 2 * column + jnp.arange(2.0)
else:
    x = dj.zero_volume_tensor()
show.movement(P_world, lambda x: dj.functional.halo_exchange(x, P_x, halo), x)
show.say(P_world, "Adjoint: each halo's cotangent is added to its owner's: 11 was held by workers 0 and 1.")
