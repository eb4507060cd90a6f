"""The linear layer, 64 x 1024 -> 1024, beside the sequential one: mpiexec -n 4 python benchmarks/linear.py

And of 512 samples that are split, with its parameters on the first worker, and sharded over all.
"""

import distdl_jax as dj
import jax
import jax.numpy as jnp

from harness import Table, in_one_program

ROWS, FEATURES, CALLS = 64, 1024, 20
P_all = dj.Partition()
along_output, along_input = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[P_all.size]
P_W = P_all.grid([along_output, along_input])
P_x = P_all.grid([1, along_input])
P_y = P_all.grid([1, along_output])
layer = dj.nn.DistributedLinear(P_x, P_y, P_W, FEATURES, FEATURES)
params = layer.init(jax.random.key(0))
x = jnp.ones((ROWS, FEATURES // along_input)) if P_x.active else dj.zero_volume_tensor(ROWS)
whole = {"weight": jnp.ones((FEATURES, FEATURES)), "bias": jnp.ones(FEATURES)}
X = jnp.ones((ROWS, FEATURES))


def sequential(params, x):
    return x @ params["weight"].T + params["bias"]


def both_ways(apply):
    """Forward, and the gradients of input and parameters."""

    def run(params, x):
        y, pullback = jax.vjp(apply, params, x)
        return y, pullback(y)

    return run


def alone(way):
    """Run the sequential layer on worker 0 only, as it would run without the others."""
    run = way.run if P_all.rank == 0 else (lambda: None)
    return type(way)(way.name, run, way.calls)


table = Table("linear")
for title, of_sequential, of_layer in (
    ("forward", sequential, layer),
    ("forward + backward", both_ways(sequential), both_ways(layer)),
):
    table.row(
        f"linear {ROWS}x{FEATURES}->{FEATURES}, P_W {along_output}x{along_input}, {title}",
        [
            alone(in_one_program("sequential", of_sequential, (whole, X), CALLS)),
            in_one_program("distributed", of_layer, (params, x), CALLS),
        ],
    )
P_batch = P_all.grid([P_all.size, 1])
P_copies = P_all.grid([P_all.size, 1, 1])
own = jnp.ones(dj.TensorSpec((512, FEATURES), P_batch).local_shape)


def trained(layer):
    """Return the parameters after a step, by arithmetic like adam's."""

    def step(params, x):
        y, pullback = jax.vjp(layer.apply, params, x)
        return jax.tree.map(lambda p, dp: p - 1e-9 * dp / jnp.sqrt(dp * dp + 1e-8), params, pullback(y)[0])

    return step


for title, wrap in (("forward", lambda layer: layer), ("forward + backward", both_ways), ("a step", trained)):
    ways = []
    for name, sharded in (("on one worker", False), ("sharded", True)):
        its = dj.nn.DistributedLinear(P_batch, P_batch, P_copies, FEATURES, FEATURES, sharded=sharded)
        ways.append(in_one_program(name, wrap(its), (its.init(jax.random.key(0)), own), CALLS))
    table.row(f"linear 512x{FEATURES}->{FEATURES}, batch split over {P_all.size}, {title}", ways)
table.write()
