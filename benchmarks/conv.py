"""Convolutions and a max pool beside the sequential layer, and JAX's own partitioning of it (GSPMD over gloo).

mpiexec -n 4 python benchmarks/conv.py [words: rows whose title has one of them]

"one thread" is the whole layer on worker 0 alone, as lax has it; NPROC=1 gives every worker one thread. "all threads"
is the same in a process of its own. Workers that wait for a slower one sleep.
"""

import sys

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from harness import Table, Way, in_one_program, jax_sharding
from harness.sequential import OnAllThreads, both_ways, conv, max_pool

P_all = dj.Partition()
N = P_all.size
CALLS = 1  # of a program: XLA would do equal work once
ROUNDS = 11


def rows(title, layer, sequential, shape, channels, mesh_shape, x_specs, w_spec):
    """Rows for one layer; for JAX, x and the weight are cut as `x_specs` and `w_spec` say along a mesh (a, b)."""
    if sys.argv[1:] and not any(word in title for word in sys.argv[1:]):
        return
    mesh = Mesh(np.asarray(jax.devices()).reshape(mesh_shape), ("a", "b"))

    def shared(shape, spec):
        where = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, where, lambda index: np.ones(shape, np.float32)[index])

    kernel = (channels, shape[1], *(3,) * (len(shape) - 2))
    whole = {"weight": jnp.ones(kernel), "bias": jnp.ones(channels)} if channels else {}
    spread = {"weight": shared(kernel, w_spec), "bias": shared((channels,), Spec(*w_spec[:1]))} if channels else {}
    x = jnp.ones(dj.TensorSpec(shape, layer.P_x).local_shape)  # zero-volume outside P_x
    params = layer.init(jax.random.key(0))
    for direction, wrap in (("forward", lambda f: f), ("forward + backward", both_ways)):
        alone = in_one_program("one thread", wrap(sequential), (whole, jnp.ones(shape)), CALLS, unrolled=True)
        threads = None
        if P_all.rank > 0:
            alone = Way(alone.name, lambda: None, CALLS)
        else:
            threads = OnAllThreads(sequential.__name__, shape, channels, direction != "forward")
        partitioned = jax.jit(wrap(sequential))
        xs = {name: shared(shape, spec) for name, spec in x_specs.items()}
        table.row(
            f"{title}, {direction}",
            [
                alone,
                Way("all threads", threads.run if threads else lambda: None, CALLS),
                in_one_program("distdl_jax", wrap(layer.apply), (params, x), CALLS, unrolled=True),
                *(
                    Way(name, lambda f=partitioned, x=x: jax.block_until_ready(f(spread, x)), CALLS)
                    for name, x in xs.items()
                ),
            ],
            rounds=ROUNDS,
        )
        if threads:
            threads.close()


jax_sharding.start()
table = Table("conv")
BY_ROWS = {"GSPMD": Spec(None, None, "a")}
image, volume = (4, 16, 256, 256), (1, 8, 96, 96, 96)
same = {"kernel_size": 3, "padding": 1}
co, ci = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[N]
layer = nn.DistributedConv2d(P_all.grid([1, 1, N, 1]), in_channels=16, out_channels=16, **same)
rows(f"conv 4x16x256x256 k3, rows over {N}", layer, conv, image, 16, (N, 1), BY_ROWS, Spec())
# JAX has no array on some of its workers only: x is copied to the rows of the mesh beforehand, or cut over all workers.
x_specs = {"GSPMD, x copied": Spec(None, "b"), "GSPMD, x cut": Spec(None, ("b", "a"))}
P_x, P_W = P_all.grid([1, ci, 1, 1]), P_all.grid([co, ci, 1, 1])
# y on the first column of P_W; where that is not the same, on the first workers too.
for title, P_y in (("", P_all.grid([1, co, 1, 1], range(0, co * ci, ci))), (", y with x", P_all.grid([1, co, 1, 1])))[
    :ci
]:
    title = f"conv 4x16x256x256 k3, channels {co}x{ci}{title}"
    layer = nn.DistributedConv2d(P_x, P_y, P_W, in_channels=16, out_channels=16, **same)
    rows(title, layer, conv, image, 16, (co, ci), x_specs, Spec("a", "b"))
if N == 4:
    layer = nn.DistributedConv2d(
        P_all.grid([1, 1, 2, 1]),
        P_all.grid([1, 2, 2, 1]),
        P_all.grid([2, 1, 2, 1]),
        in_channels=16,
        out_channels=16,
        **same,
    )
    x_specs = {"GSPMD, x copied": Spec(None, None, "b"), "GSPMD, x cut": Spec(None, "a", "b")}
    rows("conv 4x16x256x256 k3, rows and channels 2x2", layer, conv, image, 16, (2, 2), x_specs, Spec("a"))
layer = nn.DistributedConv3d(P_all.grid([1, 1, N, 1, 1]), in_channels=8, out_channels=8, **same)
rows(f"conv 1x8x96^3 k3, planes over {N}", layer, conv, volume, 8, (N, 1), BY_ROWS, Spec())
pool = nn.DistributedMaxPool2d(P_all.grid([1, 1, N, 1]), 2)
rows(f"max pool 4x16x256x256 k2, rows over {N}", pool, max_pool, image, 0, (N, 1), BY_ROWS, Spec())
table.write()
