"""Layers, oneDNN's calls, and a training step of a 3-D U-Net, in bfloat16 and float16, each beside float32.

mpiexec -n 1 python benchmarks/half_precision.py [words: rows whose title has one of them]

"f + b": the result and both gradients. The U-Net is wrapped in `nn.Precision`, as a user would; its step is value,
gradient and adam. NPROC=1 gives every worker one thread. Behind the medians: the least processor time of a call.

"oneDNN": its calls alone, forward and both gradients, on arrays with channels first and with channels last; "fast" is
float32 with products of bfloat16. What the processor can't compute natively is converted to float32, as layers do.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
import optax
from distdl_jax import nn
from distdl_jax.kernels import onednn
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.onednn_library import description
from distdl_jax.kernels.problem import Direction, Problem

from harness import Table, Way, one_call
from harness.processor_time import processor_time

DTYPES = "float32", "bfloat16", "float16"
PAIR = {"kernel_size": 3, "padding": 1}


def grid(dims: int) -> dj.CartesianPartition:
    """All workers along the first dimension of the features."""
    P_all = dj.Partition()
    return P_all.grid([1, 1, P_all.size, *(1,) * (dims - 1)])


ONE, TWO, THREE = map(grid, (1, 2, 3))
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    f"conv3d {n} -> {n}, 3^3, 48^3": (
        nn.DistributedConv3d(THREE, in_channels=n, out_channels=n, **PAIR),
        (1, n, 48, 48, 48),
    )
    for n in (8, 16, 32)
} | {
    "conv2d 64, 3^2, 8 x 56^2": (
        nn.DistributedConv2d(TWO, in_channels=64, out_channels=64, **PAIR),
        (8, 64, 56, 56),
    ),
    "conv2d depthwise 64, 7^2": (
        nn.DistributedConv2d(TWO, in_channels=64, out_channels=64, kernel_size=7, padding=3, groups=64),
        (8, 64, 56, 56),
    ),
    "conv2d 64 -> 256, 1^2": (
        nn.DistributedConv2d(TWO, in_channels=64, out_channels=256, kernel_size=1),
        (8, 64, 56, 56),
    ),
    "conv1d 64, 9": (
        nn.DistributedConv1d(ONE, in_channels=64, out_channels=64, kernel_size=9, padding=4),
        (8, 64, 4096),
    ),
    "transposed conv3d 32 -> 16": (
        nn.DistributedConvTranspose3d(THREE, in_channels=32, out_channels=16, kernel_size=2, stride=2),
        (1, 32, 24, 24, 24),
    ),
    "max pool 3-D, 2": (nn.DistributedMaxPool3d(THREE, 2, stride=2), (1, 16, 48, 48, 48)),
    "max pool 2-D, 3, stride 2": (nn.DistributedMaxPool2d(TWO, 3, stride=2), (8, 64, 56, 56)),
    "average pool 2-D, 2": (nn.DistributedAvgPool2d(TWO, 2, stride=2), (8, 64, 56, 56)),
    "upsample, nearest": (nn.DistributedUpsample(THREE, scale_factor=2), (1, 16, 24, 24, 24)),
    "upsample, linear": (nn.DistributedUpsample(THREE, scale_factor=2, mode="linear"), (1, 16, 24, 24, 24)),
    "group norm": (nn.DistributedGroupNorm(THREE, 4, 16), (1, 16, 48, 48, 48)),
}


def problem(
    samples: int, c_in: int, c_out: int, size: int, kernel: int, dims: int, stride: int = 1, groups: int = 1
) -> Problem:
    """A convolution of float32 arrays that keeps their size, but for the stride."""
    window = Placement((stride,) * dims, ((kernel // 2, kernel // 2),) * dims, (1,) * dims)
    x, weight = (samples, c_in, *(size,) * dims), (c_out, c_in // groups, *(kernel,) * dims)
    return Problem(x, weight, window, groups, "float32")


CALLS = {
    **{f"conv3d {n} -> {n}, 3^3, 48^3": problem(1, n, n, 48, 3, 3) for n in (8, 16, 32)},
    "conv3d 32 -> 32, 3^3, stride 2": problem(1, 32, 32, 48, 3, 3, stride=2),
    "conv3d 1 -> 8, 3^3, 48^3": problem(1, 1, 8, 48, 3, 3),
    "conv2d 64, 3^2, 8 x 56^2": problem(8, 64, 64, 56, 3, 2),
    "conv2d depthwise 64, 7^2": problem(8, 64, 64, 56, 7, 2, groups=64),
    "conv2d 64 -> 256, 1^2": problem(8, 64, 256, 56, 1, 2),
    "conv1d 64, 9": problem(8, 64, 64, 4096, 9, 1),
    "conv2d 512, 3^2, 32 x 2^2": problem(32, 512, 512, 2, 3, 2),
    "conv2d 3 -> 64, 7^2, stride 2": problem(32, 3, 64, 64, 7, 2, stride=2),
}


def of_calls(in_float32: Problem) -> list[Way]:
    """oneDNN's three calls in each dtype and order of dimensions."""

    def computed(problem: Problem, direction: Direction, *operands: jax.Array) -> jax.Array:
        if onednn.can_compute(problem, direction):
            return getattr(onednn, direction)(problem, *operands)
        wide = (operand.astype("float32") for operand in operands)
        return getattr(onednn, direction)(replace(problem, dtype="float32"), *wide).astype(problem.dtype)

    def way(name: str, problem: Problem) -> Way:
        rng, last = np.random.default_rng(0), problem.channels_last
        x, y = ((s[0], *s[2:], s[1]) if last else s for s in (problem.x, problem.y))
        c_out, c_in, *kernel = problem.weight
        shapes = x, (*kernel, c_in, c_out) if last else problem.weight, y

        def all_three(x: jax.Array, weight: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
            return (
                computed(problem, "forward", x, weight),
                computed(problem, "input_gradient", weight, dy),
                computed(problem, "weight_gradient", x, dy),
            )

        return one_call(name, all_three, tuple(jnp.asarray(rng.normal(size=s), problem.dtype) for s in shapes), 1)

    ways = []
    for order, last in {"first": False, "last": True}.items():
        asked = replace(in_float32, channels_last=last)
        ways += [way(f"{dtype} {order}", replace(asked, dtype=dtype)) for dtype in DTYPES]
        ways.append(way(f"fast {order}", replace(asked, fast_math=True)))
    return ways


def of_layer(layer: Any, shape: tuple[int, ...], both: bool) -> list[Way]:
    """The layer, forward or with its gradients, in each dtype."""

    def way(dtype: str) -> Way:
        params = jax.tree.map(lambda a: a.astype(dtype), layer.init(jax.random.key(0)))
        x = dj.random.normal(jax.random.key(1), dj.TensorSpec(shape, layer.P_x), dtype)
        if not both:
            return one_call(dtype, layer, (params, x), 1)
        y = layer(params, x)
        return one_call(dtype, lambda params, x, dy: jax.vjp(layer, params, x)[1](dy), (params, x, y), 1)

    return list(map(way, DTYPES))


def u_net(size: int, channels: tuple[int, ...] = (8, 16, 32)) -> nn.Sequential:
    """A U-Net on a volume of one channel."""

    def pair(before: int, width: int) -> list[Any]:
        convs = [nn.DistributedConv3d(THREE, in_channels=n, out_channels=width, **PAIR) for n in (before, width)]
        return [convs[0], jax.nn.relu, convs[1], jax.nn.relu]

    def level(widths: tuple[int, ...]) -> list[Any]:
        width, *deeper = widths
        if not deeper:
            return []
        down = [nn.DistributedMaxPool3d(THREE, 2, stride=2), *pair(width, deeper[0]), *level(tuple(deeper))]
        up = nn.DistributedConvTranspose3d(THREE, in_channels=deeper[0], out_channels=width, kernel_size=2, stride=2)
        return [nn.Skip(nn.Sequential(*down, up), join="concatenate"), *pair(2 * width, width)]

    last = nn.DistributedConv3d(THREE, in_channels=channels[0], out_channels=1, kernel_size=1)
    spec = dj.TensorSpec((1, 1, size, size, size), THREE)
    return nn.Sequential(*pair(1, channels[0]), *level(channels), last, x_spec=spec)


def of_steps(size: int) -> list[Way]:
    """A training step of the U-Net in each dtype; the memory that XLA plans for it is printed."""
    network, mse, optimiser = u_net(size), nn.DistributedMSELoss(THREE), optax.adam(1e-3)
    x = dj.random.normal(jax.random.key(1), network.x_spec, "float32")

    def way(dtype: str) -> Way:
        apply = network if dtype == "float32" else nn.Precision(network, dtype, output="float32")

        @partial(dj.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            value, gradient = dj.value_and_grad(lambda params: mse(apply(params, x), x))(params)
            updates, state = optimiser.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        params = network.init(jax.random.key(0))
        kept = [params, optimiser.init(params)]
        planned = step.lower(*kept, x).compile().memory_analysis().temp_size_in_bytes
        if dj.Partition().rank == 0:
            print(f"U-Net {size}^3, {dtype}: {planned / 2**20:.0f} MiB of temporaries", flush=True)

        def run() -> None:
            *kept[:], value = step(*kept, x)
            assert np.isfinite(jax.block_until_ready(value))

        return Way(dtype, run)

    return list(map(way, DTYPES))


def counting(way: Way, seconds: list[float]) -> Way:
    """The same work, whose processor time is added to `seconds`."""
    return replace(way, run=lambda: seconds.append(processor_time(way.run) / way.calls))


def main() -> None:
    """Time what the command line names, or all."""
    table, words = Table("half_precision", width=36, lasting=0.05), sys.argv[1:]
    rows: dict[str, Callable[[], list[Way]]] = {f"U-Net {size}^3, step": partial(of_steps, size) for size in (48, 96)}
    for name, (layer, shape) in LAYERS.items():
        rows[f"{name}: forward"] = partial(of_layer, layer, shape, False)
        rows[f"{name}: f + b"] = partial(of_layer, layer, shape, True)
    if onednn.can_compute(CALLS["conv1d 64, 9"], "forward"):
        rows |= {f"oneDNN, {name}: f + b": partial(of_calls, call) for name, call in CALLS.items()}
        if dj.Partition().rank == 0:
            print(description(), flush=True)
    for title, ways in rows.items():
        if not words or any(word in title for word in words):
            spent: dict[str, list[float]] = {}
            counted = [counting(way, spent.setdefault(way.name, [])) for way in ways()]
            least = partial(lambda spent: {name: min(seconds) for name, seconds in spent.items()}, spent)
            table.row(title, counted, rounds=5, processor=least)
    table.write()


if __name__ == "__main__":
    main()
