"""Train a model-parallel network on real handwritten digits, and the same network sequentially, and compare the two.

    mpirun -n 4 python examples/digits_mlp.py
    mpirun -n 4 python examples/digits_mlp.py --partition 2x2
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
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

# One thread a worker, because the workers share the machine's cores. JAX reads both when it is first used.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import digits_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax import nn

WIDTHS = (64, 128, 64, 10)  # pixels, two hidden layers, classes
LAYERS = len(WIDTHS) - 1
ACCURACY = 0.95  # what the network has to reach on images that it was not trained on
DIFFERENCE = {"float64": 1e-10, "float32": 1e-4}  # how far its parameters may end up from the sequential ones

Array = jax.Array | np.ndarray
Params = list[dict[str, jax.Array]]


# --- The network ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Distributed linear layers with relu between them, each behind the move to where it takes its input."""

    moves: tuple[nn.Repartition, ...]
    layers: tuple[nn.DistributedLinear, ...]

    def init(self, key: jax.Array, dtype: str) -> Params:
        """This worker's blocks of the initial parameters."""
        keys = jax.random.split(key, LAYERS)
        return [layer.init(key, dtype) for layer, key in zip(self.layers, keys, strict=True)]

    def param_specs(self) -> list[dict[str, dj.TensorSpec]]:
        """What the parameters are as whole tensors."""
        return [layer.param_specs() for layer in self.layers]

    def __call__(self, params: Params, images: Array) -> jax.Array:
        """The logits, n x 10, on the last layer's P_y; n x 0 elsewhere."""
        x = images
        for i, (move, layer) in enumerate(zip(self.moves, self.layers, strict=True)):
            x = layer(params[i], move(x))
            x = jax.nn.relu(x) if i < LAYERS - 1 else x
        return x


def distributed_network(P_world: dj.Partition, shapes: list[tuple[int, int]]) -> Network:
    """The network whose weights are on partitions of the given shapes."""

    def grid(workers: range, *shape: int) -> dj.CartesianPartition:
        return P_world.create_partition_inclusive(workers).create_cartesian_topology_partition(shape)

    moves, layers = [], []
    P = grid(range(1), 1, 1)  # the images
    for i, (P_fo, P_fi) in enumerate(shapes):
        P_x = grid(range(P_fi), 1, P_fi)
        P_W = grid(range(P_fo * P_fi), P_fo, P_fi)
        P_y = grid(range(P_world.size - P_fo, P_world.size), 1, P_fo)
        moves.append(nn.Repartition(P, P_x))
        layers.append(nn.DistributedLinear(P_x, P_y, P_W, WIDTHS[i], WIDTHS[i + 1]))
        P = P_y
    return Network(tuple(moves), tuple(layers))


def sequential_network(params: Params, images: Array) -> jax.Array:
    """The same network on one worker, in plain JAX."""
    x = images
    for i, layer in enumerate(params):
        x = x @ layer["weight"].T + layer["bias"]
        x = jax.nn.relu(x) if i < LAYERS - 1 else x
    return x


# --- Training: the same code for both ------------------------------------------------------------------------------


class Data(NamedTuple):
    """What a worker holds of some images, n x 64, and of their labels, one-hot, n x 10."""

    images: np.ndarray
    labels: np.ndarray


class Training(NamedTuple):
    """The trained parameters; and for each epoch the mean loss, the accuracy on the test images, and the seconds."""

    params: Params
    losses: list[float]
    accuracies: list[float]
    seconds: list[float]


def loss(network: Callable, params: Params, data: Data) -> jax.Array:
    """This worker's part of the mean cross-entropy. Where logits and labels are n x 0, it comes to 0."""
    return optax.softmax_cross_entropy(network(params, data.images), data.labels).mean()


def accuracy(network: Callable, params: Params, data: Data) -> jax.Array:
    """This worker's part of the fraction of images whose largest logit is their label's; 0 where they are n x 0."""
    logits = network(params, data.images)
    largest = logits == logits.max(axis=1, keepdims=True, initial=-jnp.inf)
    return jnp.sum(data.labels * largest) / len(data.labels)


def train(
    value_and_grad: Callable, accuracy: Callable, params: Params, train_data: Data, test_data: Data, options: Namespace
) -> Training:
    optimiser = optax.adam(options.learning_rate)

    @jax.jit
    def step(params: Params, state: Any, batch: Data) -> tuple[Params, Any, jax.Array]:
        value, gradient = value_and_grad(params, batch)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    accuracy = jax.jit(accuracy)
    state = optimiser.init(params)
    losses, accuracies, seconds = [], [], []
    for epoch in range(options.epochs):
        start = time.perf_counter()
        total = 0.0
        for batch in batches(train_data, options.batch_size, epoch):
            params, state, value = step(params, state, batch)
            total += float(value) * len(batch.images)
        seconds.append(time.perf_counter() - start)
        losses.append(total / len(train_data.images))
        accuracies.append(float(accuracy(params, test_data)))
        if epoch % 5 == 0 or epoch == options.epochs - 1:
            line = f"  epoch {epoch + 1:3}  loss {losses[-1]:.5f}  accuracy {accuracies[-1]:.4f}  {seconds[-1]:.3f} s"
            say(line + ("  (compiles)" if epoch == 0 else ""))
    return Training(params, losses, accuracies, seconds)


