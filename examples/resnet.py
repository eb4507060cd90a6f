"""ResNet-18 on images that are split over the workers: in rows and columns, along the batch, or both.

    mpirun -n 4 python -m distdl_jax examples/resnet.py
    mpirun -n 4 python -m distdl_jax examples/resnet.py --partition 4x1x1x1
    mpirun -n 4 python -m distdl_jax examples/resnet.py --partition 2x1x2x1
    python examples/resnet.py --simulate 4

Batch normalisation takes mean and variance over all workers, whichever way the images are cut, so that the network is
the same for every partition. Its running statistics are a state, handed on from step to step; with them it is tested.

    images             on P_x, 1 x 1 x 2 x 2 for four workers          n_b x 1 x 64 x 64
    convolution, pool  kernels of 7 and 3, strides of 2                n_b x width x 16 x 16
    eight blocks       y = relu(body(x) + shortcut(x)), bodies of two  n_b x 8 width x 2 x 2
                       convolutions; the third, fifth and seventh
                       halve the image and double the channels
    mean, linear       the weight cut along its inputs                 n_b x 10

The convolutions' weights are spread over all workers, with the optimiser's state, so that not one worker alone updates
them.

Images are scikit-learn's digits, enlarged. It trains in float64: batch normalisation divides by small deviations, so in
float32 two trainings that differ by rounding are not the same any more after some ten steps, in plain JAX either.

Source: He et al. (2015), arXiv:1512.03385; Ioffe and Szegedy (2015), arXiv:1502.03167.
"""

import math
import os
import sys
from functools import partial
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

LAYERS = (2, 2, 2, 2)  # blocks of each width; with two convolutions each, the first one and the linear layer: 18
PARTITION = "of the images, as in 1x1x2x2, 4x1x1x1 or 2x1x2x1: batch, channels (1), rows and columns"


