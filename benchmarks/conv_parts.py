"""A convolution beside its parts: the messages by raw mpi4py, and one worker's own arithmetic on a copy that it has.

mpiexec -n 2 python benchmarks/conv_parts.py [words: rows whose title has one of them]

"parts" is what a layer without any copies of its own would take: the halo's rows are sent as they lie in numpy's
arrays, and the block is computed by the algorithms that the layer has chosen. Kernels are of 3 in each dimension.
"""

import sys
from dataclasses import replace

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn
from distdl_jax.kernels.convolution import chosen_here
from distdl_jax.kernels.geometry import row_major
from distdl_jax.plans.shape_dtype import ShapeDtype
from mpi4py import MPI

from harness import Table, Way
from harness.sequential import both_ways

P_all = dj.Partition()
N, rank = P_all.size, P_all.rank
raw = MPI.COMM_WORLD.Dup()
table = Table("conv-parts")


def exchange(x: np.ndarray, grid: dj.Partition, width: int, wraps: bool) -> None:
    """Send the first and the last rows of x to the neighbours, and receive theirs, one dimension after the other.

    `x` has room for the rows received, which a second dimension sends on: so corners get to where they belong.
    """
    inner = [slice(width, -width) if workers > 1 else slice(None) for workers in grid.shape]
    for d, workers in enumerate(grid.shape):
        if workers == 1:
            continue
        low, high = (neighbour(grid, d, step, wraps) for step in (-1, 1))
        rest = [slice(None)] * d, inner[d + 1 :]
        first, last = slice(width, 2 * width), slice(-2 * width, -width)
        for to, source, rows in ((low, high, first), (high, low, last)):
            sent = np.ascontiguousarray(x[*rest[0], rows, *rest[1]])
            raw.Sendrecv(sent, to, 0, np.empty_like(sent), source)


def neighbour(grid: dj.Partition, d: int, step: int, wraps: bool) -> int:
    """The worker that is `step` further in dimension `d`."""
    index = list(grid.index)
    index[d] += step
    if not wraps and not 0 <= index[d] < grid.shape[d]:
        return MPI.PROC_NULL
    index[d] %= grid.shape[d]
    return int(np.ravel_multi_index(index, grid.shape))


def row(title: str, shape: tuple[int, ...], channels: int, mode: str = "zeros", square: bool = False) -> None:
    """The rows of one layer, its rows (or planes) split over all workers, or `square`, rows and columns over four."""
    title += ", circular" * (mode == "circular") + ", 2 x 2" * square
    if (sys.argv[1:] and not any(word in title for word in sys.argv[1:])) or (square and N != 4):
        return
    dims, kernel = len(shape) - 2, 3
    grid = P_all.grid((1, 1, 2, 2) if square else (1, 1, N, *(1,) * (dims - 1)))
    layer = {1: nn.DistributedConv1d, 2: nn.DistributedConv2d, 3: nn.DistributedConv3d}[dims](
        grid, in_channels=shape[1], out_channels=channels, kernel_size=kernel, padding=kernel // 2, padding_mode=mode
    )
    x = jnp.ones(dj.TensorSpec(shape, grid).local_shape)
    shapes = {worker: ShapeDtype(size, x.dtype) for worker, size in enumerate(P_all.allgather_data(x.shape))}
    plan = layer.plan(shapes, choose=lambda problem: raw.bcast(chosen_here(problem, True) if rank == 0 else None))
    local = replace(plan.local[rank], problem=replace(plan.local[rank].problem, split_input=None))
    block = np.ones([size + (kernel - 1) * (P > 1) for size, P in zip(x.shape, grid.shape, strict=True)], np.float32)
    copy = jnp.ones(plan.fetch.after(shapes)[rank].shape)
    params = layer.init(jax.random.key(0))
    own = {"weight": jnp.ones(local.weight_shape), "bias": jnp.ones(channels)}

    def alone(params, x):
        return row_major(local(x, params["weight"], params["bias"]))

    for direction, wrap, messages in (("forward", lambda f: f, 1), ("forward + backward", both_ways, 2)):
        of_block, of_layer = jax.jit(wrap(alone)), jax.jit(wrap(layer.apply))

        def parts(of_block=of_block, messages=messages):
            for _ in range(messages):
                exchange(block, grid, kernel // 2, mode == "circular")
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
            memory = of_layer.lower(params, x).compile().memory_analysis()
            print(f"    {local.algorithms}; {memory.temp_size_in_bytes / x.nbytes:.2f} times x in temporaries")


for mode in ("zeros", "circular"):
    for square in (False, True):
        row("4x16x256x256", (4, 16, 256, 256), 16, mode, square)
        row("4x64x512x512", (4, 64, 512, 512), 64, mode, square)
        row("8x64x64x64", (8, 64, 64, 64), 64, mode, square)
    row("1x8x96^3", (1, 8, 96, 96, 96), 8, mode)
table.write()
