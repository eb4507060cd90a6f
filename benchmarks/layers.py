"""Layers beside the sequential ones on one thread, and beside JAX's own sharding of these: forward, and backward too.

mpiexec -n 2 python benchmarks/layers.py [words: rows whose title has one of them]

"one thread" is the whole layer in plain JAX on worker 0 alone; NPROC=1 gives every worker one thread. "JAX sharding" is
the same jitted over all workers, x cut as ours is. Workers that wait for a slower one sleep. The last columns are the
seconds of processor time that a call takes on one thread, and on the worker of ours that takes most: they tell
something on a loaded machine, too.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn
from distdl_jax.tuning.timing import processor_time
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from harness import Table, Way, jax_sharding
from harness.sequential import both_ways

jax_sharding.start()
P_all = dj.Partition()
N = P_all.size
table = Table("layers")


def rows(title: str, layer: Any, plain: Callable[..., Any], shape: Sequence[int], partition: Sequence[int]) -> None:
    """Two rows for a layer of x of `shape`, cut as `partition`; `plain` is the same of whole parameters and x."""
    if sys.argv[1:] and not any(word in title for word in sys.argv[1:]):
        return
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    params = layer.init(jax.random.key(0)) if hasattr(layer, "init") else {}
    specs = layer.param_specs() if hasattr(layer, "init") else {}
    whole = P_all.broadcast_data(jax.tree.map(np.asarray, dj.gather(params, specs)) if params else {}, root=0)
    P_x = P_all.create_cartesian_topology_partition(partition)
    mine = jnp.asarray(x[tuple(slice(*side) for side in dj.TensorSpec(shape, P_x).box)])
    ours = layer if hasattr(layer, "init") else (lambda params, x: layer(x))
    for direction, wrap in (("forward", lambda f: f), ("forward + backward", both_ways)):
        ways = [
            called("one thread", wrap(plain), whole, jnp.asarray(x), here=P_all.rank == 0),
            called("distdl_jax", wrap(ours), params, mine),
        ]
        ways += [called("JAX sharding", wrap(plain), *shared(whole, x, partition))] if N > 1 else []
        table.row(f"{title}, {direction}, {N} workers", ways)
        seconds = [statistics.median(measured(way) for _ in range(9)) for way in ways[:2]]
        of_all = [max(each) for each in zip(*P_all.allgather_data(seconds), strict=True)]
        if P_all.rank == 0:
            print(f"{'':<44}processor time: {of_all[0] * 1e3:.2f} ms, and ours {of_all[1] * 1e3:.2f} ms", flush=True)


def shared(params: Any, x: np.ndarray, partition: Sequence[int]) -> tuple[Any, jax.Array]:
    """As JAX shares them between all workers: copies of the parameters, and x cut."""
    where = jax_sharding.sharding(partition)
    same = NamedSharding(where.mesh, Spec())
    copies = jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, same, lambda index: a[index]), params)
    return copies, jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def called(name: str, function: Callable[..., Any], params: Any, x: jax.Array, here: bool = True) -> Way:
    """One call of the jitted `function`, waited for; nothing on workers that are not `here`."""
    jitted = jax.jit(function)
    return Way(name, (lambda: jax.block_until_ready(jitted(params, x))) if here else lambda: None)


def measured(way: Way) -> float:
    """The seconds for which this process works in a call; a wait for a message that spins is work, too."""
    P_all.allgather_data(None)
    return processor_time(way.run)


def on(*shape: int) -> dj.CartesianPartition:
    return P_all.create_cartesian_topology_partition(shape)


def normalised(x: Any, axes: tuple[int, ...]) -> Any:
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def by_channel(p: Any, y: Any) -> Any:
    shape = (-1, *(1,) * (y.ndim - 2))
    return y * p["weight"].reshape(shape) + p["bias"].reshape(shape)


def spectral(p: Any, x: Any) -> Any:
    kept = p["weight"].shape[2] // 2
    spectrum = jnp.fft.rfft2(x)
    low = jnp.ix_(*map(jnp.arange, x.shape[:2]), jnp.r_[0:kept, x.shape[2] - kept : x.shape[2]], jnp.arange(kept))
    product = jnp.einsum("bikl,iokl->bokl", spectrum[low], p["weight"][..., 0] + 1j * p["weight"][..., 1])
    return jnp.fft.irfft2(jnp.zeros_like(spectrum).at[low].set(product), x.shape[2:])


P_first = P_all.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1))
image, by_rows = (8, 32, 128, 128), (1, 1, N, 1)
rows(
    "fft of 128^3",
    lambda x: dj.functional.fftn(x + 0j, on(N, 1, 1)),
    lambda p, x: jnp.fft.fftn(x + 0j),
    (128,) * 3,
    (N, 1, 1),
)
rows(
    "rfft of 128^3", lambda x: dj.functional.rfftn(x, on(N, 1, 1)), lambda p, x: jnp.fft.rfftn(x), (128,) * 3, (N, 1, 1)
)
rows("spectral conv", nn.DistributedSpectralConv2d(on(*by_rows), 32, 32, 12), spectral, image, by_rows)
rows(
    "batch norm",
    nn.DistributedBatchNorm(on(*by_rows), 32),
    lambda p, x: by_channel(p, normalised(x, (0, 2, 3))),
    image,
    by_rows,
)
rows(
    "group norm",
    nn.DistributedGroupNorm(on(*by_rows), 4, 32),
    lambda p, x: by_channel(p, normalised(x.reshape(8, 4, -1), (2,)).reshape(x.shape)),
    image,
    by_rows,
)
rows(
    "layer norm, features split",
    nn.DistributedLayerNorm(on(1, N), 4096),
    lambda p, x: normalised(x, (1,)) * p["weight"] + p["bias"],
    (512, 4096),
    (1, N),
)
rows(
    "linear",
    nn.DistributedLinear(on(1, N), P_first, on(1, N), 1024, 1024),
    lambda p, x: x @ p["weight"].T + p["bias"],
    (512, 1024),
    (1, N),
)
rows(
    "conv 3 x 3",
    nn.DistributedConv2d(on(*by_rows), in_channels=32, out_channels=32, kernel_size=3, padding=1),
    lambda p, x: lax.conv_general_dilated(x, p["weight"], (1, 1), "SAME") + p["bias"].reshape(-1, 1, 1),
    image,
    by_rows,
)
rows(
    "conv transpose 2 x 2",
    nn.DistributedConvTranspose2d(on(*by_rows), in_channels=32, out_channels=32, kernel_size=2, stride=2),
    lambda p, x: jnp.einsum("bihw,iokl->bohkwl", x, p["weight"]).reshape(8, 32, 256, 256) + p["bias"].reshape(-1, 1, 1),
    image,
    by_rows,
)
rows(
    "cross entropy, classes split",
    (lambda loss: lambda x: loss(x, jnp.arange(x.shape[0]) % 1000))(
        nn.DistributedCrossEntropyLoss(on(1, N), ignore_index=None)
    ),
    lambda p, x: jnp.mean(jax.nn.logsumexp(x, 1) - x[jnp.arange(512), jnp.arange(512) % 1000]),
    (512, 32768),
    (1, N),
)
table.write()
