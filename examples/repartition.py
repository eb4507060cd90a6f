"""Repartition: the same tensor, cut in another way, on other workers.

mpirun -n 4 python -m distdl_jax examples/repartition.py
python examples/repartition.py --simulate 4
"""

import distdl_jax as dj
import jax.numpy as jnp

import show

P_world = show.world(at_least=4)
P_x = P_world.grid([3, 1])
P_y = P_world.grid([1, 3], [1, 2, 3])

show.say(
    P_world, "Repartition a 3 x 5 tensor from rows on workers 0 1 2 to columns on workers 1 2 3; 12 is row 1, column 2."
)
show.say(P_world, "Five columns on three workers: the first two get one more than the last.\n")
x = 10.0 * P_x.rank + jnp.arange(5.0).reshape(1, 5) if P_x.active else dj.zero_volume_tensor()
show.movement(P_world, lambda x: dj.functional.repartition(x, P_x, P_y, preserve_batch=False), x)
show.say(P_world, "Adjoint: every element goes back to where it came from; nothing is added.")
