"""The memory that `dj.cost` foresees, beside XLA's buffers of the real training step.

mpiexec -n 4 python benchmarks/cost_memory.py [words: rows whose name has one of them]

A step is value, gradient and adam in one jitted function whose parameters and state are donated. XLA's number is that
of `memory_analysis()`: arguments, results and temporaries, of which donated ones count once. Nothing runs. Each row has
the worker for which the two differ most, and the worker that needs most, by both.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import optax
from distdl_jax import nn

P_all = dj.Partition()
ADAM = optax.adam(1e-3)
Network = tuple[Any, tuple[int, ...], dj.Partition]


def in_space(dims: int) -> dj.Partition:
    """Return a partition of the last two dimensions, as square as can be."""
    rows = max(rows for rows in range(1, math.isqrt(P_all.size) + 1) if P_all.size % rows == 0)
    return P_all.grid([1, 1, *(1,) * (dims - 2), rows, P_all.size // rows])


def conv(P: dj.Partition, before: int, after: int, kernel: int = 3, stride: int = 1, **options: Any) -> Any:
    layer = {3: nn.DistributedConv1d, 4: nn.DistributedConv2d, 5: nn.DistributedConv3d}[P.dim]
    sizes = {"kernel_size": kernel, "stride": stride, "padding": kernel // 2}
    return layer(P, in_channels=before, out_channels=after, **sizes, **options)


def lenet() -> Network:
    P = in_space(2)
    pool = nn.DistributedMaxPool2d(P, 2)
    first, second, last = conv(P, 1, 6, 5), conv(P, 6, 16, 5), conv(P, 16, 10, 1)
    return nn.Sequential(first, jax.nn.relu, pool, second, jax.nn.relu, pool, last), (64, 1, 28, 28), P


def perceptron() -> Network:
    """Weights cut along outputs and inputs in turn."""
    p, linear = P_all.size, nn.DistributedLinear
    one, row, outputs, inputs = P_all.grid([1, 1], [0]), P_all.grid([1, p]), P_all.grid([p, 1]), P_all.grid([1, p])
    layers = [linear(one, row, outputs, 64, 512), jax.nn.relu, linear(row, one, inputs, 512, 512), jax.nn.gelu]
    return nn.Sequential(*layers, linear(one, row, outputs, 512, 512), jnp.tanh), (256, 64), one


def perceptron_in_batches() -> Network:
    P = P_all.grid([P_all.size, 1])
    layers: list[Any] = []
    for _ in range(3):
        layers += [nn.DistributedLinear(P, P, in_features=256, out_features=256), nn.DistributedLayerNorm(P, (256,))]
        layers += [jax.nn.gelu]
    return nn.Sequential(*layers), (1024, 256), P


def deep(P: dj.Partition, function: Callable) -> Network:
    layers = [conv(P, 3, 16), function, *(each for _ in range(5) for each in (conv(P, 16, 16), function))]
    return nn.Sequential(*layers, conv(P, 16, 1)), (16, 3, 48, 48), P


def vgg() -> Network:
    P, layers, before = in_space(2), [], 1
    for after in (16, 32, 64, 64):
        layers += [conv(P, before, after), jax.nn.relu, nn.DistributedMaxPool2d(P, 2)]
        before = after
    return nn.Sequential(*layers), (32, 1, 32, 32), P


def resnet() -> Network:
    P = in_space(2)

    def with_norm(before: int, after: int, kernel: int, stride: int) -> list[Any]:
        return [conv(P, before, after, kernel, stride, bias=False), nn.DistributedBatchNorm(P, after)]

    layers, before = [*with_norm(3, 16, 3, 1), jax.nn.relu], 16
    for after, stride in ((16, 1), (32, 2), (32, 1)):
        body = nn.Sequential(*with_norm(before, after, 3, stride), jax.nn.relu, *with_norm(after, after, 3, 1))
        shortcut = nn.Sequential(*with_norm(before, after, 1, stride)) if stride > 1 else None
        layers += [nn.Residual(body, shortcut), jax.nn.relu]
        before = after
    return nn.Sequential(*layers), (16, 3, 32, 32), P


def u_net() -> Network:
    P = in_space(3)
    up = nn.DistributedConvTranspose3d(P, in_channels=16, out_channels=8, kernel_size=2, stride=2)
    below = [nn.DistributedMaxPool3d(P, 2), conv(P, 8, 16), jax.nn.relu, conv(P, 16, 16), jax.nn.relu, up]
    layers = [conv(P, 3, 8), jax.nn.relu, conv(P, 8, 8), jax.nn.relu, nn.Residual(nn.Sequential(*below))]
    return nn.Sequential(*layers, conv(P, 8, 8), jax.nn.relu, conv(P, 8, 1, 1)), (1, 3, 32, 32, 32), P


def norms() -> Network:
    P = P_all.grid([P_all.size, 1, 1, 1])
    layers = [conv(P, 3, 16), nn.DistributedGroupNorm(P, 4, 16), jax.nn.silu, conv(P, 16, 16)]
    layers += [nn.DistributedLayerNorm(P, (16, 32, 32)), jax.nn.gelu, nn.DistributedAvgPool2d(P, 2), conv(P, 16, 4)]
    return nn.Sequential(*layers), (8, 3, 32, 32), P


def channels() -> Network:
    P = P_all.grid([1, P_all.size, 1, 1])
    layers = [conv(P, 4, 32), jax.nn.relu, conv(P, 32, 32), jax.nn.relu, conv(P, 32, 4)]
    return nn.Sequential(*layers), (4, 4, 32, 32), P


NETWORKS: dict[str, Callable[[], Network]] = {
    "LeNet's convolutions": lenet,
    "perceptron, cut weights": perceptron,
    "perceptron, cut batch": perceptron_in_batches,
    "deep, cut in space": lambda: deep(in_space(2), jax.nn.relu),
    "deep, cut batch": lambda: deep(P_all.grid([P_all.size, 1, 1, 1]), jax.nn.gelu),
    "VGG": vgg,
    "ResNet": resnet,
    "3-D U-Net": u_net,
    "norms, cut batch": norms,
    "cut channels": channels,
}


def needed(network: Any, spec: dj.TensorSpec) -> int:
    """Compile this worker's step; return XLA's number of bytes."""
    x = jnp.zeros(spec.local_shape) if spec.box else dj.zero_volume_tensor(spec.global_shape[0], dtype=jnp.float32)
    params = network.init(jax.random.key(0))

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, gradient = dj.value_and_grad(lambda params, x: jnp.sum(network(params, x) ** 2))(params, x)
        updates, state = ADAM.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    found = dj.jit(step, donate_argnums=(0, 1)).lower(params, ADAM.init(params), x).compile().memory_analysis()
    arguments = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(arguments + found.temp_size_in_bytes)


for name, build in NETWORKS.items():
    if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
        continue
    network, shape, P = build()
    spec = dj.TensorSpec(shape, P)
    real = P_all.allgather_data(needed(network, spec))
    cost = dj.cost(network, spec)
    worst = max(range(P_all.size), key=lambda worker: abs(cost.memory[worker] / real[worker] - 1))
    if P_all.rank == 0:
        foreseen, measured = cost.memory[worst] / 2**20, real[worst] / 2**20
        fullest = real.index(max(real))
        print(
            f"{name:24} {P_all.size} workers: worker {worst} foreseen {foreseen:7.2f} MiB, XLA's {measured:7.2f} MiB "
            f"({100 * (foreseen / measured - 1):+5.1f} %); fullest {cost.fullest}, XLA's {fullest}",
            flush=True,
        )
