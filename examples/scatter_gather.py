"""Read an array on one worker, spread it, compute on the blocks, and write the result from one worker.

    mpirun -n 4 python -m distdl_jax examples/scatter_gather.py
    mpirun -n 4 python -m distdl_jax examples/scatter_gather.py --input mine.npy --output standardised.npy
    python examples/scatter_gather.py --simulate 4

The result is the array with mean 0 and standard deviation 1. It takes as many workers as there are, and an array of any
shape: the workers share its first dimension. No worker but the first ever has the whole.
"""

import argparse
import math
from pathlib import Path

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn

import launch
import show

ROOT = 0  # the worker that reads and writes


def main() -> None:
    launch.simulate_if_asked()
    parser = argparse.ArgumentParser(description="Standardise an array that is spread over workers.")
    parser.add_argument("--input", type=Path, help=".npy file of real numbers; without one, a 10 x 4 array is made")
    parser.add_argument("--output", type=Path, default=Path("out/standardised.npy"))
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    P_world = dj.Partition()
    whole = read(options.input) if P_world.rank == ROOT else None

    # What every worker needs to know of it. The shape of a block each finds out when the blocks move.
    shape = P_world.broadcast_data(None if whole is None else whole.shape, root=ROOT)
    x = dj.zero_volume_tensor(dtype=jnp.float64) if whole is None else jnp.asarray(whole)

    one_each = (1,) * len(shape)
    P_root = P_world.grid(one_each, [ROOT])
    P_rows = P_world.grid([P_world.size, *one_each[1:]])
    scatter, gather = nn.Repartition(P_root, P_rows), nn.Repartition(P_rows, P_root)
    sum_over_workers = nn.AllSumReduce(P_rows, axes_reduce=tuple(range(P_rows.dim)))

    @dj.jit
    def standardised(x: jax.Array) -> jax.Array:
        block = scatter(x)
        count = math.prod(shape)
        centred = block - sum_over_workers(block.sum()) / count
        return gather(centred / jnp.sqrt(sum_over_workers((centred**2).sum()) / count))

    blocks = P_world.allgather_data(jax.eval_shape(scatter, x).shape)
    show.say(
        P_world, f"An array of shape {shape}, on {P_world.size} workers in blocks of {', '.join(map(str, blocks))}."
    )
    result = standardised(x)
    if P_world.rank == ROOT:
        result = np.asarray(result)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        np.save(options.output, result)
        print(f"Written to {options.output}: mean {abs(result.mean()):.3f}, standard deviation {result.std():.3f}.")


def read(path: Path | None) -> np.ndarray:
    """Read the array in the file, or make one up, in float64."""
    return np.arange(40.0).reshape(10, 4) ** 2 if path is None else np.load(path).astype(np.float64)


if __name__ == "__main__":
    main()
