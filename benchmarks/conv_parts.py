"""A convolution beside its parts: the messages by raw mpi4py, and one worker's own arithmetic on a copy that it has.

mpiexec -n 2 python benchmarks/conv_parts.py [words: rows whose title has one of them]

"parts" is what a layer without any copies of its own would take: the halo's rows are sent as they lie in numpy's
arrays, and the block is computed in the forms that the layer has chosen.
"""

import sys

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn
from distdl_jax.nn.local.conv_choice import chosen_here
from distdl_jax.nn.local.layout import row_major
from distdl_jax.plans.shape_dtype import ShapeDtype
from mpi4py import MPI

from harness import Table, Way
from harness.sequential import both_ways

P_all = dj.Partition()
N, rank = P_all.size, P_all.rank
raw = MPI.COMM_WORLD.Dup()
table = Table("conv-parts")


def exchange(x: np.ndarray, width: int) -> None:
    """Send the first and the last rows of x to the neighbours, and receive theirs."""
    low, high = (neighbour if 0 <= neighbour < N else MPI.PROC_NULL for neighbour in (rank - 1, rank + 1))
    for to, source, rows in ((low, high, slice(0, width)), (high, low, slice(-width, None))):
        sent = np.ascontiguousarray(x[:, :, rows])
        raw.Sendrecv(sent, to, 0, np.empty_like(sent), source)


def row(title: str, shape: tuple[int, ...], channels: int, kernel: int = 3) -> None:
    """The rows of one layer, its rows (or planes) split over all workers."""
    if sys.argv[1:] and not any(word in title for word in sys.argv[1:]):
        return
    dims = len(shape) - 2
    grid = P_all.create_cartesian_topology_partition((1, 1, N, *(1,) * (dims - 1)))
    layer = {1: nn.DistributedConv1d, 2: nn.DistributedConv2d, 3: nn.DistributedConv3d}[dims](
        grid, in_channels=shape[1], out_channels=channels, kernel_size=kernel, padding=kernel // 2
    )
    x = jnp.ones(dj.TensorSpec(shape, grid).local_shape)
    held = {worker: ShapeDtype(size, x.dtype) for worker, size in enumerate(P_all.allgather_data(x.shape))}
    plan = layer.plan(held, choose=lambda problem: raw.bcast(chosen_here(problem, True) if rank == 0 else None))
    local, block = plan.local[rank], np.ones(x.shape, np.float32)
    copy = jnp.ones(plan.fetch.after(held)[rank].shape)
    params = layer.init(jax.random.key(0))
    own = {"weight": jnp.ones(local.weight_shape), "bias": jnp.ones(channels)}

    def alone(params, x):
        return row_major(local(x, params["weight"], params["bias"]))

    for direction, wrap, messages in (("forward", lambda f: f, 1), ("forward + backward", both_ways, 2)):
        of_block, of_layer = jax.jit(wrap(alone)), jax.jit(wrap(layer.apply))

        def parts(of_block=of_block, messages=messages):
            for _ in range(messages):
                exchange(block, kernel // 2)
            jax.block_until_ready(of_block(own, copy))

        table.row(
            f"{title}, {N} workers, {direction}",
            [
                Way("parts", parts),
                Way("block", lambda f=of_block: jax.block_until_ready(f(own, copy))),
                Way("layer", lambda f=of_layer: jax.block_until_ready(f(params, x))),
            ],
            rounds=15,
        )
        if rank == 0:
            told = of_layer.lower(params, x).compile().memory_analysis()
            print(f"    {local.forms}; {told.temp_size_in_bytes / x.nbytes:.2f} times x in temporaries")


row("4x16x256x256, k3", (4, 16, 256, 256), 16)
row("4x64x512x512, k3", (4, 64, 512, 512), 64)
row("8x64x64x64, k3", (8, 64, 64, 64), 64)
row("1x8x96^3, k3", (1, 8, 96, 96, 96), 8)
table.write()
