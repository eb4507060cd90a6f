"""All-sum-reduce: the workers that agree in every other index add up, and all of them get the sum.

mpirun -n 4 python -m distdl_jax examples/all_sum_reduce.py
python examples/all_sum_reduce.py --simulate 4
"""

import distdl_jax as dj
import jax.numpy as jnp

import show

P_world = show.world(at_least=4)
P_x = P_world.grid([2, 2])

show.say(P_world, "All-sum-reduce along dimension 1 of P_x, 2 x 2: workers 0 and 1 are a team, and so are 2 and 3.\n")
x = jnp.full(3, 10.0**P_x.rank) * jnp.arange(1, 4) if P_x.active else dj.zero_volume_tensor()
show.movement(P_world, lambda x: dj.functional.all_sum_reduce(x, P_x, axes_reduce=1), x)
show.say(P_world, "It is its own adjoint: the cotangents are summed over the same teams.")
