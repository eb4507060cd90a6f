"""The sequential layers, and a process of its own that runs them on all of the machine's threads.

XLA fixes its number of threads when a process starts, so a worker that has one cannot time the layer on all. As a
program, this file reads a layer's description, a JSON list on a line, and then runs the layer once for each line more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def both_ways(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Forward, and the gradients of input and parameters."""

    def run(params: Any, x: Any) -> Any:
        y, pullback = jax.vjp(apply, params, x)
        return y, pullback(y)

    return run


def conv(params: Any, x: Any) -> Any:
    """The convolution with a kernel of 3 and a padding of 1, with bias."""
    y = lax.conv_general_dilated(x, params["weight"], (1,) * (x.ndim - 2), [(1, 1)] * (x.ndim - 2))
    return y + params["bias"].reshape(-1, *(1,) * (x.ndim - 2))


def max_pool(params: Any, x: Any) -> Any:
    """The largest of each 2 x 2."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


class OnAllThreads:
    """A process without MPI that runs `layer`, "conv" or "max_pool", on an x of `shape`; `run` waits for one call."""

    def __init__(self, layer: str, shape: tuple[int, ...], channels: int, backward: bool) -> None:
        mpi = ("PMI", "MPI", "OMPI", "PRTE", "HYDRA")
        environment = {k: v for k, v in os.environ.items() if not k.startswith((*mpi, "NPROC", "XLA_FLAGS"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._ask(json.dumps([layer, shape, channels, backward]))

    def run(self) -> None:
        self._ask("run")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        if not self._process.stdout.readline():
            raise RuntimeError("the sequential layer's process has ended")


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the worker that started this is bound to one
    layer, shape, channels, backward = json.loads(sys.stdin.readline())
    apply = {"conv": conv, "max_pool": max_pool}[layer]
    kernel = (channels, shape[1], *(3,) * (len(shape) - 2))
    params = {"weight": jnp.ones(kernel), "bias": jnp.ones(channels)} if layer == "conv" else {}
    program, x = jax.jit(both_ways(apply) if backward else apply), jnp.ones(shape)
    print("ready", flush=True)
    for _ in sys.stdin:
        jax.block_until_ready(program(params, x))
        print("done", flush=True)


if __name__ == "__main__":
    main()
