"""A training step of whole networks, those of `examples/`, beside the same network in plain JAX on one thread.

mpiexec -n 2 python benchmarks/networks.py [words: rows whose title has one of them]

"one thread" runs on worker 0 alone; NPROC=1 gives every worker one thread. A step is value, gradient and adam.
"JAX sharding" is the sequential network jitted over all workers, with x (and the perceptron's and the transformer's
weights) cut as ours are. "PyTorch" runs eagerly on one thread, where BENCH_PYTORCH names a Python that has it:
`make bench-peers`.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import beside
import digits
import digits_mlp
import fno
import lenet5
import resnet
import super_resolution
import transformer
import unet3d
import vgg
from training import Data, loss

from harness import Table, Way, jax_sharding
from harness.steps import by_jax, by_pytorch, everywhere, shared, step

jax_sharding.start()
P_all = dj.Partition()


def classifier(
    title: str,
    network: Any,
    sequential: Callable,
    held: Callable,
    images: np.ndarray,
    cut: Callable[[Any, np.ndarray], tuple[Any, jax.Array]],
    pytorch: list[Way],
) -> None:
    """A row for a network from images to ten classes; `cut` shares parameters and images as JAX is to have them."""
    labels = np.eye(10, dtype=np.float32)[np.arange(len(images)) % 10]
    params, data = network.init(jax.random.key(0)), Data(images, labels)
    whole = dj.gather(params, network.param_specs())
    alone = jax.value_and_grad(partial(loss, sequential))
    sharded, x = cut(everywhere(whole), images)
    ways = [
        step("one thread", jax.jit, alone, whole, data, here=P_all.rank == 0),
        step("distdl_jax", dj.jit, dj.value_and_grad(partial(loss, network)), params, held(network, data)),
        *by_jax(alone, sharded, Data(x, shared(labels))),
        *pytorch,
    ]
    table.row(title, ways, rounds=15)


def cut_in_space(params: Any, images: np.ndarray) -> tuple[Any, jax.Array]:
    """The images in rows and columns; copies of the parameters."""
    return jax.tree.map(shared, params), shared(images, network[0].P_y.shape)


def cut_in_features(params: Any, images: np.ndarray) -> tuple[Any, jax.Array]:
    """The weights by turns along outputs and inputs, as ours."""
    grids, cut = iter(shapes), []
    for layer in params:
        if layer:
            grid = next(grids)
            bias = shared(layer["bias"], grid[:1] if grid[1] == 1 else ())
            layer = {"weight": shared(layer["weight"], grid), "bias": bias}
        cut.append(layer)
    return tuple(cut), shared(images, (1, P_all.size))


def example(
    title: str, network: Any, plain: Callable, losses: tuple, data: tuple, partitions: tuple, torch: list
) -> None:
    """A row for a network as examples/beside.py has them, of x and its target, which are whole, on two partitions."""
    state = network.init_state("float32")
    params, (x, target) = network.init(jax.random.key(0), "float32"), data
    whole = dj.gather((params, state), (network.param_specs(), network.state_specs()))

    def part(network: Callable, loss: Callable, params: Any, state: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        return loss(network(params, state, x, True)[0], target)

    def ours(params: Any, state: Any, x: jax.Array, training: bool) -> tuple[jax.Array, Any]:
        return network(params, x, state=state, training=training)

    alone = jax.value_and_grad(partial(part, plain, losses[1]))
    held = (beside.block(whole, P) for whole, P in zip(data, partitions, strict=True))
    cut = (shared(whole, P.shape if P.size == P_all.size else ()) for whole, P in zip(data, partitions, strict=True))
    ways = [
        step("one thread", jax.jit, alone, *whole, x, target, here=P_all.rank == 0),
        step("distdl_jax", dj.jit, dj.value_and_grad(partial(part, ours, losses[0])), params, state, *held),
        *by_jax(alone, *jax.tree.map(shared, everywhere(whole)), *cut),
        *torch,
    ]
    table.row(title, ways)


def cut_in_heads(params: Any) -> Any:
    """The transformer's weights along heads and inner features, as ours; copies of the others."""
    axes = {"qkv": 0, "out": 1, "up/weight": 0, "up/bias": 0, "down/weight": 1}

    def cut(path: Any, array: np.ndarray) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axis = next((axis for end, axis in axes.items() if name.endswith(end)), None)
        return shared(array, () if axis is None else [P_all.size if d == axis else 1 for d in range(array.ndim)])

    return jax.tree_util.tree_map_with_path(cut, params)