def strides(blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return each block's channels, in units of the first ones, and its stride."""
    return [(2**n, 2 if n and not k else 1) for n, count in enumerate(blocks) for k in range(count)]


def resnet(P_x: dj.Partition, width: int, blocks: tuple[int, ...] = LAYERS) -> nn.Sequential:
    """Build the network, from images to logits on the first workers along the batch."""

    def conv(before: int, after: int, kernel: int, stride: int) -> list[Any]:
        sizes = {"in_channels": before, "out_channels": after, "kernel_size": kernel}
        layer = nn.DistributedConv2d(P_x, **sizes, stride=stride, padding=kernel // 2, bias=False, sharded=True)
        return [layer, nn.DistributedBatchNorm(P_x, after)]

    layers: list[Any] = [*conv(1, width, 7, 2), jax.nn.relu, nn.DistributedMaxPool2d(P_x, 3, 2, 1)]
    before = width
    for times, stride in strides(blocks):
        after = times * width
        body = nn.Sequential(*conv(before, after, 3, stride), jax.nn.relu, *conv(after, after, 3, 1))
        shortcut = nn.Sequential(*conv(before, after, 1, stride)) if stride > 1 else None
        layers += [nn.Residual(body, shortcut), jax.nn.relu]
        before = after

    n, rest = P_x.shape[0], math.prod(P_x.shape[1:])
    first = P_x.create_partition_inclusive(range(0, P_x.size, rest))
    P_features, P_W = (P_x.grid(shape) for shape in ((n, rest), (n, 1, rest)))
    P_y = first.grid((n, 1))
    return nn.Sequential(
        *layers,
        nn.DistributedGlobalAvgPool(P_x),
        nn.Flatten(P_x, P_features),
        nn.DistributedLinear(P_features, P_y, P_W, before, digits.CLASSES),
    )


def plain_resnet(
    blocks: tuple[int, ...], params: tuple, state: tuple, x: jax.Array, training: bool
) -> tuple[jax.Array, tuple]:
    """Compute the same network on one worker, in plain JAX, with the same parameters and state."""

    def conv(its: dict, x: jax.Array, stride: int) -> jax.Array:
        low = its["weight"].shape[-1] // 2
        return lax.conv_general_dilated(x, its["weight"], (stride, stride), [(low, low)] * 2)

    def norm(its: dict, old: dict, x: jax.Array) -> tuple[jax.Array, dict]:
        new, mean, var = old, old["running_mean"], old["running_var"]
        if training:
            mean, var, n = x.mean((0, 2, 3)), x.var((0, 2, 3)), x.size // x.shape[1]
            new = {
                "running_mean": 0.9 * old["running_mean"] + 0.1 * lax.stop_gradient(mean),
                "running_var": 0.9 * old["running_var"] + 0.1 * lax.stop_gradient(var) * n / (n - 1),
                "num_batches_tracked": old["num_batches_tracked"] + 1,
            }
        mean, var, weight, bias = (its.reshape(-1, 1, 1) for its in (mean, var, its["weight"], its["bias"]))
        return (x - mean) / jnp.sqrt(var + 1e-5) * weight + bias, new

    def both(its: tuple, old: tuple, x: jax.Array, stride: int) -> tuple[jax.Array, dict]:
        return norm(its[1], old[1], conv(its[0], x, stride))

    news = list(state)
    x, news[1] = both(params[:2], state[:2], x, 2)
    x = lax.reduce_window(
        jax.nn.relu(x), -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), [(0, 0), (0, 0), (1, 1), (1, 1)]
    )
    for place, (_, stride) in zip(range(4, len(params), 2), strides(blocks), strict=False):
        its, old = params[place], state[place]
        y, first = both(its["body"][:2], old["body"][:2], x, stride)
        y, second = both(its["body"][3:], old["body"][3:], jax.nn.relu(y), 1)
        new = {"body": ({}, first, {}, {}, second), "shortcut": {}}
        if its["shortcut"]:
            x, norms = both(its["shortcut"], old["shortcut"], x, stride)
            new["shortcut"] = ({}, norms)
        x, news[place] = jax.nn.relu(y + x), new
    return x.mean((2, 3)) @ params[-1]["weight"].T + params[-1]["bias"], tuple(news)


def main() -> int:
    launch.simulate_if_asked()
    parser = beside.options(
        "Train ResNet-18 on digits.", "resnet", PARTITION, steps=60, batch_size=32, learning_rate=1e-3
    )
    parser.set_defaults(dtype="float64")
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution; He's has 64")
    parser.add_argument("--size", type=int, default=64, help="pixels a side, to which images are enlarged")
    parser.add_argument("--blocks", type=int, nargs="+", default=LAYERS, help="how many have each number of channels")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.dtype == "float64")
    P_world = dj.Partition()
    P_x, blocks = beside.partition(P_world, given.partition, 4), tuple(given.blocks)
    spec = dj.TensorSpec((given.batch_size, 1, given.size, given.size), P_x)
    network = nn.Sequential(*resnet(P_x, given.width, blocks), x_spec=spec)
    say(network.table(given.dtype))
    trained, tested = P_world.broadcast_data(digits.read(given.size, given.dtype) if P_world.rank == 0 else None)
    P_y = network[-1].P_y

    def local_blocks(batch: beside.Arrays) -> tuple[jax.Array, jax.Array]:
        return beside.block(batch[0], P_x), beside.block(batch[1], P_y)

    plain = partial(plain_resnet, blocks)
    ours, good = beside.train_both(network, plain, digits.losses(P_y), trained, local_blocks, given)
    every = nn.Sequential(*network)  # for batches of another size
    evaluated = dj.jit(lambda params, state, x: every(params, x, state=state, training=False)[0])
    y = evaluated(ours.params, ours.state, local_blocks(tested)[0])
    y = dj.gather(y, dj.TensorSpec((len(tested[0]), digits.CLASSES), P_y))
    if P_world.rank == 0:
        digits.report(y, tested, ours.losses, given.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
