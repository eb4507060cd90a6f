"""A Fourier neural operator in four dimensions, of space and time, all of which may be split: it learns a 3-D flow.

    mpirun -n 4 python -m distdl_jax examples/fno4d.py
    mpirun -n 4 python -m distdl_jax examples/fno4d.py --partition 1x1x2x1x1x2
    python examples/fno4d.py --simulate 4

A gas without pressure, but with viscosity, moves by Burgers' equation, u_t + (u . grad) u = viscosity * laplace u, in a
periodic cube. Its fast parts catch up with the slow ones, so that fronts form, which viscosity smooths. The network
sees the three components of u at time 0, drawn at random, and has to tell those at all times at once.

    u at time 0, the same at all times, and t   on P_x, 1 x 1 x 2 x 2 x 1 x 1    n_b x 4 x n x n x n x times
    lift                                        a linear map of the channels     n_b x width x ...
    three FNO blocks                            in frequencies of space and time
    two linear maps                             of the channels                  n_b x 3 x n x n x n x times

Sources: Grady et al. (2023), arXiv:2204.01205, the network in space and time; Cole (1951), Hopf (1950), the solution.
"""

import os
import sys
from functools import partial
from pathlib import Path

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn

import beside
import launch
from training import say

TESTED = 8  # samples
PARTITION = "of the tensors, as in 1x1x2x1x1x2: batch, channels (1), three dimensions of space, and time"
VISCOSITY, FASTEST, UNTIL = 0.03, 1.0, 0.6


# --- The network ---------------------------------------------------------------------------------------------------


def operator(P_x: dj.Partition, blocks: int, width: int, modes: int) -> nn.Sequential:
    """Return the network, from u at time 0 and t to u at all times."""
    activations = [jax.nn.gelu] * (blocks - 1) + [None]
    return nn.Sequential(
        nn.DistributedPointwise(P_x, 4, width),
        *(nn.DistributedFNOBlock(P_x, width, width, modes, activation) for activation in activations),
        nn.DistributedPointwise(P_x, width, 2 * width),
        jax.nn.gelu,
        nn.DistributedPointwise(P_x, 2 * width, 3),
    )


def plain_operator(modes: int, params: tuple, state: tuple, x: jax.Array, training: bool) -> tuple[jax.Array, tuple]:
    """Compute the same network on one worker, in plain JAX."""

    def linear(its: dict, x: jax.Array) -> jax.Array:
        y = jnp.einsum("bixyzt,oi->boxyzt", x, its["weight"].reshape(its["weight"].shape[:2]))
        return y + its["bias"].reshape(-1, 1, 1, 1, 1)

    def spectral(weight: jax.Array, x: jax.Array) -> jax.Array:
        spectrum = jnp.fft.rfftn(x, axes=(2, 3, 4, 5))
        places = [jnp.r_[0:modes, n - modes : n] for n in x.shape[2:5]]
        low = jnp.ix_(jnp.arange(len(x)), jnp.arange(x.shape[1]), *places, jnp.arange(modes))
        product = jnp.einsum("bixyzt,ioxyzt->boxyzt", spectrum[low], weight[..., 0] + 1j * weight[..., 1])
        return jnp.fft.irfftn(jnp.zeros_like(spectrum).at[low].set(product), x.shape[2:], (2, 3, 4, 5))

    first, *blocks, before, _, last = params
    x = linear(first, x)
    for n, its in enumerate(blocks):
        x = spectral(its["spectral"]["weight"], x) + linear(its["pointwise"], x)
        x = jax.nn.gelu(x) if n < len(blocks) - 1 else x
    return linear(last, jax.nn.gelu(linear(before, x))), state


# --- The data ------------------------------------------------------------------------------------------------------


def flow(rng: np.random.Generator, size: int, times: np.ndarray) -> np.ndarray:
    """Return u, 3 x size x size x size x times, of a smooth random potential at time 0.

    u = -2 viscosity grad(log p) where p_t = viscosity * laplace p, which in frequencies is solved at once.
    """
    waves = 2 * np.pi * np.array(np.meshgrid(*[np.fft.fftfreq(size, 1 / size)] * 3, indexing="ij"))[..., None]
    squares = np.sum(waves**2, axis=0)
    smooth = np.fft.fftn(rng.normal(size=(size, size, size, 1)), axes=(0, 1, 2)) * np.exp(-squares / 40)
    potential = np.fft.ifftn(smooth, axes=(0, 1, 2)).real
    speed = np.abs(np.fft.ifftn(1j * waves * smooth, axes=(1, 2, 3))).max()
    p = np.exp(-potential * FASTEST / speed / (2 * VISCOSITY))
    spectrum = np.fft.fftn(p, axes=(0, 1, 2)) * np.exp(-VISCOSITY * squares * times)
    gradient = np.fft.ifftn(1j * waves * spectrum, axes=(1, 2, 3)).real
    return -2 * VISCOSITY * gradient / np.fft.ifftn(spectrum, axes=(0, 1, 2)).real


