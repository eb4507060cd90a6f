"""A training step of whole networks, those of `examples/`, beside the same network in plain JAX on one thread.

mpiexec -n 2 python benchmarks/networks.py [words: rows whose title has one of them]

"one thread" runs on worker 0 alone, "XLA asked" the same with XLA's own oneDNN; NPROC=1 gives every worker one thread.
A step is value, gradient and adam; steps
follow each other for 60 ms at least, as in training. "one worker" is our network on worker 0 alone. "JAX sharding" is
the sequential network jitted over all workers, with x (and the perceptron's and the transformer's weights) cut as ours
are. "unmodified" is the sequential network's whole step, distributed by `dj.distribute`, with x (and the weights that
ours cut) as blocks. "PyTorch" runs eagerly on one thread, where BENCH_PYTORCH names a Python that has it:
`make bench-peers`.
"""

import sys
import timeit
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
from harness.steps import by_jax, by_pytorch, everywhere, shared, step, unmodified

jax_sharding.start()
P_all = dj.Partition()


def by_plain_jax(value_and_grad: Callable, params: Any, *batch: Any) -> list[Way]:
    """Plain JAX on worker 0, as it is, and with XLA's own oneDNN, which loses NaN (xla_onednn.py)."""
    here, asked = P_all.rank == 0, {"xla_cpu_experimental_onednn_custom_call": True}
    jits = {"one thread": jax.jit, "XLA asked": partial(jax.jit, compiler_options=asked)}
    return [step(name, jit, value_and_grad, params, *batch, here=here) for name, jit in jits.items()]


def say_share(value_and_grad: Callable, params: Any, *batch: Any) -> None:
    """Print which share of its own matrix product, of 1024 x 1024, one worker reaches in the step above."""
    if P_all.rank > 0:
        return  # worker 0 alone has the whole parameters
    a, product = jnp.ones((1024, 1024)), jax.jit(jnp.matmul)
    seconds = min(timeit.repeat(lambda: jax.block_until_ready(product(a, a)), number=1, repeat=5))
    counted = jax.jit(value_and_grad).lower(params, *batch).cost_analysis()["flops"]
    taken: Any = table.rows[-1]["seconds"]
    speed = 2 * 1024**3 / seconds
    share = counted / taken["one worker" if P_all.size > 1 else "distdl_jax"] / speed
    table.rows[-1] |= {"flops": counted, "share": share}
    print(f"    {counted / 1e9:.2f} GFLOP a step; one worker: {share:.0%} of {speed / 1e9:.0f} GFLOP/s", flush=True)


def on_all_and_on_one(way_on: Callable[[str, dj.Partition], Way]) -> list[Way]:
    """Ours on all workers, and, where there are several, on one."""
    one = [("one worker", P_all.create_partition_inclusive([0]))] if P_all.size > 1 else []
    return [way_on(name, P) for name, P in [("distdl_jax", P_all), *one]]


def classifier(
    title: str,
    network_on: Callable[[dj.Partition], Any],
    sequential: Callable,
    local_blocks: Callable,
    images: np.ndarray,
    cut: Callable[[Any, np.ndarray], tuple[Any, jax.Array]],
    specs: Callable[[Any, np.ndarray], tuple[Any, dj.TensorSpec]],
    pytorch: list[Way],
) -> None:
    """Measure a network from images to ten classes; `cut` shares parameters and images as JAX is to have them.

    `specs` describes the same to `dj.distribute`.
    """
    labels = np.eye(10, dtype=np.float32)[np.arange(len(images)) % 10]
    network, data = network_on(P_all), Data(images, labels)
    whole = dj.gather(network.init(jax.random.key(0)), network.param_specs())
    alone = jax.value_and_grad(partial(loss, sequential))
    sharded, x = cut(everywhere(whole), images)
    of_params, of_images = specs(everywhere(whole), images)

    def ours(name: str, P: dj.Partition) -> Way:
        network = network_on(P)
        params = network.init(jax.random.key(0))
        return step(name, dj.jit, dj.value_and_grad(partial(loss, network)), params, local_blocks(network, data))

    ways = [
        *by_plain_jax(alone, whole, data),
        *on_all_and_on_one(ours),
        unmodified(alone, whole, of_params, (data, Data(of_images, None))),
        *by_jax(alone, sharded, Data(x, shared(labels))),
        *pytorch,
    ]
    table.row(title, ways, rounds=15)
    say_share(alone, whole, data)


