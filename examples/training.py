"""What the training examples share: one loop for the distributed and the sequential network, and their comparison."""

import os
import platform
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
import optax

DIFFERENCE = {"float64": 1e-10, "float32": 1e-4}  # how far apart the two networks may end up

Params = Any


class Data(NamedTuple):
    """What a worker holds of some images, n x ..., and of their labels, one-hot, n x 10."""

    images: np.ndarray
    labels: np.ndarray


class Training(NamedTuple):
    """The trained parameters; each step's loss; for each epoch the mean loss, the test accuracy, and the seconds."""

    params: Params
    steps: list[float]
    losses: list[float]
    accuracies: list[float]
    seconds: list[float]


def loss(network: Callable, params: Params, data: Data) -> jax.Array:
    """Compute this worker's part of the mean cross-entropy. Where logits and labels are n x 0, it is 0."""
    return optax.softmax_cross_entropy(network(params, data.images), data.labels).mean()


def accuracy(network: Callable, params: Params, data: Data) -> jax.Array:
    """Compute this worker's part of the fraction of images read right; 0 where logits and labels are n x 0."""
    logits = network(params, data.images)
    largest = logits == logits.max(axis=1, keepdims=True, initial=-jnp.inf)
    return jnp.sum(data.labels * largest) / len(data.labels)


def train_both(
    network: Callable,
    sequential_network: Callable,
    param_specs: Any,
    params: Params,
    data: tuple[Data, Data],
    local_blocks: Callable[[Data], Data],
    options: Namespace,
    accuracy_goal: float,
) -> bool:
    """Train the distributed network, then on worker 0 the sequential one from the same parameters, and compare them.

    `data` is the whole data to train and to test on, and `local_blocks` gives this worker's blocks of such. Return
    whether the figures are as the example promises, on every worker.
    """
    P_world = dj.Partition()
    hosts = P_world.allgather_data(platform.node())
    if (sharing := hosts.count(hosts[0])) > (cores := os.cpu_count() or 1):
        say(f"{sharing} workers share {cores} cores: this shows that the networks are equal, not how fast they are.")
    whole_params = dj.gather(params, param_specs)
    say("Distributed:")
    distributed = train(
        dj.jit,
        dj.value_and_grad(partial(loss, network)),
        lambda *args: dj.functional.all_sum_reduce(accuracy(network, *args), P_world, axes_keep=()),
        params,
        local_blocks(data[0]),
        local_blocks(data[1]),
        options,
    )
    trained_params = dj.gather(distributed.params, param_specs)

    good = True
    if P_world.rank == 0:  # nothing in here moves data between workers
        say("Sequential, from the same parameters, on one worker:")
        sequential = train(
            jax.jit,
            jax.value_and_grad(partial(loss, sequential_network)),
            partial(accuracy, sequential_network),
            whole_params,
            *data,
            options,
        )
        plot(distributed, sequential, options)
        good = compare(distributed, sequential, trained_params, options, accuracy_goal)
    return P_world.broadcast_data(good)


def train(
    jit: Callable,
    value_and_grad: Callable,
    accuracy: Callable,
    params: Params,
    train_data: Data,
    test_data: Data,
    options: Namespace,
) -> Training:
    """Train with adam; all that makes it distributed or sequential is in `jit`, `value_and_grad` and `accuracy`.

    `options.learning_rate` is a number or a schedule.
    """
    optimiser = optax.adam(options.learning_rate)

    @jit
    def step(params: Params, state: Any, batch: Data) -> tuple[Params, Any, jax.Array]:
        value, gradient = value_and_grad(params, batch)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    accuracy = jit(accuracy)
    state = optimiser.init(params)
    steps, losses, accuracies, seconds = [], [], [], []
    for epoch in range(options.epochs):
        start = time.perf_counter()
        total = 0.0
        for batch in batches(train_data, options.batch_size, epoch):
            params, state, value = step(params, state, batch)
            steps.append(float(value))
            total += steps[-1] * len(batch.images)
        seconds.append(time.perf_counter() - start)
        losses.append(total / len(train_data.images))
        accuracies.append(float(accuracy(params, test_data)))
        if epoch % 5 == 0 or epoch == options.epochs - 1:
            line = f"  epoch {epoch + 1:3}  loss {losses[-1]:.5f}  accuracy {accuracies[-1]:.4f}  {seconds[-1]:.3f} s"
            say(line + ("  (compiles)" if epoch == 0 else ""))
    return Training(params, steps, losses, accuracies, seconds)


def batches(data: Data, size: int, epoch: int) -> Iterator[Data]:
    """Yield the data in an order of its own for each epoch, the same on every worker; the last batch is the rest."""
    order = np.random.default_rng(epoch).permutation(len(data.images))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield Data(data.images[rows], data.labels[rows])


def compare(
    distributed: Training, sequential: Training, trained_params: Params, options: Namespace, accuracy_goal: float
) -> bool:
    """Print the figures that the example stands for; whether they are what it promises."""
    pairs = zip(jax.tree.leaves(trained_params), jax.tree.leaves(sequential.params), strict=True)
    difference = max(float(jnp.max(jnp.abs(ours - theirs))) for ours, theirs in pairs)
    losses_apart = max(abs(a - b) for a, b in zip(distributed.steps, sequential.steps, strict=True))
    accurate = distributed.accuracies[-1] >= accuracy_goal
    equal = max(difference, losses_apart) < DIFFERENCE[options.dtype]

    say(f"Test accuracy: {distributed.accuracies[-1]:.4f} distributed, {sequential.accuracies[-1]:.4f} sequential")
    for name, training in (("distributed", distributed), ("sequential", sequential)):
        say(f"Seconds per epoch, {name}: {statistics.median(training.seconds[1:] or training.seconds):.4f} (median)")
    say(f"Largest difference between their parameters: {difference:.1e}")
    say(f"Largest difference between their losses at any step: {losses_apart:.1e}")
    say(f"Training curve: {options.out}")
    if not accurate:
        say(f"FAILED: the test accuracy must be {accuracy_goal} or more.")
    if not equal:
        say(f"FAILED: the differences must be below {DIFFERENCE[options.dtype]:.0e} in {options.dtype}.")
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
    if dj.Partition().rank == 0:
        print(text, flush=True)
