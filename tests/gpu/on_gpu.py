"""The programs of cuda_programs.py on GPUs, and the same on CPUs: outputs and gradients agree.

DISTDL_JAX_GPUS=share JAX_PLATFORMS=cuda,cpu PYTHONPATH=tests:benchmarks:examples
    mpiexec -n 2 python -m distdl_jax tests/gpu/on_gpu.py primitives|layers|networks

Where JAX has no GPU it compares CPUs with CPUs, which tries this file. Worker 0 prints a line for each program, with
the largest difference relative to the largest number.
"""

import math
import sys
from typing import Any

import cuda_programs
import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj

jax.config.update("jax_default_matmul_precision", "highest")  # else GPUs multiply float32 in 10 bits

TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2}


def filled(of: Any, draw: np.random.Generator, gain: float = np.inf) -> np.ndarray:
    """Return numbers between 0.1 and 0.9, or less, so that a row adds up to `gain`; of integers 0 and 1."""
    if not jnp.issubdtype(of.dtype, jnp.inexact):
        return draw.integers(0, 2, of.shape).astype(of.dtype)
    return (draw.uniform(0.1, 0.9, of.shape) * min(1.0, gain / max(1, math.prod(of.shape[1:])))).astype(of.dtype)


def compiled(program: Any, arguments: Any, device: jax.Device) -> tuple[Any, Any]:
    """Return a program that is compiled for a device, and its arguments there."""
    arguments = jax.device_put(arguments, device)
    return jax.jit(program).lower(*arguments).compile(), arguments


def difference(y: Any, want: Any) -> float:
    """Return the largest difference of two arrays, relative to the largest number."""
    y, want = (np.asarray(each).astype(np.complex128) for each in (y, want))
    return float(np.abs(y - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-3))


def main(kind: str) -> int:
    """Compare all programs of a kind; return the exit status."""
    P, wrong = dj.Partition(), []
    kinds = {
        "primitives": cuda_programs.primitives,
        "layers": lambda: cuda_programs.layers(rows=False),
        "networks": cuda_programs.networks,
    }
    devices = [jax.devices()[0], jax.devices("cpu")[0]]
    for title, program, arguments in kinds[kind]():
        draw = np.random.default_rng(len(title))
        params, xs = (arguments[:1], arguments[1:]) if kind != "primitives" else ((), arguments)
        given = jax.tree.map(lambda of, draw=draw: filled(of, draw, 1.0), params)
        given += jax.tree.map(lambda of, draw=draw: filled(of, draw), xs)
        programs = [compiled(program, given, device) for device in devices]
        P.allgather_data(title)  # who waits for a message spins
        results = [jax.tree.leaves(jax.block_until_ready(run(*there))) for run, there in programs]
        apart = max((difference(y, want) for y, want in zip(*results, strict=True)), default=0.0)
        apart = max(P.allgather_data(apart))
        lowest = TOLERANCE["bfloat16" if kind == "primitives" else "float32"]
        if not apart <= lowest:  # nan, too
            wrong.append(title)
        if P.rank == 0:
            print(f"{'ok' if apart <= lowest else 'WRONG'} {apart:.1e} {title}", flush=True)
    if P.rank == 0:
        print(f"{kind} on {devices[0].device_kind}: {len(wrong)} wrong", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
