"""What a worker needs for ring attention, forward and backward: mpiexec -n 4 python benchmarks/ring_memory.py

Nothing is run: the compiler says how much memory beside arguments and results the program of each worker takes. Of the
same block it is the same however many workers have others, and of a block twice as long twice as much. Beside it the
same in plain JAX, of the whole sequence on one worker.
"""

import distdl_jax as dj
import jax
import jax.numpy as jnp

FEATURES, HEADS = 64, 4
P_all = dj.Partition()


def temporaries(attend, params, x):
    """MiB."""
    both_ways = jax.jit(lambda params, x: jax.vjp(attend, params, x)[1](x))
    return both_ways.lower(params, x).compile().memory_analysis().temp_size_in_bytes / 2**20


def plain(params, x):
    q, k, v = (jnp.einsum("nse,hde->nshd", x, params[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("nshd,nthd->nhst", q, k) / (FEATURES // HEADS) ** 0.5
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("nhst,nthd,ehd->nse", jax.nn.softmax(scores), v, params["out"])


for length in (512, 1024, 2048, 4096):
    x, row = jnp.ones((1, length, FEATURES)), []
    for workers in sorted({1, 2, P_all.size}):
        if workers > P_all.size:
            continue
        P_x = P_all.grid([1, workers, 1])
        layer = dj.nn.DistributedMultiHeadAttention(P_x, FEATURES, HEADS, causal=True, bias=False)
        params = layer.init(jax.random.key(0))
        found = P_all.allgather_data(temporaries(layer, params, x) if P_x.active else 0.0)
        row.append(f"{workers} workers {max(found):7.1f} MiB")
    if P_all.rank == 0:
        whole = jnp.ones((1, length * P_all.size, FEATURES))
        alone = temporaries(plain, params, whole)
        print(f"{length} elements a worker: {', '.join(row)}; plain JAX, {whole.shape[1]} in all: {alone:.1f} MiB")
