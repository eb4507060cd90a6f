"""A U-Net on a volume that is split over the workers: it learns how waves go on.

    mpirun -n 4 python -m distdl_jax examples/unet3d.py
    mpirun -n 4 python -m distdl_jax examples/unet3d.py --check --dtype float64 --steps 20
    python examples/unet3d.py --simulate 4

In three dimensions a network's weights are small and its activations are large, and one sample may not fit on one
worker. So everything that has voxels is cut into blocks, data, activations and their gradients, and the weights are
broadcast. The data are made here: a wave equation is solved in random layered media (wave3d.py), on the same blocks.
The network sees the pressure at two times and the medium's velocity, and has to tell the pressure as much later; or
rather what it is beyond the straight line through the two. The solver takes eight steps for that.

    u, u before, c  1 x 3 x n x n x n          on 1 x 1 x 2 x 2 x 1 for four workers
    down            conv, conv, pool           1 x 8 x n^3, 1 x 16 x (n/2)^3, 1 x 32 x (n/4)^3
    up              transposed conv, join,     1 x 16 x (n/2)^3, 1 x 8 x n^3
                    conv, conv
    u later         1 x 1 x n x n x n

First the program shows what the splitting is for: the memory of one training step on 1, 2 and 4 of its workers.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
import optax
from distdl_jax import nn
from jax import lax

import launch
from memory_use import planned, resident_memory
from training import say
from unet3d_picture import draw
from wave3d import FASTEST, SLOWEST, WaveSolver

SEEN = 3  # fields
FIRST, APART = 40, 8  # the solver's steps before the first snapshot, and between two
AGREE = {"float64": 1e-10, "float32": 1e-4}  # how far apart the losses may be, relative to the first

Params = Any


# --- The network ---------------------------------------------------------------------------------------------------


def u_net(apply: Callable, pool: Callable, join: Callable, params: Params, x: jax.Array) -> jax.Array:
    """Compute the network: `apply` is the i-th of the convolutions, (params, i, x); `join` concatenates channels."""
    levels, names = [], iter(range(len(params)))

    def one(x: jax.Array) -> jax.Array:
        i = next(names)
        return apply(params[i], i, x)

    def twice(x: jax.Array) -> jax.Array:
        return jax.nn.relu(one(jax.nn.relu(one(x))))

    for _ in range((len(params) - 3) // 5):  # five convolutions a level, three at the bottom and the end
        levels.append(twice(x))
        x = pool(levels[-1])
    x = twice(x)
    for skipped in reversed(levels):
        x = twice(join(one(x), skipped))
    return one(x)


@dataclass(frozen=True)
class UNet3d:
    """The network on `P`, 1 x 1 x P_2 x P_1 x P_0; outside P, its input and output are zero-volume, 1 x 0."""

    P: dj.CartesianPartition
    channels: tuple[int, ...]

    @cached_property
    def convolutions(self) -> tuple[nn.DistributedConv3d | nn.DistributedConvTranspose3d, ...]:
        """The convolutions in the order of their use; each level on the way up begins with a transposed one."""
        layers, before = [], SEEN

        def conv(into: int, out: int, kernel: int = 3) -> nn.DistributedConv3d:
            return nn.DistributedConv3d(self.P, in_channels=into, out_channels=out, kernel_size=kernel, padding="same")

        for channels in self.channels:
            layers += [conv(before, channels), conv(channels, channels)]
            before = channels
        for channels in reversed(self.channels[:-1]):
            sizes = {"in_channels": before, "out_channels": channels, "kernel_size": 2, "stride": 2}
            layers += [nn.DistributedConvTranspose3d(self.P, **sizes)]
            layers += [conv(2 * channels, channels), conv(channels, channels)]
            before = channels
        return *layers, conv(before, 1, 1)

    @cached_property
    def pool(self) -> nn.DistributedMaxPool3d:
        return nn.DistributedMaxPool3d(self.P, 2)

    @cached_property
    def join(self) -> nn.Concatenate:
        return nn.Concatenate(self.P, axis=1)

    def init(self, key: jax.Array, dtype: str) -> Params:
        """Return this worker's blocks of the initial parameters."""
        keys = jax.random.split(key, len(self.convolutions))
        return [conv.init(key, dtype) for conv, key in zip(self.convolutions, keys, strict=True)]

    def param_specs(self) -> list[dict[str, dj.TensorSpec]]:
        """Return the specs of the parameters."""
        return [conv.param_specs() for conv in self.convolutions]

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Return this worker's block of the output."""

        def apply(its: Params, i: int, x: jax.Array) -> jax.Array:
            with jax.named_scope(f"conv_{i}"):  # a row of its own in dj.profile
                return self.convolutions[i](its, x)

        return u_net(apply, self.pool, self.join, params, x)


