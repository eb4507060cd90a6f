"""VGG-11 whose layers are on alternating teams: half of the workers have the odd layers, the others the even ones.

    mpirun -n 4 python -m distdl_jax examples/vgg.py
    mpirun -n 4 python -m distdl_jax examples/vgg.py --partition 2x1x1x1
    python examples/vgg.py --simulate 4

Layers need not share their workers: behind each convolution a repartition takes the images to the other team. So the
weights, and what is kept for the way back, are spread over all workers, also those of layers that are not cut.

    images         on the first team, P_a, 1 x 1 x 2 x 1 of four workers      n_b x 1 x 32 x 32
    convolutions   eight, with five pools: on P_a, P_b, P_a, ...               n_b x 8 width x 1 x 1
    three linear   the weights cut along inputs, outputs, inputs              n_b x 10

Images are scikit-learn's digits, enlarged.

Source: Simonyan and Zisserman (2015), arXiv:1409.1556, the network, configuration A.
"""

import os
import sys
from typing import Any

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
from distdl_jax import nn
from jax import lax

import beside
import digits
import launch
from training import say

SIZE = 32  # pixels a side, which five pools make 1
CHANNELS = (1, 2, 4, 4, 8, 8, 8, 8)  # of the convolutions, times the width
POOLED = (0, 1, 3, 5, 7)  # convolutions with a pool behind them
PARTITION = "of the images, on each of the two teams, as in 1x1x2x1: batch, channels (1), rows and columns"


def vgg(teams: tuple[dj.Partition, dj.Partition], width: int) -> nn.Sequential:
    """Build the network, from images on the first team to logits on a worker of the other one."""
    layers: list[Any] = []
    before = 1
    for n, times in enumerate(CHANNELS):
        P = teams[n % 2]
        layers += [nn.Repartition(teams[1 - n % 2], P)] if n else []
        layers += [nn.DistributedConv2d(P, in_channels=before, out_channels=times * width, kernel_size=3, padding=1)]
        layers += [jax.nn.relu] + ([nn.DistributedMaxPool2d(P, 2)] if n in POOLED else [])
        before = times * width

    here, there = teams[(len(CHANNELS) - 1) % 2], teams[len(CHANNELS) % 2]
    p = here.size
    return nn.Sequential(
        *layers,
        nn.Flatten(here, here.grid([1, p])),
        *(nn.DistributedLinear(here.grid([1, p]), there.grid([1, 1]), here.grid([1, p]), before, before), jax.nn.relu),
        *(
            nn.DistributedLinear(there.grid([1, 1]), there.grid([1, p]), there.grid([p, 1]), before, before),
            jax.nn.relu,
        ),
        nn.DistributedLinear(there.grid([1, p]), here.grid([1, 1]), there.grid([1, p]), before, digits.CLASSES),
    )


def scaled(params: Any) -> Any:
    """He's initial parameters, of PyTorch's, with which hardly anything of the image is left behind eleven layers.

    Behind a rectifier a layer's output is as large as its input if weights have the variance 2 / fan_in. PyTorch's have
    1 / (3 fan_in), so these are sqrt(6) times as large; and biases are 0.
    """
    return jax.tree.map(lambda p: p * 6**0.5 if p.ndim > 1 else 0 * p, params)


def plain_vgg(params: tuple, state: Any, x: jax.Array, training: bool) -> tuple[jax.Array, Any]:
    """Compute the same network on one worker, in plain JAX."""
    own = [its for its in params if its]
    for n, its in enumerate(own[: len(CHANNELS)]):
        x = lax.conv_general_dilated(x, its["weight"], (1, 1), "SAME") + its["bias"].reshape(-1, 1, 1)
        x = jax.nn.relu(x)
        if n in POOLED:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    first, second, last = own[len(CHANNELS) :]
    for its in (first, second):
        x = jax.nn.relu(x @ its["weight"].T + its["bias"])
    return x @ last["weight"].T + last["bias"], state


def main() -> int:
    launch.simulate_if_asked()
    parser = beside.options("Train VGG-11 on digits.", "vgg", PARTITION, steps=120, batch_size=32, learning_rate=1e-3)
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution; Simonyan's has 64")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.dtype == "float64")
    P_world = dj.Partition()
    half = max(P_world.size // 2, 1)
    both = (
        P_world.create_partition_inclusive(range(half)),
        P_world.create_partition_inclusive(range(P_world.size)[-half:]),
    )
    teams = tuple(beside.partition(P, given.partition, 4) for P in both)
    spec = dj.TensorSpec((given.batch_size, 1, SIZE, SIZE), teams[0])
    network = nn.Sequential(*vgg(teams, given.width), x_spec=spec)
    say(network.table(given.dtype))
    trained, tested = P_world.broadcast_data(digits.read(SIZE, given.dtype) if P_world.rank == 0 else None)
    P_x, P_y = teams[0], network[-1].P_y

    def local_blocks(batch: beside.Arrays) -> tuple[jax.Array, jax.Array]:
        return beside.block(batch[0], P_x), beside.block(batch[1], P_y)

    ours, good = beside.train_both(network, plain_vgg, digits.losses(P_y), trained, local_blocks, given, scaled)
    y = dj.jit(lambda params, x: nn.Sequential(*network)(params, x))(ours.params, local_blocks(tested)[0])
    y = dj.gather(y, dj.TensorSpec((len(tested[0]), digits.CLASSES), P_y))
    if P_world.rank == 0:
        digits.report(y, tested, ours.losses, given.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
