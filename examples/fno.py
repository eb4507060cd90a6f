"""A Fourier neural operator on a grid that is split over the workers: it learns to solve Darcy's equation.

    mpirun -n 4 python -m distdl_jax examples/fno.py
    mpirun -n 4 python -m distdl_jax examples/fno.py --partition 2x1x2x1
    mpirun -n 2 python -m distdl_jax examples/fno.py --dims 3
    python examples/fno.py --simulate 4

Water flows through rock of permeability a: -div(a grad u) = 1 in the unit square (or cube), u = 0 on its border. The
rock is drawn at random, a smooth field cut into two kinds, and the equation is solved here, by finite volumes and
conjugate gradients. The network sees a and the coordinates, and has to tell u.

    a, coordinates     on P_x, 1 x 1 x 2 x 2 for four workers       n_b x (1 + D) x n x n
    lift               a linear map of the channels                 n_b x width x n x n
    three FNO blocks   in frequencies, of which few are kept
    two linear maps    of the channels                              n_b x 1 x n x n

Source: Li et al. (2021), arXiv:2010.08895, the network and the equation.
"""

import os
import sys
from functools import partial

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn
from jax.scipy.sparse.linalg import cg

import beside
import launch
from training import say

TESTED = 8  # samples
PARTITION = "of the tensors, as in 1x1x2x2: batch, channels (1), and two or three dimensions"


# --- The network ---------------------------------------------------------------------------------------------------


def operator(P_x: dj.Partition, blocks: int, width: int, modes: int) -> nn.Sequential:
    """Return the network, from the permeability and the coordinates to u."""
    dims = P_x.dim - 2
    linear = partial(getattr(nn, f"DistributedConv{dims}d"), P_x, kernel_size=1)
    activations = [jax.nn.gelu] * (blocks - 1) + [None]
    return nn.Sequential(
        linear(in_channels=1 + dims, out_channels=width),
        *(nn.DistributedFNOBlock(P_x, width, width, modes, activation) for activation in activations),
        linear(in_channels=width, out_channels=2 * width),
        jax.nn.gelu,
        linear(in_channels=2 * width, out_channels=1),
    )


def plain_operator(modes: int, params: tuple, state: tuple, x: jax.Array, training: bool) -> tuple[jax.Array, tuple]:
    """Compute the same network on one worker, in plain JAX."""

    def linear(its: dict, x: jax.Array) -> jax.Array:
        y = jnp.einsum("bi...,oi->bo...", x, its["weight"].reshape(its["weight"].shape[:2]))
        return y + its["bias"].reshape(-1, *(1,) * (x.ndim - 2))

    def spectral(weight: jax.Array, x: jax.Array) -> jax.Array:
        axes = tuple(range(2, x.ndim))
        spectrum = jnp.fft.rfftn(x, axes=axes)
        places = [jnp.r_[0:modes, n - modes : n] for n in x.shape[2:-1]]
        low = jnp.ix_(jnp.arange(len(x)), jnp.arange(x.shape[1]), *places, jnp.arange(modes))
        product = jnp.einsum("bi...,io...->bo...", spectrum[low], weight[..., 0] + 1j * weight[..., 1])
        return jnp.fft.irfftn(jnp.zeros_like(spectrum).at[low].set(product), x.shape[2:], axes)

    first, *blocks, before, _, last = params
    x = linear(first, x)
    for n, its in enumerate(blocks):
        x = spectral(its["spectral"]["weight"], x) + linear(its["pointwise"], x)
        x = jax.nn.gelu(x) if n < len(blocks) - 1 else x
    return linear(last, jax.nn.gelu(linear(before, x))), state


# --- The data ------------------------------------------------------------------------------------------------------


def permeability(rng: np.random.Generator, size: int, dims: int) -> np.ndarray:
    """3 or 12, as a smooth random field is below or above its mean."""
    waves = np.meshgrid(*[np.fft.fftfreq(size, 1 / size)] * dims, indexing="ij")
    smooth = np.exp(-sum(wave**2 for wave in waves) / 18)
    field = np.fft.ifftn(np.fft.fftn(rng.normal(size=(size,) * dims)) * smooth).real
    return np.where(field > field.mean(), 12.0, 3.0)


