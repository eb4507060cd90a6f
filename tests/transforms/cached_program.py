"""Operations of several teams, in the order that is given, and a convolution, compared with what one worker gives.

Prints how often JAX's persistent cache had a program, and had none.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce, broadcast

TEAMS = [[0, 1], [1, 2], [0, 2], [2, 1], [0, 1, 2]]

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
P = dj.Partition()

for number in sys.argv[1]:
    team = TEAMS[int(number)]
    P_team = P.grid([len(team)], team)
    P_root = P.grid([1], team[:1])

    def both(x, P_team=P_team, P_root=P_root):
        total = all_sum_reduce(x * (1 + P.rank), P_team, axes_keep=())
        given = total if P_root.active else dj.zero_volume_tensor(dtype=x.dtype)
        return total, broadcast(given, P_root, P_team)

    found = dj.jit(both)(jnp.arange(4.0) if P_team.active else dj.zero_volume_tensor(dtype="float32"))
    for y in found if P_team.active else ():
        np.testing.assert_array_equal(y, np.arange(4.0) * sum(1 + rank for rank in team))

P_x = P.grid([1, 1, 3, 1])
conv = dj.nn.DistributedConv2d(P_x, in_channels=4, out_channels=8, kernel_size=3, padding=1)
params = conv.init(jax.random.key(0))
whole = jnp.sin(jnp.arange(4.0 * 16 * 16)).reshape(1, 4, 16, 16)
x = dj.scatter(whole if P.rank == 0 else dj.zero_volume_tensor(), dj.TensorSpec((1, 4, 16, 16), P_x))
value, _ = dj.jit(dj.value_and_grad(lambda params, x: (conv(params, x) ** 2).sum()))(params, x)
weights = dj.gather(params, conv.param_specs())
if P.rank == 0:
    y = jax.lax.conv_general_dilated(whole, weights["weight"], (1, 1), [(1, 1), (1, 1)])
    np.testing.assert_allclose(value, ((y + weights["bias"][None, :, None, None]) ** 2).sum(), rtol=1e-5)

hits, misses = (sum(event.endswith(end) for event in events) for end in ("/cache_hits", "/cache_misses"))
sys.stdout.write(f"worker {P.rank} is done, {hits} found, {misses} not\n")
