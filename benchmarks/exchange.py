"""repartition, scatter, gather and halo exchange beside raw mpi4py with packing by numpy, and JAX's own resharding.

mpiexec -n 4 python benchmarks/exchange.py

"raw" carries out the same messages with mpi4py's Sendrecv, packing and unpacking with numpy. "JAX" is a jitted
identity between two shardings over gloo, one process a worker.
"""

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import functional
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.halos import Halos, needed_ranges
from mpi4py import MPI

from harness import Table, Way, in_one_program, jax_sharding, repeated

P_all = dj.Partition()
N, rank = P_all.size, P_all.rank
raw = MPI.COMM_WORLD.Dup()


def run_raw(plan, x):
    """Run one worker's part of an exchange, in numpy and mpi4py."""
    y = np.empty(plan.out_shape, x.dtype)
    for piece in plan.copies:
        y[piece.dest] = x[piece.source]
    for step in plan.rounds:
        send = recv = None
        if step.send:
            send = np.concatenate([np.ascontiguousarray(x[piece.source]).reshape(-1) for piece in step.send.pieces])
        if step.recv:
            recv = np.empty(step.recv.size, x.dtype)
        if send is not None and recv is not None:
            raw.Sendrecv(send, step.send.partner, 0, recv, step.recv.partner, 0)
        elif send is not None:
            raw.Send(send, step.send.partner)
        else:
            raw.Recv(recv, step.recv.partner)
        if recv is not None:
            start = 0
            for piece in step.recv.pieces:
                block = recv[start : start + piece.size].reshape(piece.shape)
                y[piece.dest] = block if plan.out_disjoint else y[piece.dest] + block
                start += piece.size
    return y


def raw_chain(plans):
    def run(x):
        for plan in plans:
            x = run_raw(plan, x)
        return x

    return run


def there_and_back(function):
    def run(x):
        y, pullback = jax.vjp(function, x)
        return pullback(y)[0]

    return run


def jax_reshard(shape, before, after):
    """JAX's own movement between two grids over all workers: forward, and there and back."""
    x = jax_sharding.ones(shape, before)
    there = jax.jit(lambda x: x + 0, out_shardings=jax_sharding.sharding(after))
    back = jax.jit(lambda x: x + 0, out_shardings=jax_sharding.sharding(before))
    return lambda: jax.block_until_ready(there(x)), lambda: jax.block_until_ready(back(there(x)))


def add_rows(table, work, function, plans, x_shape, reshard=None, calls=50, holds=True):
    x_np = np.ones(x_shape, np.float32)
    x = jnp.asarray(x_np) if holds else dj.zero_volume_tensor()
    back = [plan.reverse() for plan in reversed(plans)]
    for direction in ("forward", "forward + backward"):
        two = direction != "forward"
        chain = raw_chain([*plans, *back] if two else plans)
        ways = [
            repeated("raw", lambda chain=chain: chain(x_np), calls),
            in_one_program("distdl_jax", there_and_back(function) if two else function, (x,), calls),
        ]
        if reshard is not None:
            # Calls of their own, which don't share the price of one: fewer do.
            ways.append(Way("JAX", lambda two=two: [reshard[two]() for _ in range(10)], 10))
        table.row(f"{work}, {direction}", ways)


def repartition_rows(table, work, shape, before, after, with_jax=True, calls=50):
    P_x, P_y = P_all.grid(before), P_all.grid(after)
    step = Exchange(
        ProductGrid.balanced(shape, P_x.shape, P_x.ranks), ProductGrid.balanced(shape, P_y.shape, P_y.ranks)
    ).plan(rank)
    reshard = jax_reshard(shape, before, after) if with_jax else None
    add_rows(
        table,
        work,
        lambda x: functional.repartition(x, P_x, P_y, preserve_batch=False),
        [step],
        step.in_shape,
        reshard,
        calls,
        holds=P_x.active,
    )


def halo_rows(table, work, shape, partition, width, calls=50):
    P = P_all.grid(partition)
    owned = ProductGrid.balanced(shape, P.shape, P.ranks)
    halo = tuple((width, width) if p > 1 else (0, 0) for p in partition)
    plans = list(Halos(owned, needed_ranges(owned, [halo] * N)).plans(rank))
    local = tuple(stop - start for start, stop in owned.box(owned.cell_of[rank]))
    add_rows(table, work, lambda x: functional.halo_exchange(x, P, halo), plans, local, calls=calls)


jax_sharding.start()
table = Table("exchange")
one = (1,) * 2
pencils = {1: ((1, 1, 1), (1, 1, 1)), 2: ((2, 1, 1), (1, 2, 1)), 4: ((2, 2, 1), (1, 2, 2))}[N]
cubes = {1: (1, 1, 1), 2: (2, 1, 1), 4: (2, 2, 1)}[N]
repartition_rows(table, f"repartition 2048^2, {N}x1 -> 1x{N}", (2048, 2048), (N, 1), (1, N))
repartition_rows(table, f"pencil change 192^3, {pencils[0]} -> {pencils[1]}", (192,) * 3, *pencils)
repartition_rows(table, f"scatter 64 MiB, 1 -> {N}", (4096, 4096), one, (N, 1), with_jax=False, calls=20)
repartition_rows(table, f"gather 64 MiB, {N} -> 1", (4096, 4096), (N, 1), one, with_jax=False, calls=20)
for width in (1, 3):
    halo_rows(table, f"halo 8x1024x1024, 1x{N}x1, width {width}", (8, 1024, 1024), (1, N, 1), width)
shape_3d = tuple(96 * p for p in cubes)
halo_rows(table, f"halo 96^3 a worker, {cubes}, width 1", shape_3d, cubes, 1, calls=300)
table.write()
