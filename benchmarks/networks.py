"""A training step of whole networks, those of `examples/`, beside the same network in plain JAX on one thread.

mpiexec -n 2 python benchmarks/networks.py [words: rows whose title has one of them]

"one thread" runs on worker 0 alone; NPROC=1 gives every worker one thread. A step is value, gradient and adam.
"JAX sharding" is the sequential network jitted over all workers, with x (and the perceptron's weights) cut as ours are.
"PyTorch" runs eagerly on one thread, where BENCH_PYTORCH names a Python that has it: `make bench-peers`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import digits_mlp
import lenet5
import unet3d
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from training import Data, loss

from harness import Table, Way, jax_sharding
from harness.asked import Asked

jax_sharding.start()
P_all = dj.Partition()
PYTORCH = os.environ.get("BENCH_PYTORCH")
OPTIMISER = optax.adam(1e-3)


def step(name: str, jit: Callable, value_and_grad: Callable, params: Any, *batch: Any, here: bool = True) -> Way:
    """One step, again and again from the parameters that the last one left."""
    if not here:
        return Way(name, lambda: None)

    @jit
    def stepped(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = value_and_grad(params, *batch)
        updates, state = OPTIMISER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jit(OPTIMISER.init)(params)
    batch = jax.tree.map(lambda a: a if isinstance(a, jax.Array) else jax.device_put(a), batch)

    def run() -> None:
        nonlocal params, state
        params, state, _ = jax.block_until_ready(stepped(params, state, *batch))

    return Way(name, run)


def everywhere(tree: Any) -> Any:
    """What worker 0 has, on all workers, as numpy arrays."""
    return P_all.broadcast_data(jax.tree.map(np.asarray, tree), root=0)


def shared(array: np.ndarray, grid: Sequence[int] = ()) -> jax.Array:
    """As JAX shares it between all workers, cut as `grid` says, which has a number for each dimension; or copied."""
    sharding = jax_sharding.sharding(grid or (1,) * (array.ndim - 1) + (P_all.size,))
    where = sharding if grid else NamedSharding(sharding.mesh, Spec())
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def by_jax(value_and_grad: Callable, params: Any, *batch: Any) -> list[Way]:
    """The step over all workers by JAX alone; nothing on one worker."""
    return [step("JAX sharding", jax.jit, value_and_grad, params, *batch)] if P_all.size > 1 else []


def by_pytorch(name: str, shape: Sequence[int], widths: Sequence[int]) -> list[Way]:
    """The step in PyTorch, in a process that worker 0 starts; nothing where there is no PyTorch."""
    if not PYTORCH:
        return []
    program = Path(__file__).with_name("harness") / "pytorch.py"
    run = Asked([PYTORCH, str(program)], [name, [*shape], [*widths]]).run if P_all.rank == 0 else lambda: None
    return [Way("PyTorch", run)]


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
table.write()
