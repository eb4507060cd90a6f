"""Train a model-parallel network on real handwritten digits, and the same network sequentially, and compare the two.

    mpirun -n 4 python -m distdl_jax examples/digits_mlp.py
    mpirun -n 4 python -m distdl_jax examples/digits_mlp.py --partition 2x2
    python examples/digits_mlp.py --simulate 4
    python examples/digits_mlp.py

The network is a multilayer perceptron, 64 -> 128 -> 64 -> 10, for scikit-learn's 1,797 images of 8 x 8 pixels. The
weight of each layer is cut into P_fo x P_fi blocks, a block a worker. Layers need not be cut alike: between two of them
the activations are repartitioned.

    images              on the first worker
    a layer's input     on P_x, 1 x P_fi, the first P_fi workers
    a layer's weight    on P_W, P_fo x P_fi, the first P_fo * P_fi workers
    a layer's output    on P_y, 1 x P_fo, the last P_fo workers
    labels              where the last layer's output is, on the last worker

Every worker runs every line. One that holds no part of a tensor has a zero-volume array in its place.
"""

import os
import sys
from collections.abc import Callable
from functools import partial

# One thread a worker, because the workers share the machine's cores. JAX reads both when it is first used.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import numpy as np
from distdl_jax import nn

import digits_options
import launch
from training import DIFFERENCE, Data, say, train_both

WIDTHS = (64, 128, 64, 10)  # pixels, two hidden layers, classes
LAYERS = len(WIDTHS) - 1
ACCURACY = 0.95  # what the network has to reach on images that it was not trained on

Array = jax.Array | np.ndarray
Params = tuple[dict[str, jax.Array], ...]


# --- The network ---------------------------------------------------------------------------------------------------


def perceptron(P_world: dj.Partition, shapes: list[tuple[int, int]]) -> nn.Sequential:
    """Linear layers, whose weights are on partitions of the given shapes, each behind the move to where it takes its
    input, and relu between them; from the images on the first worker to the logits, n x 10, on the last layer's P_y."""

    layers: list[Callable] = []
    P = P_world.grid([1, 1])  # the images
    for i, (P_fo, P_fi) in enumerate(shapes):
        P_x = P_world.grid([1, P_fi])
        P_W = P_world.grid([P_fo, P_fi])
        P_y = P_world.grid([1, P_fo], range(P_world.size - P_fo, P_world.size))
        layers += [nn.Repartition(P, P_x), nn.DistributedLinear(P_x, P_y, P_W, WIDTHS[i], WIDTHS[i + 1]), jax.nn.relu]
        P = P_y
    return nn.Sequential(*layers[:-1])


def sequential_perceptron(params: Params, images: Array) -> jax.Array:
    """Compute the same network on one worker, in plain JAX."""
    x = images
    for i, layer in enumerate(layer for layer in params if layer):
        x = x @ layer["weight"].T + layer["bias"]
        x = jax.nn.relu(x) if i < LAYERS - 1 else x
    return x


# --- The data ------------------------------------------------------------------------------------------------------


def read_digits(dtype: str) -> tuple[Data, Data]:
    """Read the images to train on, and every fifth one to test on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.data.astype(dtype) / 16
    labels = np.eye(WIDTHS[-1], dtype=dtype)[digits.target]
    test = np.arange(len(images)) % 5 == 0
    return Data(images[~test], labels[~test]), Data(images[test], labels[test])


def local_blocks(network: nn.Sequential, data: Data) -> Data:
    """Return this worker's block of `data`: images where the network takes them, labels where its output is.

    The placeholders keep the number of rows. So a batch of another length has another shape on every worker, and all
    of them compile the step for it, or none does.
    """
    nothing = data.images[:, :0]
    return Data(
        images=data.images if network[0].P_x.active else nothing,
        labels=data.labels if network[-1].P_y.active else nothing,
    )


# --- The run -------------------------------------------------------------------------------------------------------


def main() -> int:
    launch.simulate_if_asked()
    P_world = dj.Partition()
    options = digits_options.parse(P_world.size, P_world.rank, LAYERS, list(DIFFERENCE))
    jax.config.update("jax_enable_x64", options.dtype == "float64")

    data = P_world.broadcast_data(read_digits(options.dtype) if P_world.rank == 0 else None)
    network = perceptron(P_world, options.partition)
    training, tested = len(data[0].images), len(data[1].images)
    say(f"{P_world.size} workers, {options.dtype}, {training} images to train on, {tested} to test on")
    say(network.table(options.dtype))

    good = train_both(
        network,
        sequential_perceptron,
        network.param_specs(),
        network.init(jax.random.key(0), options.dtype),
        data,
        partial(local_blocks, network),
        options,
        ACCURACY,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
