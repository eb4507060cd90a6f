"""One worker's convolution.

On CPUs, but for integers, a rule of shapes says how it is computed (cpu/rule.py). Elsewhere, and with
`DISTDL_JAX_FAST_CONVOLUTIONS=0`, it is XLA's (xla_conv.py), and nothing of `cpu` is imported.
"""

from __future__ import annotations

import math

import numpy as np
from jax import Array

from distdl_jax.kernels.problem import Problem
from distdl_jax.kernels.xla_conv import conv


def convolution(problem: Problem, x: Array, weight: Array) -> Array:
    """Return the convolution of `x` with `weight`, which have one dtype."""
    if problem.has_choice:
        from distdl_jax.kernels.cpu import convolution as cpu

        return cpu.convolution(problem, x, weight)
    window = problem.window
    return conv(x, weight, window.stride, window.padding, dilation=window.dilation, groups=problem.groups)


def scratch(problem: Problem) -> tuple[int, int, int]:
    """Return how many bytes each direction takes beside operands and result, the same on every machine.

    It is next to nothing where oneDNN can compute it, and else arrays in the order in memory in which XLA computes.
    """
    if problem.dtype == "float32" and problem.dims <= 3:
        return 0, 0, 0
    x, y = (math.prod(shape) * np.dtype(problem.dtype).itemsize for shape in (problem.x, problem.y))
    return max(x, y), max(x, y), x + y
