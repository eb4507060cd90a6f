"""Sum-reduce: the adjoint of broadcast; subtensors add up along the dimensions in which the target has one worker.

mpirun -n 4 python -m distdl_jax examples/sum_reduce.py
python examples/sum_reduce.py --simulate 4
"""

import distdl_jax as dj
import jax.numpy as jnp

import show

P_world = show.world(at_least=4)
P_x = P_world.grid([2, 2])
P_y = P_world.grid([1, 2], [3, 0])

show.say(P_world, "Sum-reduce from P_x, 2 x 2 (workers 0 1 / 2 3), down the columns to P_y, 1 x 2 (workers 3 0).\n")
x = jnp.full(3, 10.0**P_x.rank) * jnp.arange(1, 4) if P_x.active else dj.zero_volume_tensor()
show.movement(P_world, lambda x: dj.functional.sum_reduce(x, P_x, P_y, preserve_batch=False), x)
show.say(P_world, "Forward: worker 3 has the sum of 0 and 2, worker 0 that of 1 and 3. Adjoint: they get copies back.")