@partial(jax.jit, static_argnums=1)
def solved(a: jax.Array, dims: int) -> jax.Array:
    """u on the cells of the grid, from a there, by finite volumes; u = 0 on the border, half a cell outside."""
    size = a.shape[0]

    def minus_divergence(u: jax.Array) -> jax.Array:
        total = jnp.zeros_like(u)
        for d in range(dims):
            ends = [(1, 1) if k == d else (0, 0) for k in range(dims)]
            left, right = (jax.lax.slice_in_dim(jnp.pad(a, ends, mode="edge"), k, k + size + 1, axis=d) for k in (0, 1))
            faces = 2 * left * right / (left + right)
            faces = faces * jnp.where((jnp.arange(size + 1) % size == 0).reshape(-1, *(1,) * (dims - 1 - d)), 2, 1)
            total = total - jnp.diff(faces * jnp.diff(jnp.pad(u, ends), axis=d), axis=d)
        return total * size**2

    return cg(minus_divergence, jnp.ones_like(a), tol=1e-6, maxiter=20 * size)[0]


def make_data(samples: int, size: int, dims: int, dtype: str) -> beside.Arrays:
    """Make inputs, n_b x (1 + D) x n x ..., and targets, n_b x 1 x n x ..., in units of their mean."""
    rng = np.random.default_rng(0)
    rock = [permeability(rng, size, dims) for _ in range(samples)]
    flows = np.stack([np.asarray(solved(jnp.asarray(a, "float32"), dims)) for a in rock])
    places = np.stack(np.meshgrid(*[(np.arange(size) + 0.5) / size] * dims, indexing="ij"))
    seen = np.stack([np.concatenate([(a[None] - 7.5) / 4.5, places]) for a in rock])
    return seen.astype(dtype), (flows / flows.mean())[:, None].astype(dtype)


# --- The run -------------------------------------------------------------------------------------------------------


def main() -> int:
    launch.simulate_if_asked()
    parser = beside.options(
        "Learn to solve Darcy's equation.", "fno", PARTITION, steps=240, batch_size=8, learning_rate=6e-3
    )
    parser.add_argument("--dims", type=int, default=2, choices=(2, 3))
    parser.add_argument("--size", type=int, help="cells along each dimension; 32, and in three dimensions 16")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--width", type=int, default=16, help="channels")
    parser.add_argument("--modes", type=int, default=6, help="frequencies that are kept along each dimension")
    parser.add_argument("--samples", type=int, default=128, help=f"to train on; {TESTED} more are to test on")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.dtype == "float64")
    P_world = dj.Partition()
    size = given.size or (32 if given.dims == 2 else 16)
    P_x = beside.partition(P_world, given.partition, given.dims + 2)
    spec = dj.TensorSpec((given.batch_size, 1 + given.dims, *(size,) * given.dims), P_x)
    network = nn.Sequential(*operator(P_x, given.blocks, given.width, given.modes), x_spec=spec)
    say(network.table(given.dtype))
    made = make_data(given.samples + TESTED, size, given.dims, given.dtype) if P_world.rank == 0 else None
    x, u = P_world.broadcast_data(made)

    def local_blocks(batch: beside.Arrays) -> tuple[jax.Array, jax.Array]:
        return beside.block(batch[0], P_x), beside.block(batch[1], P_x)

    losses = (nn.DistributedMSELoss(P_x), lambda y, target: jnp.mean((y - target) ** 2))
    plain = partial(plain_operator, given.modes)
    ours, good = beside.train_both(network, plain, losses, (x[:-TESTED], u[:-TESTED]), local_blocks, given)

    seen = beside.block(x[-TESTED:], P_x)
    y = dj.jit(lambda params, x: nn.Sequential(*network)(params, x))(ours.params, seen)
    y = dj.gather(y, dj.TensorSpec((TESTED, 1, *(size,) * given.dims), P_x))
    if P_world.rank == 0:
        y, want = np.asarray(y), u[-TESTED:]
        error = np.mean([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(y, want, strict=True)])
        say(f"Relative error in {TESTED} rocks that it has not seen: {error:.3f}")
        middle = (0, 0, *(size // 2,) * (given.dims - 2))
        panels = {"rock": x[-TESTED:][middle], "flow": want[middle], "what the network says": y[middle]}
        beside.draw(panels, ours.losses, given.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