def batches(data: Data, size: int, epoch: int) -> Iterator[Data]:
    """The data in an order of its own for each epoch, the same on every worker; the last batch is what is left."""
    order = np.random.default_rng(epoch).permutation(len(data.images))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield Data(data.images[rows], data.labels[rows])


# --- The data ------------------------------------------------------------------------------------------------------


def read_digits(dtype: str) -> tuple[Data, Data]:
    """The images to train on, and every fifth one to test on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.data.astype(dtype) / 16
    labels = np.eye(WIDTHS[-1], dtype=dtype)[digits.target]
    test = np.arange(len(images)) % 5 == 0
    return Data(images[~test], labels[~test]), Data(images[test], labels[test])


def held(data: Data, network: Network) -> Data:
    """What this worker holds of `data`: images where the network takes them, labels where its output is.

    The placeholders keep the number of rows. So a batch of another length has another shape on every worker, and all
    of them compile the step for it, or none does.
    """
    nothing = data.images[:, :0]
    return Data(
        images=data.images if network.moves[0].P_x.active else nothing,
        labels=data.labels if network.layers[-1].P_y.active else nothing,
    )


# --- The run -------------------------------------------------------------------------------------------------------


def main() -> int:
    P_world = dj.Partition()
    options = digits_options.parse(P_world.size, P_world.rank, LAYERS, list(DIFFERENCE))
    jax.config.update("jax_enable_x64", options.dtype == "float64")

    train_data, test_data = P_world.broadcast_data(read_digits(options.dtype) if P_world.rank == 0 else None)
    network = distributed_network(P_world, options.partition)
    params = network.init(jax.random.key(0), options.dtype)
    whole_params = dj.gather(params, network.param_specs())

    training, tested = len(train_data.images), len(test_data.images)
    say(f"{P_world.size} workers, {options.dtype}, {training} images to train on, {tested} to test on")
    for layer in network.layers:
        say(f"  {layer}: x on {layer.P_x.ranks}, W on {layer.P_W.ranks}, y on {layer.P_y.ranks}")

    say("Distributed:")
    distributed = train(
        dj.value_and_grad(partial(loss, network)),
        lambda *args: dj.functional.all_sum_reduce(accuracy(network, *args), P_world, axes_keep=()),
        params,
        held(train_data, network),
        held(test_data, network),
        options,
    )
    trained_params = dj.gather(distributed.params, network.param_specs())

    good = True
    if P_world.rank == 0:  # nothing in here moves data between workers
        say("Sequential, from the same parameters, on one worker:")
        sequential = train(
            jax.value_and_grad(partial(loss, sequential_network)),
            partial(accuracy, sequential_network),
            whole_params,
            train_data,
            test_data,
            options,
        )
        plot(distributed, sequential, options)
        good = compare(distributed, sequential, trained_params, options)
    sleep_until_all_are_here()
    return 0 if P_world.broadcast_data(good) else 1


def compare(distributed: Training, sequential: Training, trained_params: Params, options: Namespace) -> bool:
    """Print the figures that the example stands for; whether they are what it promises."""
    pairs = zip(jax.tree.leaves(trained_params), jax.tree.leaves(sequential.params), strict=True)
    difference = max(float(jnp.max(jnp.abs(ours - theirs))) for ours, theirs in pairs)
    accurate = distributed.accuracies[-1] >= ACCURACY
    equal = difference < DIFFERENCE[options.dtype]

    say(f"Test accuracy: {distributed.accuracies[-1]:.4f} distributed, {sequential.accuracies[-1]:.4f} sequential")
    for name, training in (("distributed", distributed), ("sequential", sequential)):
        say(f"Seconds per epoch, {name}: {statistics.median(training.seconds[1:] or training.seconds):.4f} (median)")
    say(f"Largest difference between their parameters: {difference:.1e}")
    say(f"Training curve: {options.out}")
    if not accurate:
        say(f"FAILED: the test accuracy must be {ACCURACY} or more.")
    if not equal:
        say(f"FAILED: the difference must be below {DIFFERENCE[options.dtype]:.0e} in {options.dtype}.")
    return accurate and equal


def plot(distributed: Training, sequential: Training, options: Namespace) -> None:
    """Write the training curves of both as a picture."""
    import matplotlib

    matplotlib.use("Agg")  # no screen
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    epochs = range(1, options.epochs + 1)
    for name, training, style in (("distributed", distributed, "-"), ("sequential", sequential, "--")):
        left.semilogy(epochs, training.losses, style, label=name)
        right.plot(epochs, training.accuracies, style, label=name)
    left.set(title="Training loss", xlabel="epoch", ylabel="mean cross-entropy")
    right.set(title="Test accuracy", xlabel="epoch", ylabel="fraction of images")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=120)


def say(text: str) -> None:
    """Print on the first worker."""
    if MPI.COMM_WORLD.rank == 0:
        print(text, flush=True)


def sleep_until_all_are_here() -> None:
    """Wait for the other workers without using a core: an MPI call that waits spins."""
    arrival = MPI.COMM_WORLD.Ibarrier()
    while not arrival.Test():
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