def squares(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


def wanted(title: str) -> bool:
    return not sys.argv[1:] or any(word in title for word in sys.argv[1:])


table = Table("networks")
draw = np.random.default_rng(0)
for batch in (16, 256):
    title = f"LeNet-5, batch {batch}"
    if wanted(title):
        images, network = draw.random((batch, 1, 28, 28), np.float32), lenet5.lenet5(P_all)
        torch = by_pytorch("lenet5", images.shape, ())
        classifier(title, network, lenet5.sequential_lenet5, lenet5.held, images, cut_in_space, torch)
if wanted("perceptron, batch 64"):
    shapes = [(1, P_all.size), (P_all.size, 1), (1, P_all.size)]
    network = digits_mlp.perceptron(P_all, shapes)
    images = draw.random((64, 64), np.float32)
    torch = by_pytorch("perceptron", images.shape, digits_mlp.WIDTHS)
    sequential = digits_mlp.sequential_perceptron
    classifier("perceptron, batch 64", network, sequential, digits_mlp.held, images, cut_in_features, torch)
if wanted("3-D U-Net, 48³"):
    channels, voxels = (8, 16, 32), 48
    P = unet3d.volume_partition(P_all, P_all.size)
    network = unet3d.UNet3d(P, channels)
    params = network.init(jax.random.key(0), jnp.float32)
    whole = dj.gather(params, network.param_specs())
    volume = draw.random((1, unet3d.SEEN, voxels, voxels, voxels), np.float32)
    mine = volume[tuple(slice(*side) for side in dj.TensorSpec(volume.shape, P).box)]

    def error(network: Callable, params: Any, x: jax.Array) -> jax.Array:
        return unet3d.squared_error(network, params, x, x[:, :1], voxels**3)

    alone = jax.value_and_grad(partial(error, unet3d.sequential_u_net))
    table.row(
        f"3-D U-Net, {voxels}³",
        [
            step("one thread", jax.jit, alone, whole, volume, here=P_all.rank == 0),
            step("distdl_jax", dj.jit, dj.value_and_grad(partial(error, network)), params, mine),
            *by_jax(alone, jax.tree.map(shared, everywhere(whole)), shared(volume, P.shape)),
            *by_pytorch("unet3d", volume.shape, channels),
        ],
        rounds=5,
    )
title = "VGG-11, 32², batch 32"
if wanted(title):
    P_x, width = beside.partition(P_all, None, 4), 16
    network = vgg.vgg((P_x, P_x), width)
    images, labels = draw.random((32, 1, 32, 32), np.float32), np.eye(10, dtype=np.float32)[np.arange(32) % 10]
    P_y = network[-1].P_y
    torch = by_pytorch("vgg", images.shape, [width * times for times in vgg.CHANNELS])
    example(title, network, vgg.plain_vgg, digits.losses(P_y), (images, labels), (P_x, P_y), torch)
title = "ResNet-18, 64², batch 32"
if wanted(title):
    P_x, width = beside.partition(P_all, None, 4), 16
    network = resnet.resnet(P_x, width)
    images, labels = draw.random((32, 1, 64, 64), np.float32), np.eye(10, dtype=np.float32)[np.arange(32) % 10]
    P_y, plain = network[-1].P_y, partial(resnet.plain_resnet, resnet.LAYERS)
    torch = by_pytorch("resnet", images.shape, (width,))
    example(title, network, plain, digits.losses(P_y), (images, labels), (P_x, P_y), torch)
title = "super-resolution, 48² to 96², batch 8"
if wanted(title):
    P_x = beside.partition(P_all, None, 4)
    small, large = draw.random((8, 3, 48, 48), np.float32), draw.random((8, 3, 96, 96), np.float32)
    network, losses = super_resolution.SuperResolution(P_x, 32), (nn.DistributedMSELoss(P_x), squares)
    torch = by_pytorch("super_resolution", small.shape, (32,))
    plain = super_resolution.plain_super_resolution
    example(title, network, plain, losses, (small, large), (P_x, P_x), torch)
title = "Fourier neural operator, 64², batch 8"
if wanted(title):
    P_x = beside.partition(P_all, None, 4)
    rock, flow = draw.random((8, 3, 64, 64), np.float32), draw.random((8, 1, 64, 64), np.float32)
    network, losses = fno.operator(P_x, 3, 32, 12), (nn.DistributedMSELoss(P_x), squares)
    torch = by_pytorch("fno", rock.shape, (3, 32, 12))
    example(title, network, partial(fno.plain_operator, 12), losses, (rock, flow), (P_x, P_x), torch)
for kind in ("tensor", "ring"):
    title = f"transformer, {kind}, 8 x 256 of 256"
    if not wanted(title):
        continue
    size = Namespace(layers=2, width=256, heads=8)
    network, text = transformer.Transformer(P_all, 96, size, kind), draw.integers(0, 96, (8, 257))
    params = network.init(jax.random.key(0), "float32")
    whole = dj.gather(params, network.param_specs())
    alone, both = jax.value_and_grad(transformer.plain_loss), (text[:, :-1], text[:, 1:])
    sharded = (cut_in_heads if kind == "tensor" else partial(jax.tree.map, shared))(everywhere(whole))
    along = (1, P_all.size)
    ways = [
        step("one thread", jax.jit, alone, whole, both, here=P_all.rank == 0),
        step("distdl_jax", dj.jit, dj.value_and_grad(network.part_of_loss), params, network.batch(text)),
        *by_jax(alone, sharded, tuple(shared(each, along) for each in both)),
    ]
    table.row(title, ways)
table.write()
