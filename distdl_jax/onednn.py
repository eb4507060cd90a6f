"""`python -m distdl_jax.onednn`: compile oneDNN's convolutions into this environment, and test them."""

from __future__ import annotations

import ctypes
import sys

import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import SetupError
from distdl_jax.nn.kernels.cpu import plain
from distdl_jax.nn.kernels.cpu.onednn import convolution
from distdl_jax.nn.kernels.cpu.onednn.build import build
from distdl_jax.nn.kernels.cpu.onednn.convolution import can_compute
from distdl_jax.nn.kernels.geometry import Placement
from distdl_jax.nn.kernels.problem import DIRECTIONS, Problem
from distdl_jax.watchdog.launch.onednn_library import version


def main() -> int:
    """Build and test, and return the exit status."""
    try:
        path = build()
        try:
            ctypes.CDLL(str(path))
            _try()
        except (SetupError, OSError):
            path.unlink()  # programs run better without it
            raise
    except OSError as error:
        print(f"The compiled library can't be loaded: {error}", file=sys.stderr)
        return 1
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"-- {path} is ready: oneDNN {version()}")
    return 0


def _try() -> None:
    """Raise `SetupError` unless a convolution, and its gradients, equal XLA's."""
    window, draw = Placement((1, 2), ((1, 1), (0, 1)), (1, 1)), np.random.default_rng(0).standard_normal
    problem = Problem((2, 6, 9, 8), (20, 3, 3, 2), window, 2, "float32")
    x, weight, dy = (jnp.asarray(draw(shape), jnp.float32) for shape in (problem.x, problem.weight, problem.y))
    shapes = f"{problem.x} by {problem.weight}"
    for direction, operands in zip(DIRECTIONS, ((x, weight), (weight, dy), (x, dy)), strict=True):
        if not can_compute(problem, direction):
            raise SetupError(f"oneDNN {version()} can't compute a small convolution ({direction}: {shapes}).")
        ours, xlas = (getattr(module, direction)(problem, *operands) for module in (convolution, plain))
        if not jnp.allclose(ours, xlas, rtol=1e-4, atol=1e-4):
            raise SetupError(f"The result of oneDNN {version()} differs from XLA's ({direction}: {shapes}).")


if __name__ == "__main__":
    sys.exit(main())