def sequential_u_net(params: Params, x: jax.Array) -> jax.Array:
    """Compute the same network on one worker, in plain JAX."""

    def conv(its: dict[str, jax.Array], i: int, x: jax.Array) -> jax.Array:
        weight = its["weight"]
        if weight.shape[-1] == 2:  # a transposed one: each voxel becomes a block of eight, times the weight
            b, _, *sizes = x.shape
            y = jnp.einsum("bidhw,iokml->bodkhmwl", x, weight).reshape(b, weight.shape[1], *(2 * n for n in sizes))
        else:
            y = lax.conv_general_dilated(x, weight, (1, 1, 1), "SAME")
        return y + its["bias"].reshape(-1, 1, 1, 1)

    def pool(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2, 2), (1, 1, 2, 2, 2), "VALID")

    return u_net(conv, pool, lambda *xs: jnp.concatenate(xs, axis=1), params, x)


def volume_partition(P_world: dj.Partition, workers: int) -> dj.CartesianPartition:
    """Return the first workers on a grid 1 x 1 x P_2 x P_1 x P_0 that is as near to a cube as can be."""
    shape, left, factor = [1, 1, 1], workers, 2
    factors = []
    while left > 1:
        while left % factor:
            factor += 1
        factors.append(factor)
        left //= factor
    for factor in reversed(factors):
        shape[shape.index(min(shape))] *= factor
    return P_world.grid([1, 1, *shape])


# --- Training ------------------------------------------------------------------------------------------------------


def squared_error(network: Callable, params: Params, x: jax.Array, target: jax.Array, voxels: int) -> jax.Array:
    """Compute this worker's part of the mean squared error over all voxels."""
    return jnp.sum((network(params, x) - target) ** 2) / voxels


def training_step(jit: Callable, value_and_grad: Callable, optimiser: optax.GradientTransformation) -> Callable:
    """Return one jitted step; `jit` and `value_and_grad` alone make it distributed or sequential."""

    @jit
    def step(params: Params, state: Any, x: jax.Array, target: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradient = value_and_grad(params, x, target)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def train(
    jit: Callable, value_and_grad: Callable, params: Params, data: list, options: argparse.Namespace
) -> tuple[Params, list]:
    """Return the trained parameters, and the loss before each step; a step takes one sample."""
    optimiser = optax.adam(optax.cosine_decay_schedule(options.learning_rate, options.steps))
    step, state, losses = training_step(jit, value_and_grad, optimiser), optimiser.init(params), []
    start = time.perf_counter()
    for n in range(options.steps):
        params, state, value = step(params, state, *data[n % len(data)])
        losses.append(float(value))
        if (n + 1) % max(options.steps // 8, 1) == 0:
            recent = np.mean(losses[-len(data) :])
            say(f"  step {n + 1:4}  loss {recent:.4f}  {time.perf_counter() - start:5.1f} s")
    return params, losses


def report_memory(P_world: dj.Partition, options: argparse.Namespace) -> None:
    """Print what one training step takes on 1, 2 and 4 of the workers.

    All steps are compiled before any runs, and the largest runs last: what is resident only grows.
    """
    n, optimiser, steps = options.memory_volume, optax.adam(options.learning_rate), {}
    for count in (count for count in (4, 2, 1) if count <= P_world.size):
        network = UNet3d(volume_partition(P_world, count), tuple(options.channels))
        shapes = [dj.TensorSpec((1, c, n, n, n), network.P).local_shape for c in (SEEN, 1)]
        data = [jnp.zeros(shape if network.P.active else (1, 0), options.dtype) for shape in shapes]
        params = network.init(jax.random.key(0), options.dtype)
        step = training_step(dj.jit, dj.value_and_grad(partial(squared_error, network, voxels=n**3)), optimiser)
        args = (params, optimiser.init(params), *data)
        steps[count] = (shapes[0][2:], step, args, planned(step, *args))
    say(f"One training step on a volume of {n} x {n} x {n}, MiB on the worker that takes most of it:")
    say("  workers   a worker's block   data and weights   temporaries, planned   resident memory grows by, measured")
    start = resident_memory()
    for count, (block, step, args, plan) in steps.items():
        P_world.allgather_data(None)  # all begin together
        peak = resident_memory(step, *args)
        grown = None if start is None or peak is None else peak - start
        most = [
            None if None in each else max(each) for each in zip(*P_world.allgather_data((*plan, grown)), strict=True)
        ]
        cells = ["not known" if size is None else f"{size / 2**20:.1f}" for size in most]
        say(f"  {count:7}   {' x '.join(map(str, block)):>16}   {cells[0]:>16}   {cells[1]:>20}   {cells[2]:>34}")


# --- The run -------------------------------------------------------------------------------------------------------


def make_data(P: dj.CartesianPartition, seeds: range, options: argparse.Namespace) -> list[tuple[jax.Array, jax.Array]]:
    """Make, for each seed, this worker's block of an input, 1 x 3 x block, and its target, 1 x 1 x block.

    Both in units of u's root mean square.
    """
    solver = WaveSolver(P.grid(P.shape[2:]), options.volume, options.dtype)
    data = []
    for seed in dj.progress(seeds, label="waves", unit="medium"):
        velocity = solver.medium(seed)
        times = tuple(FIRST + i * APART for i in range(3))
        before, u, later = solver.snapshots(velocity, solver.pulses(seed), times)
        strength = jnp.sqrt(dj.functional.all_sum_reduce(jnp.sum(u**2), P, axes_keep=()) / options.volume**3)
        seen = jnp.stack([u / strength, before / strength, velocity - (SLOWEST + FASTEST) / 2])
        data.append((seen[None], ((later - 2 * u + before) / strength)[None, None]))
    return data


def explained(network: Callable, params: Params, data: list) -> float:
    """Compute the part of the targets' variance that the network explains, in media outside the training data."""

    def error(guess: Callable) -> Callable:
        def total(params: Params, x: jax.Array, target: jax.Array) -> jax.Array:
            part = squared_error(guess, params, x, target, voxels=1)
            return dj.functional.all_sum_reduce(part, network.P, axes_keep=())

        return dj.jit(total)

    of_network, of_nothing = error(network), error(lambda params, x: 0 * x[:, :1])
    errors, variance = (sum(float(of(params, *sample)) for sample in data) for of in (of_network, of_nothing))
    return 1 - errors / variance


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a U-Net on a volume that is split over the workers.")
    parser.add_argument("--volume", type=int, default=24, help="voxels a side of the training data")
    parser.add_argument("--memory-volume", type=int, default=64, help="the same, where memory is measured; 0: don't")
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 16, 32], help="of each level of the network")
    parser.add_argument("--samples", type=int, default=28, help="media to train on; 4 more are to test on")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at the start; it falls to 0 along a cosine")
    parser.add_argument("--dtype", default="float32", choices=list(AGREE))
    parser.add_argument("--check", action="store_true", help="also train on one worker, and compare the losses")
    parser.add_argument("--out", type=Path, default=Path("out/unet3d.png"), help="where the picture goes")
    options = parser.parse_args()
    multiple = 2 ** (len(options.channels) - 1)
    if options.volume % multiple or options.memory_volume % multiple or options.volume < 12:
        parser.error(f"--volume, 12 or more, and --memory-volume must be multiples of {multiple}, to be halved.")
    return options