def make_data(samples: int, size: int, times: int, dtype: str) -> beside.Arrays:
    """Make inputs, n_b x 4 x ..., and targets, n_b x 3 x ..., of `times` times from 0 to UNTIL."""
    rng, t = np.random.default_rng(0), np.linspace(0, UNTIL, times)
    flows = np.stack([flow(rng, size, t) for _ in range(samples)])
    start = np.broadcast_to(flows[..., :1], flows.shape)
    t = np.broadcast_to(t / UNTIL, (samples, 1, *flows.shape[2:]))
    return np.concatenate([start, t], axis=1).astype(dtype), flows.astype(dtype)


# --- The run -------------------------------------------------------------------------------------------------------


def draw(truth: np.ndarray, said: np.ndarray, losses: list[float], out: Path) -> None:
    """Draw slices of u's first component, size x size x size x times, at some times, and the losses below them."""
    import matplotlib

    matplotlib.use("Agg")  # no screen
    from matplotlib import pyplot

    shown = np.unique(np.linspace(0, truth.shape[-1] - 1, 5).round().astype(int))
    figure = pyplot.figure(figsize=(2 * len(shown) + 1, 8), layout="constrained")
    panels = figure.add_gridspec(4, len(shown))
    most = np.abs(truth).max()
    for row, (name, u) in enumerate({"solution": truth, "network": said, "difference": said - truth}.items()):
        for column, time in enumerate(shown):
            panel = figure.add_subplot(panels[row, column])
            seen = u[:, :, truth.shape[2] // 2, time].T
            image = panel.imshow(seen, cmap="RdBu", vmin=-most, vmax=most, origin="lower")
            panel.set(xticks=[], yticks=[], ylabel=name if column == 0 else "")
            panel.set_title(f"t = {UNTIL * time / (truth.shape[-1] - 1):.2f}" if row == 0 else "")
        figure.colorbar(image, ax=figure.axes[-len(shown) :], label="x-velocity", shrink=0.9)
    below = figure.add_subplot(panels[3, :])
    below.semilogy(losses)
    below.set(ylabel="loss", xlabel="step")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=80)
    say(f"Picture: {out}")


def main() -> int:
    launch.simulate_if_asked()
    parser = beside.options(
        "Learn a flow in space and time.", "fno4d", PARTITION, steps=240, batch_size=4, learning_rate=6e-3
    )
    parser.add_argument("--size", type=int, default=16, help="cells along each dimension of space")
    parser.add_argument("--times", type=int, default=9, help="of which the first is 0")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--width", type=int, default=8, help="channels")
    parser.add_argument("--modes", type=int, default=4, help="frequencies that are kept along each dimension")
    parser.add_argument("--samples", type=int, default=64, help=f"to train on; {TESTED} more are to test on")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.dtype == "float64")
    P_world = dj.Partition()
    P_x = beside.partition(P_world, given.partition, 6)
    spec = dj.TensorSpec((given.batch_size, 4, *(given.size,) * 3, given.times), P_x)
    network = nn.Sequential(*operator(P_x, given.blocks, given.width, given.modes), x_spec=spec)
    say(network.table(given.dtype))
    samples = given.samples + TESTED
    made = make_data(samples, given.size, given.times, given.dtype) if P_world.rank == 0 else None
    x, u = P_world.broadcast_data(made)

    def local_blocks(batch: beside.Arrays) -> tuple[jax.Array, jax.Array]:
        return beside.block(batch[0], P_x), beside.block(batch[1], P_x)

    losses = (nn.DistributedMSELoss(P_x), lambda y, target: jnp.mean((y - target) ** 2))
    plain = partial(plain_operator, given.modes)
    ours, good = beside.train_both(network, plain, losses, (x[:-TESTED], u[:-TESTED]), local_blocks, given)

    seen, want = x[-TESTED:], u[-TESTED:]
    every = nn.Sequential(*network)  # for batches of another size
    y = dj.jit(lambda params, x: every(params, x))(ours.params, beside.block(seen, P_x))
    y = dj.gather(y, dj.TensorSpec(want.shape, P_x))
    if P_world.rank == 0:
        y = np.asarray(y)
        errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in ((y, want), (seen[:, :3], want))]
        say("Relative error in {} flows that it has not seen: {:.3f}; if u stayed: {:.3f}".format(TESTED, *errors))
        draw(want[0, 0], y[0, 0], ours.losses, given.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