def cut_in_space(params: Any, images: np.ndarray) -> tuple[Any, jax.Array]:
    """Cut the images in rows and columns; copy the parameters."""
    return jax.tree.map(shared, params), shared(images, lenet5.lenet5(P_all)[0].P_y.shape)


def specs_in_space(params: Any, images: np.ndarray) -> tuple[Any, dj.TensorSpec]:
    """Return the same for `dj.distribute`."""
    return None, dj.TensorSpec(images.shape, lenet5.lenet5(P_all)[0].P_y)


def perceptron_on(P: dj.Partition) -> Any:
    """Build the perceptron, whose weights are cut along outputs and inputs in turn."""
    return digits_mlp.perceptron(P, grids(P.size))


def grids(workers: int) -> list[tuple[int, int]]:
    """Return the grids of the perceptron's weights."""
    return [(1, workers), (workers, 1), (1, workers)]


def cut_in_features(params: Any, images: np.ndarray) -> tuple[Any, jax.Array]:
    """Cut the weights along outputs and inputs in turn, as ours."""
    shapes, cut = iter(grids(P_all.size)), []
    for layer in params:
        if layer:
            grid = next(shapes)
            bias = shared(layer["bias"], grid[:1] if grid[1] == 1 else ())
            layer = {"weight": shared(layer["weight"], grid), "bias": bias}
        cut.append(layer)
    return tuple(cut), shared(images, (1, P_all.size))


def specs_in_features(params: Any, images: np.ndarray) -> tuple[Any, dj.TensorSpec]:
    """Return the same for `dj.distribute`; biases are copies."""
    shapes = iter(grids(P_all.size))
    of_params = tuple(
        {"weight": dj.TensorSpec(layer["weight"].shape, P_all.grid(next(shapes))), "bias": None} if layer else layer
        for layer in params
    )
    return of_params, dj.TensorSpec(images.shape, P_all.grid([1, P_all.size]))


