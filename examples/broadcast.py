"""Broadcast: copies of each subtensor go to every worker along the dimensions in which the source has one worker.

mpirun -n 4 python -m distdl_jax examples/broadcast.py
python examples/broadcast.py --simulate 4
"""

import distdl_jax as dj
import jax.numpy as jnp

import show

P_world = show.world(at_least=4)
P_x = P_world.grid([1, 2])
P_y = P_world.grid([2, 2])

show.say(P_world, "Broadcast from P_x, 1 x 2 (workers 0 1), down the columns of P_y, 2 x 2 (workers 0 1 / 2 3).\n")
x = jnp.arange(3.0) + 10 * P_x.rank if P_x.active else dj.zero_volume_tensor()
show.movement(P_world, lambda x: dj.functional.broadcast(x, P_x, P_y, preserve_batch=False), x)
show.say(P_world, "Forward: workers 0 and 2 have worker 0's, 1 and 3 have worker 1's. Adjoint: the copies' add up.")
