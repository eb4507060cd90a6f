"""Reduce-scatter: workers add up their terms, and each keeps its block of the sum; the adjoint is all-gather.

mpirun -n 4 python -m distdl_jax examples/reduce_scatter.py
python examples/reduce_scatter.py --simulate 4
"""

import distdl_jax as dj
import jax.numpy as jnp

import show

P_world = show.world(at_least=4)
P_x = P_world.grid([4])

show.say(P_world, "Each of four workers has a term of six elements; element i of worker r is (i + 1) * 10^r.")
show.say(P_world, "Six elements on four workers: the first two keep two elements of the sum, the others one.\n")
x = jnp.arange(1.0, 7.0) * 10.0**P_x.rank if P_x.active else dj.zero_volume_tensor()
show.movement(P_world, lambda x: dj.functional.reduce_scatter(x, P_x, axes=0), x)
show.say(P_world, "Adjoint: each worker gets the blocks of all cotangents, side by side.")
