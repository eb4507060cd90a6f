"""The library's programs for CUDA, lowered or compiled, without a GPU.

PYTHONPATH=tests:benchmarks:examples mpiexec -n 2 python tests/gpu/cuda_programs.py [--compile] [words]

Every primitive of the matrix, every layer of benchmarks/layer_cases and ten networks, each with its gradient, are
traced as where JAX's default device is a GPU, and lowered by the rules for "cuda", mpi4jax's own among them. With
--compile XLA also compiles them for an H100, which takes jax's CUDA plugin and mpi4jax's CUDA bridge, but no GPU.
Nothing is run. Words choose the programs whose titles have one of them. Each worker's last line is what it found, as
JSON.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import beside
import digits
import digits_mlp
import fno
import jax
import jax.numpy as jnp
import layer_cases
import lenet5
import numpy as np
import optax
import resnet
import super_resolution
import transformer
import unet3d
import vgg
from jax.experimental import topologies
from layer_cases.everything import all_cases
from matrix.cases import of_world, shape_dtypes
from training import Data, loss

import distdl_jax as dj
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.transports.mpi import launch_checks
from distdl_jax.transports.mpi.compat import import_mpi4jax
from distdl_jax.watchdog.launch import gpus

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""The GPU that is compiled for, as XLA's `GpuTargetConfigProto`."""

Program = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A title, a function and its arguments, or their shapes and dtypes."""


def total(y: Any) -> jax.Array:
    """Return a loss of any outputs."""
    leaves = (leaf for leaf in jax.tree.leaves(y) if jnp.issubdtype(leaf.dtype, jnp.inexact))
    return sum((jnp.sum(jnp.abs(leaf)).astype(jnp.float32) for leaf in leaves), jnp.float32(0))


def primitives() -> Iterator[Program]:
    """Yield the operators of the matrix on two workers, in bfloat16, which MPI doesn't know."""
    P = dj.Partition()
    for case in of_world(2):
        held = shape_dtypes(case, jnp.bfloat16)[P.rank]
        x = jax.tree.map(lambda of: jax.ShapeDtypeStruct(*of), held, is_leaf=lambda of: isinstance(of, ShapeDtype))
        operator = case.operator(P)
        yield case.name, dj.value_and_grad(lambda x, F=operator: total(F(x))), (x,)


def layers(rows: bool) -> Iterator[Program]:
    """Yield the layers of the benchmark of layers, which has all: each in its first row, or in all `rows`."""
    cases = all_cases(dj.Partition().size)
    first = {case.title.split(",")[0]: case for case in reversed(cases)}
    for case in cases if rows else reversed(first.values()):
        layer = case.layer()
        params = (
            jax.eval_shape(partial(layer.init, dtype=jnp.float32), jax.random.key(0)) if hasattr(layer, "init") else {}
        )
        xs = [block(given) for given in case.inputs]
        call = partial(case.call, layer)
        if case.backward:
            of_x = jnp.issubdtype(xs[0].dtype, jnp.inexact)
            call = dj.value_and_grad(lambda *args, call=call: total(call(*args)), (0, 1) if of_x else (0,))
        yield case.title, call, (params, *xs)


def block(given: layer_cases.Tensor) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of this worker's block of an input."""
    spec = given.grid and dj.TensorSpec(given.shape, dj.Partition().grid(given.grid))
    dtype = np.int32 if isinstance(given.kind, int) else np.dtype(bool if given.kind == "bool" else np.float32)
    return jax.ShapeDtypeStruct(spec.local_shape if spec else given.shape, dtype)


