"""The memory that a convolution takes, forward and backward, beside PyTorch's of the same block.

mpiexec -n 2 python benchmarks/conv_memory.py

What is resident at its peak beyond what was there before: the output, the gradients of x and of the weight, and
whatever is in between. A worker's rows have their neighbours' beside them; PyTorch gets its block with zeros around it,
a copy, as the original lays it out for its messages. BENCH_PYTORCH names a Python that has PyTorch (`make
bench-peers`). Linux.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SHAPES = [((4, 16, 256, 256), 16), ((4, 64, 512, 512), 64), ((8, 64, 64, 64), 64), ((1, 8, 96, 96, 96), 8)]
MIB = 2**20


def resident(word: str) -> float:
    """MiB, now ("VmRSS") or at the peak ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(word))


def peak(run: Callable[[], object]) -> float:
    """MiB that `run` takes beyond what is resident before."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed does not count
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    result = run()
    most = resident("VmHWM")
    del result
    return most - before


def by_pytorch(shape: tuple[int, ...], channels: int) -> float:
    """In a process of its own, as this file run by PyTorch's Python."""
    command = [os.environ["BENCH_PYTORCH"], __file__, "block", str(channels), *map(str, shape)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def pytorch_block(channels: int, *shape: int) -> None:
    """Prints what PyTorch takes of a block, on one thread."""
    import torch

    torch.set_num_threads(1)
    layer = getattr(torch.nn, f"Conv{len(shape) - 2}d")(shape[1], channels, 3)
    x = torch.ones(shape, requires_grad=True)

    def both_ways() -> object:
        padded = torch.nn.functional.pad(x, (1, 1) * (len(shape) - 2))
        y = layer(padded)
        y.backward(y.detach())
        return y

    layer(torch.ones((1, *shape[1:2], *(8,) * (len(shape) - 2)))).sum().backward()  # loads what it needs
    print(peak(both_ways))


def main() -> None:
    """Prints a line for each layer."""
    import distdl_jax as dj
    import jax
    import jax.numpy as jnp
    from distdl_jax import nn

    from harness.sequential import both_ways

    P_all = dj.Partition()
    for shape, channels in SHAPES:
        dims = len(shape) - 2
        grid = P_all.grid((1, 1, P_all.size, *(1,) * (dims - 1)))
        kind = {2: nn.DistributedConv2d, 3: nn.DistributedConv3d}[dims]
        layer = kind(grid, in_channels=shape[1], out_channels=channels, kernel_size=3, padding=1)
        x, params = jnp.ones(dj.TensorSpec(shape, grid).local_shape), layer.init(jax.random.key(0))
        program = jax.jit(both_ways(layer)).lower(params, x).compile()
        found = peak(lambda program=program, params=params, x=x: jax.block_until_ready(program(params, x)))
        most = max(P_all.allgather_data(found))
        if P_all.rank == 0:
            beside = by_pytorch(x.shape, channels) if "BENCH_PYTORCH" in os.environ else float("nan")
            block, title = x.nbytes / MIB, "x".join(map(str, shape))
            print(f"{title}, {P_all.size} workers: block {block:.0f} MiB, peak {most:.0f}", end="", flush=True)
            print(f" ({most / block:.1f} blocks), PyTorch's {beside:.0f} ({most / beside:.2f} of it)", flush=True)


if __name__ == "__main__":
    pytorch_block(*map(int, sys.argv[2:])) if sys.argv[1:2] == ["block"] else main()
