"""Super-resolution on photographs that are split over the workers: a network that doubles their resolution.

    mpirun -n 4 python -m distdl_jax examples/super_resolution.py
    mpirun -n 4 python -m distdl_jax examples/super_resolution.py --partition 2x1x2x1
    python examples/super_resolution.py --simulate 4

Patches of two photographs (those that scikit-learn carries) are made half as large, by means over 2 x 2 pixels, and the
network is to tell the patches. It tells what is missing from linear interpolation.

    small           on P_x, 1 x 1 x 2 x 2 for four workers      n_b x 3 x n x n
    conv, conv      with neighbours' rows and columns           n_b x width x n x n
    upsample        nearest                                     n_b x width x 2 n x 2 n
    conv, conv                                                  n_b x 3 x 2 n x 2 n
    + upsample      of the small one, linear

Source: Dong et al. (2016), arXiv:1501.00092; Odena et al. (2016), doi:10.23915/distill.00003, resize and convolve.
"""

import os
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn
from jax import lax

import beside
import launch
from training import say

TESTED = 8  # patches
KERNELS = (5, 3, 3, 3)
PARTITION = "of the images, as in 1x1x2x2: batch, channels (1), rows and columns"


@dataclass(frozen=True)
class SuperResolution:
    """The network on `P_x`, P_n x 1 x P_1 x P_0, for images of `x_spec`, or of any size."""

    P_x: dj.Partition
    width: int
    x_spec: dj.TensorSpec | None = None

    @cached_property
    def details(self) -> nn.Sequential:
        """The layers that compute, from the small image, the details that the interpolated one lacks."""

        def conv(before: int, after: int, kernel: int) -> nn.DistributedConv2d:
            return nn.DistributedConv2d(
                self.P_x, in_channels=before, out_channels=after, kernel_size=kernel, padding="same"
            )

        w = self.width
        return nn.Sequential(
            *(conv(3, w, KERNELS[0]), jax.nn.relu, conv(w, w, KERNELS[1]), jax.nn.relu),
            nn.DistributedUpsample(self.P_x, scale_factor=2),
            *(conv(w, w, KERNELS[2]), jax.nn.relu, conv(w, 3, KERNELS[3])),
            x_spec=self.x_spec,
        )

    @cached_property
    def interpolated(self) -> nn.DistributedUpsample:
        return nn.DistributedUpsample(self.P_x, scale_factor=2, mode="linear")

    def init(self, key: jax.Array, dtype: str) -> Any:
        """Return this worker's blocks of the initial parameters."""
        return self.details.init(key, dtype)

    def init_state(self, dtype: str) -> Any:
        """There is none."""
        return self.details.init_state(dtype)

    def param_specs(self) -> Any:
        """Return the specs of the parameters."""
        return self.details.param_specs()

    def state_specs(self) -> Any:
        """There is no state."""
        return self.details.state_specs()

    def __call__(self, params: Any, x: jax.Array, *, state: Any, training: bool = True) -> tuple[jax.Array, Any]:
        """Return this worker's block of the large images."""
        y, state = self.details(params, x, state=state, training=training)
        return y + self.interpolated(x), state


def scaled(params: Any) -> Any:
    """Set the last convolution to 0, so that the network begins as linear interpolation."""
    return (*params[:-1], jax.tree.map(jnp.zeros_like, params[-1]))


def doubled(x: jax.Array, method: str) -> jax.Array:
    """Twice the rows and columns."""
    return jax.image.resize(x, (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), method)


def plain_super_resolution(params: tuple, state: Any, x: jax.Array, training: bool) -> tuple[jax.Array, Any]:
    """Compute the same network on one worker, in plain JAX."""
    y = x
    for n, its in enumerate(its for its in params if its):
        y = doubled(y, "nearest") if n == 2 else y
        y = lax.conv_general_dilated(y, its["weight"], (1, 1), "SAME") + its["bias"].reshape(-1, 1, 1)
        y = jax.nn.relu(y) if n < 3 else y
    return y + doubled(x, "linear"), state


def make_data(samples: int, size: int, dtype: str) -> beside.Arrays:
    """Small patches, n_b x 3 x size x size, and the patches, of 2 size x 2 size: values from 0 to 1."""
    from sklearn.datasets import load_sample_images

    photographs, rng = load_sample_images().images, np.random.default_rng(0)
    patches = []
    for n in range(samples):
        whole = photographs[n % 2]
        row, column = (rng.integers(0, length - 2 * size + 1) for length in whole.shape[:2])
        patches.append(whole[row : row + 2 * size, column : column + 2 * size].transpose(2, 0, 1) / 255)
    large = np.stack(patches)
    small = large.reshape(samples, 3, size, 2, size, 2).mean(axis=(3, 5))
    return small.astype(dtype), large.astype(dtype)


def decibels(y: np.ndarray, want: np.ndarray) -> float:
    """Compute the peak signal-to-noise ratio."""
    return float(-10 * np.log10(np.mean((y - want) ** 2)))


def main() -> int:
    launch.simulate_if_asked()
    parser = beside.options(
        "Double the resolution of photographs.",
        "super_resolution",
        PARTITION,
        **{"steps": 160, "batch_size": 8, "learning_rate": 3e-3},
    )
    parser.add_argument("--size", type=int, default=24, help="rows and columns of the small patches")
    parser.add_argument("--width", type=int, default=16, help="channels")
    parser.add_argument("--samples", type=int, default=200, help=f"to train on; {TESTED} more are to test on")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.dtype == "float64")
    P_world = dj.Partition()
    P_x = beside.partition(P_world, given.partition, 4)
    spec = dj.TensorSpec((given.batch_size, 3, given.size, given.size), P_x)
    network = SuperResolution(P_x, given.width, spec)
    say(network.details.table(given.dtype))
    made = make_data(given.samples + TESTED, given.size, given.dtype) if P_world.rank == 0 else None
    small, large = P_world.broadcast_data(made)

    def local_blocks(batch: beside.Arrays) -> tuple[jax.Array, jax.Array]:
        return beside.block(batch[0], P_x), beside.block(batch[1], P_x)

    losses = (nn.DistributedMSELoss(P_x), lambda y, target: jnp.mean((y - target) ** 2))
    data = (small[:-TESTED], large[:-TESTED])
    ours, good = beside.train_both(network, plain_super_resolution, losses, data, local_blocks, given, scaled)

    x, want = small[-TESTED:], large[-TESTED:]
    every = SuperResolution(P_x, given.width)  # for batches of another size, too
    y, _ = dj.jit(partial(every, training=False))(ours.params, beside.block(x, P_x), state=ours.state)
    y = dj.gather(y, dj.TensorSpec(want.shape, P_x))
    if P_world.rank == 0:
        y, interpolated = np.asarray(y), np.asarray(doubled(jnp.asarray(x), "linear"))
        quality, before = decibels(y, want), decibels(interpolated, want)
        say(f"{TESTED} patches that it has not seen: {quality:.2f} dB, {before:.2f} dB interpolated")
        names = {"interpolated": interpolated, "what the network says": y, "the patch": want}
        panels = {name: np.clip(its[0].transpose(1, 2, 0), 0, 1).astype(float) for name, its in names.items()}
        beside.draw(panels, ours.losses, given.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
