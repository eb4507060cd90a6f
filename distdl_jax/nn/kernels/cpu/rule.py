"""The algorithm of a convolution on a CPU: a rule based on shapes, with the timings behind it.

oneDNN if `python -m distdl_jax.onednn` has compiled it and it has a fast implementation; otherwise XLA, or `products`
where XLA is slow. Milliseconds on one core of an AMD EPYC (jax 0.12), forward / gradient of x / gradient of the weight:

| x, kernel, output channels | dtype | XLA | products |
|---|---|---|---|
| 32 x 512 x 2², 3², 512 | float32 | 538 / 544 / 13 | 7 / 11 / 9 |
| 32 x 64 x 4², 5², 64 | float32 | 27 / 27 / 0.7 | 1.7 / 2.6 / 1.8 |
| 32 x 64 x 4², 3², 64 | float32 | 0.47 / 0.48 / 0.52 | 0.62 / 0.67 / 0.67 |
| 8 x 64 x 28², 3², 64 in 4 groups | float32 | 8.0 / 7.9 / 254 | 3.3 / 3.3 / 2.9 |
| 8 x 64 x 56², 3², 64 in 64 groups | float32 | 52 / 51 / 21 | 1.1 / 1.1 / 8.0 |
| 8 x 256 x 56², 1, 64 | float32 | 16 / 15 / 23 | 11 / 12 / 10 |
| 256 x 1 x 28², 5², 6 | float32 | 20 / 22 / 11 | 1.8 / 49 / 11 |
| 1 x 8 x 256², 3², 8 | float32 | 4.2 / 4.2 / 20 | 2.4 / 2.2 / 3.4 |
| 8 x 48³, 3³, 8 | float32 | 82 / 81 / 124 | 13 / 13 / 16 |
| the same | float64 | 149 / 145 / 209 | 23 / 22 / 28 |
| 4 x 16 x 64², 3², 16 | float64 | 25 / 25 / 42 | 3.2 / 3.2 / 4.2 |
| 32 x 16 x 5², 3², 16 | float64 | 0.91 / 0.90 / 0.13 | 0.62 / 0.63 / 0.71 |
| 8 x 64 x 56², 3² of stride 2, 128 | float64 | 23 / 408 / 25 | 24 / 44 / 24 |
| 8 x 256 x 14², 3², 256 | float64 | 40 / 42 / 45 | 46 / 51 / 51 |

XLA's own oneDNN, an experimental option from jaxlib 0.11 on, is not used: it loses NaN (benchmarks/xla_onednn.py).
"""

from __future__ import annotations

import math
from typing import Literal

from distdl_jax.nn.kernels.cpu.onednn.convolution import can_compute
from distdl_jax.nn.kernels.problem import Direction, Problem
from distdl_jax.settings import current_settings

Way = Literal["onednn", "xla", "products"]

FEW = 17
"""With fewer input and output channels, XLA's fast library is not used."""


def way(problem: Problem, direction: Direction) -> Way:
    """Return the algorithm for the convolution, or one of its gradients."""
    if current_settings().onednn == "on" and can_compute(problem, direction):
        return "onednn"
    if problem.dtype in ("float32", "float64") and _is_slow_in_xla(problem, direction):
        return "products"
    return "xla"  # it handles half precision differently, and products would round partial sums to it


def _is_slow_in_xla(problem: Problem, direction: Direction) -> bool:
    samples, (c_out, c_in, *kernel) = problem.x[0], problem.weight
    taps, pixels, is_double = math.prod(kernel), math.prod(problem.x[2:]), problem.dtype == "float64"
    if problem.groups > 1 or problem.dims > 2 or taps == 1 or pixels < taps:
        return True
    has_stride = set(problem.window.stride) != {1}
    match direction:
        case "weight_gradient":  # which uses the samples as channels
            return max(samples, min(c_in, c_out)) < FEW
        case "input_gradient":
            return is_double and (has_stride or max(c_in, c_out) < FEW)
    return max(c_in, c_out) < FEW if is_double else c_in == 1 and not has_stride