def main() -> int:
    launch.simulate_if_asked()
    options = parse()
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    P_world = dj.Partition()
    if options.memory_volume:
        report_memory(P_world, options)

    network = UNet3d(volume_partition(P_world, P_world.size), tuple(options.channels))
    voxels = options.volume**3
    start = time.perf_counter()
    data = make_data(network.P, range(options.samples + 4), options)
    jax.block_until_ready(data)
    say(f"Waves in {len(data)} media of {options.volume} voxels a side: {time.perf_counter() - start:.1f} s")
    params = network.init(jax.random.key(1), options.dtype)
    whole_params = dj.gather(params, network.param_specs())
    say(f"Training on {P_world.size} workers, in blocks of {' x '.join(map(str, data[0][0].shape[2:]))}:")
    loss = dj.value_and_grad(partial(squared_error, network, voxels=voxels))
    trained, losses = train(dj.jit, loss, params, data[:-4], options)
    say(f"Variance explained in four new media: {explained(network, trained, data[-4:]):.3f}")

    specs = [dj.TensorSpec((1, c, *(options.volume,) * 3), network.P) for c in (SEEN, 1, 1)]
    x, target = data[-1]
    draw(dj.gather([x, target, dj.jit(network)(trained, x)], specs), options.out, P_world.rank == 0)
    good = True
    if options.check:
        whole = [dj.gather(list(sample), specs[:2]) for sample in data[: min(options.steps, options.samples)]]
        if P_world.rank == 0:
            good = check(whole_params, whole, losses, options)
    return 0 if P_world.broadcast_data(good) else 1


def check(params: Params, data: list, losses: list[float], options: argparse.Namespace) -> bool:
    """Train the sequential network from the same parameters; whether its losses are the same, at every step."""
    say("Sequential, from the same parameters, on one worker:")
    sequential = jax.value_and_grad(partial(squared_error, sequential_u_net, voxels=options.volume**3))
    _, expected = train(jax.jit, sequential, params, data, options)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True)) / expected[0]
    say(f"Largest difference between their losses at any step, relative to the first: {apart:.1e}")
    if apart >= AGREE[options.dtype]:
        say(f"FAILED: it must be below {AGREE[options.dtype]:.0e} in {options.dtype}.")
    return apart < AGREE[options.dtype]


if __name__ == "__main__":
    sys.exit(main())