def example(title: str, network_on: Callable, plain: Callable, data: tuple, torch: list) -> None:
    """Measure a network as examples/beside.py has them, of x and its target, which are whole.

    `network_on(P)` is the network, its loss and the plain one, and the partitions of x and of the target.
    """
    network, losses, partitions = network_on(P_all)
    params, state = network.init(jax.random.key(0), "float32"), network.init_state("float32")
    whole = dj.gather((params, state), (network.param_specs(), network.state_specs()))

    def part(network: Callable, loss: Callable, params: Any, state: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        return loss(network(params, state, x, True)[0], target)

    def ours(name: str, P: dj.Partition) -> Way:
        network, losses, partitions = network_on(P)

        def called(params: Any, state: Any, x: jax.Array, training: bool) -> tuple[jax.Array, Any]:
            return network(params, x, state=state, training=training)

        state = network.init_state("float32")
        blocks = (beside.block(whole, P) for whole, P in zip(data, partitions, strict=True))
        params = network.init(jax.random.key(0), "float32")
        return step(name, dj.jit, dj.value_and_grad(partial(part, called, losses[0])), params, state, *blocks)

    alone = jax.value_and_grad(partial(part, plain, losses[1]))
    cut = (shared(whole, P.shape if P.size == P_all.size else ()) for whole, P in zip(data, partitions, strict=True))
    of_data = (
        dj.TensorSpec(x.shape, P) if P.size == P_all.size else None for x, P in zip(data, partitions, strict=True)
    )
    blocks = (everywhere(whole[1]), None), *zip(data, of_data, strict=True)
    ways = [
        *by_plain_jax(alone, *whole, *data),
        *on_all_and_on_one(ours),
        unmodified(alone, whole[0], None, *blocks),
        *by_jax(alone, *jax.tree.map(shared, everywhere(whole)), *cut),
        *torch,
    ]
    table.row(title, ways)
    say_share(alone, *whole, *data)


def cut_in_heads(params: Any) -> Any:
    """Cut the transformer's weights along heads and inner features, as ours; copy the others."""
    axes = {"qkv": 0, "out": 1, "up/weight": 0, "up/bias": 0, "down/weight": 1}

    def cut(path: Any, array: np.ndarray) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axis = next((axis for end, axis in axes.items() if name.endswith(end)), None)
        return shared(array, () if axis is None else [P_all.size if d == axis else 1 for d in range(array.ndim)])

    return jax.tree_util.tree_map_with_path(cut, params)


def specs_in_heads(params: Any) -> Any:
    """Return the same for `dj.distribute`."""
    axes = {"qkv": 0, "out": 1, "up/weight": 0, "up/bias": 0, "down/weight": 1}

    def spec(path: Any, array: np.ndarray) -> dj.TensorSpec | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axis = next((axis for end, axis in axes.items() if name.endswith(end)), None)
        grid = [P_all.size if d == axis else 1 for d in range(array.ndim)]
        return None if axis is None else dj.TensorSpec(array.shape, P_all.grid(grid))

    return jax.tree_util.tree_map_with_path(spec, params)


SIZE = Namespace(layers=2, width=256, heads=8)


def transformer_on(kind: str, text: np.ndarray, name: str, P: dj.Partition) -> Way:
    """Return the transformer's step, of n x (s + 1) characters."""
    network = transformer.Transformer(P, 96, SIZE, kind)
    params, nothing = network.init(jax.random.key(0), "float32"), np.zeros((len(text), 0, 0), text.dtype)
    batch = network.batch(text) if P.active else (nothing, nothing)
    return step(name, dj.jit, dj.value_and_grad(network.part_of_loss), params, batch)


def squares(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


def wanted(title: str) -> bool:
    return not sys.argv[1:] or any(word in title for word in sys.argv[1:])


table = Table("networks", lasting=0.06)
draw = np.random.default_rng(0)
for batch in (16, 256):
    title = f"LeNet-5, batch {batch}"
    if wanted(title):
        images = draw.random((batch, 1, 28, 28), np.float32)
        torch = by_pytorch("lenet5", images.shape, ())
        shares = cut_in_space, specs_in_space
        classifier(title, lenet5.lenet5, lenet5.sequential_lenet5, lenet5.local_blocks, images, *shares, torch)
if wanted("perceptron, batch 64"):
    images = draw.random((64, 64), np.float32)
    torch = by_pytorch("perceptron", images.shape, digits_mlp.WIDTHS)
    sequential = digits_mlp.sequential_perceptron
    classifier(
        "perceptron, batch 64",
        *(perceptron_on, sequential, digits_mlp.local_blocks, images),
        *(cut_in_features, specs_in_features, torch),
    )
if wanted("3-D U-Net, 48³"):
    channels, voxels = (8, 16, 32), 48
    volume = draw.random((1, unet3d.SEEN, voxels, voxels, voxels), np.float32)
    P = unet3d.volume_partition(P_all, P_all.size)
    network = unet3d.UNet3d(P, channels)
    whole = dj.gather(network.init(jax.random.key(0), jnp.float32), network.param_specs())

    def error(network: Callable, params: Any, x: jax.Array) -> jax.Array:
        return unet3d.squared_error(network, params, x, x[:, :1], voxels**3)

    def u_net_on(name: str, P_world: dj.Partition) -> Way:
        P = unet3d.volume_partition(P_world, P_world.size)
        network, mine = unet3d.UNet3d(P, channels), beside.block(volume, P)
        params = network.init(jax.random.key(0), jnp.float32)
        return step(name, dj.jit, dj.value_and_grad(partial(error, network)), params, mine)

    alone = jax.value_and_grad(partial(error, unet3d.sequential_u_net))
    table.row(
        f"3-D U-Net, {voxels}³",
        [
            *by_plain_jax(alone, whole, volume),
            *on_all_and_on_one(u_net_on),
            unmodified(alone, whole, None, (volume, dj.TensorSpec(volume.shape, P))),
            *by_jax(alone, jax.tree.map(shared, everywhere(whole)), shared(volume, P.shape)),
            *by_pytorch("unet3d", volume.shape, channels),
        ],
        rounds=5,
    )
    say_share(alone, whole, volume)
title = "VGG-11, 32², batch 32"
if wanted(title):
    width = 16
    images, labels = draw.random((32, 1, 32, 32), np.float32), np.eye(10, dtype=np.float32)[np.arange(32) % 10]

    def vgg_on(P: dj.Partition) -> tuple:
        P_x = beside.partition(P, None, 4)
        network = vgg.vgg((P_x, P_x), width)
        return network, digits.losses(network[-1].P_y), (P_x, network[-1].P_y)

    torch = by_pytorch("vgg", images.shape, [width * times for times in vgg.CHANNELS])
    example(title, vgg_on, vgg.plain_vgg, (images, labels), torch)
title = "ResNet-18, 64², batch 32"
if wanted(title):
    width = 16
    images, labels = draw.random((32, 1, 64, 64), np.float32), np.eye(10, dtype=np.float32)[np.arange(32) % 10]

    def resnet_on(P: dj.Partition) -> tuple:
        P_x = beside.partition(P, None, 4)
        network = resnet.resnet(P_x, width)
        return network, digits.losses(network[-1].P_y), (P_x, network[-1].P_y)

    torch, plain = by_pytorch("resnet", images.shape, (width,)), partial(resnet.plain_resnet, resnet.LAYERS)
    example(title, resnet_on, plain, (images, labels), torch)
title = "super-resolution, 48² to 96², batch 8"
if wanted(title):
    small, large = draw.random((8, 3, 48, 48), np.float32), draw.random((8, 3, 96, 96), np.float32)

    def super_resolution_on(P: dj.Partition) -> tuple:
        P_x = beside.partition(P, None, 4)
        return super_resolution.SuperResolution(P_x, 32), (nn.DistributedMSELoss(P_x), squares), (P_x, P_x)

    torch = by_pytorch("super_resolution", small.shape, (32,))
    example(title, super_resolution_on, super_resolution.plain_super_resolution, (small, large), torch)
title = "Fourier neural operator, 64², batch 8"
if wanted(title):
    rock, flow = draw.random((8, 3, 64, 64), np.float32), draw.random((8, 1, 64, 64), np.float32)

    def operator_on(P: dj.Partition) -> tuple:
        P_x = beside.partition(P, None, 4)
        return fno.operator(P_x, 3, 32, 12), (nn.DistributedMSELoss(P_x), squares), (P_x, P_x)

    torch = by_pytorch("fno", rock.shape, (3, 32, 12))
    example(title, operator_on, partial(fno.plain_operator, 12), (rock, flow), torch)
for kind in ("tensor", "ring"):
    title = f"transformer, {kind}, 8 x 256 of 256"
    if not wanted(title):
        continue
    text = draw.integers(0, 96, (8, 257))
    network = transformer.Transformer(P_all, 96, SIZE, kind)
    whole = dj.gather(network.init(jax.random.key(0), "float32"), network.param_specs())
    alone, both = jax.value_and_grad(transformer.plain_loss), (text[:, :-1], text[:, 1:])
    sharded = (cut_in_heads if kind == "tensor" else partial(jax.tree.map, shared))(everywhere(whole))
    along = (1, P_all.size)
    spec = dj.TensorSpec(both[0].shape, P_all.grid(along))
    of_params = specs_in_heads(everywhere(whole)) if kind == "tensor" else None
    ways = [
        *by_plain_jax(alone, whole, both),
        *on_all_and_on_one(partial(transformer_on, kind, text)),
        unmodified(alone, whole, of_params, (both, (spec, spec))),
        *by_jax(alone, sharded, tuple(shared(each, along) for each in both)),
    ]
    table.row(title, ways)
    say_share(alone, whole, both)
table.write()