def networks() -> Iterator[Program]:
    """Yield training steps of ten networks."""
    P = dj.Partition()
    P_x = beside.partition(P, None, 4)
    perceptron, grids = partial(digits_mlp.perceptron, P), [(1, P.size), (P.size, 1), (1, P.size)]
    for title, network, local_blocks, size in (
        ("LeNet-5", lenet5.lenet5(P), lenet5.local_blocks, (8, 1, 28, 28)),
        ("perceptron", perceptron(grids), digits_mlp.local_blocks, (8, 64)),
    ):
        data = local_blocks(network, Data(np.zeros(size, np.float32), np.zeros((8, 10), np.float32)))
        yield title, stepped(partial(loss, network)), (params_of(network), data)
    square, classes = dj.nn.DistributedMSELoss(P_x), digits.losses
    for title, network, error, x, y in (
        ("VGG-11", vgg.vgg((P_x, P_x), 16), classes, (8, 1, 32, 32), (8, 10)),
        ("ResNet, a block a stage", resnet.resnet(P_x, 16, (1, 1, 1, 1)), classes, (8, 1, 32, 32), (8, 10)),
        ("super-resolution", super_resolution.SuperResolution(P_x, 32), square, (4, 3, 24, 24), (4, 3, 48, 48)),
        ("Fourier neural operator", fno.operator(P_x, 2, 32, 12), square, (4, 3, 64, 64), (4, 1, 64, 64)),
    ):
        P_y = network[-1].P_y if error is classes else P_x
        compare = error(P_y)[0] if error is classes else error

        def part(params: Any, x: Any, y: Any, network: Any = network, compare: Any = compare) -> Any:
            return compare(network(params, x, state=network.init_state("float32"), training=True)[0], y)

        yield title, stepped(part), (params_of(network), float_block(x, P_x), float_block(y, P_y))
    P_v = unet3d.volume_partition(P, P.size)
    u_net, x = unet3d.UNet3d(P_v, (8, 16, 32)), float_block((1, unet3d.SEEN, 16, 16, 16), P_v)
    error = partial(unet3d.squared_error, u_net)
    yield "3-D U-Net", stepped(lambda params, x: error(params, x, x[:, :1], 16**3)), (params_of(u_net), x)
    sizes = argparse.Namespace(layers=1, width=64, heads=4)
    for kind in ("tensor", "ring", "heads"):
        network = transformer.Transformer(P, 96, sizes, kind)
        batch = network.batch(np.zeros((4, 33), np.int32))
        yield f"transformer, {kind}", stepped(network.part_of_loss), (params_of(network), batch)


def float_block(shape: tuple[int, ...], P: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of this worker's block."""
    return jax.ShapeDtypeStruct(dj.TensorSpec(shape, P).local_shape, np.float32)


def params_of(network: Any) -> Any:
    """Return the shapes and dtypes of this worker's parameters."""
    return jax.eval_shape(lambda key: network.init(key, "float32"), jax.random.key(0))


def stepped(part_of_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step of Adam; its state begins anew in each."""

    def step(params: Any, *batch: Any) -> Any:
        optimiser = optax.adam(1e-3)
        value, gradient = dj.value_and_grad(part_of_loss)(params, *batch)
        updates, state = optimiser.update(gradient, optimiser.init(params), params)
        return optax.apply_updates(params, updates), state, value

    return step


def compute_on_a_gpu() -> None:
    """Have JAX's default device be a GPU, and mpi4jax's rules for CUDA find a bridge, of which they use nothing."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {gpus.XLA_FLAG}"
    jax.default_backend = lambda: "gpu"
    launch_checks.computes_on_gpu = lambda platforms: True
    launch_checks.gpu_in_use = lambda: f"GPU-{os.getpid()}"
    import_mpi4jax()
    from mpi4jax._src import xla_bridge

    if not xla_bridge.HAS_CUDA_EXT:
        xla_bridge.HAS_CUDA_EXT = True
        xla_bridge.mpi_xla_bridge_cuda = SimpleNamespace(set_copy_to_host=lambda copies: None)


def main() -> None:
    """Lower, or compile, all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile, too")
    parser.add_argument("--all", action="store_true", help="all rows of a layer, not the first one alone")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    compute_on_a_gpu()
    device = None
    if options.compile:
        topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100)
        device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    titles, calls = [], set[str]()
    everything = (primitives(), layers(options.all), networks())
    for title, program, arguments in (program for each in everything for program in each):
        if options.words and not any(word in title for word in options.words):
            continue
        lowered = (
            jax.jit(program, in_shardings=device, out_shardings=device)
            .trace(*arguments)
            .lower(lowering_platforms=("cuda",))
        )
        calls.update(re.findall(r"stablehlo\.custom_call @([\w$]+)", lowered.as_text()))
        if options.compile:
            memory = lowered.compile().memory_analysis()
            if dj.Partition().rank == 0:
                print(f"{title}: {memory.temp_size_in_bytes} bytes of temporaries", flush=True)
        titles.append(title)
    print(json.dumps({"programs": titles, "calls": sorted(calls)}), flush=True)


if __name__ == "__main__":
    main()
