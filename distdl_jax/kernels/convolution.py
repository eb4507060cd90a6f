"""One worker's convolution, and the choice of its algorithms.

On CPUs it has up to five algorithms for each direction, of which the fastest depends on the shape and on the machine.
Elsewhere, in other dtypes than float32 and float64, and with `DISTDL_JAX_FAST_CONVOLUTIONS=0`, it is XLA's
(xla_conv.py), and nothing of `cpu` is imported.
"""

from __future__ import annotations

from jax import Array

from distdl_jax.kernels.problem import PLAIN, Algorithms, Parts, Problem
from distdl_jax.kernels.xla_conv import conv


def convolution(problem: Problem, parts: Parts, weight: Array, algorithms: Algorithms) -> Array:
    """Return the convolution of x, which lies in `parts`, with `weight`; all of one dtype."""
    if not problem.has_choice:
        window = problem.window
        x = problem.join(parts)
        return conv(x, weight, window.stride, window.padding, dilation=window.dilation, groups=problem.groups)
    from distdl_jax.kernels.cpu import convolution as cpu

    return cpu.convolution(problem, parts, weight, algorithms)


def chosen_unseen(problem: Problem) -> Algorithms:
    """Choose algorithms by the library's own records, which are the same on every machine."""
    if not problem.has_choice:
        return PLAIN
    from distdl_jax.kernels.cpu import choice

    return choice.by_records(problem)


def chosen_here(problem: Problem, may_measure: bool) -> Algorithms:
    """Choose algorithms by the times measured on this machine, now if need be.

    - `may_measure`: whether times that are measured here and now mean anything.
    """
    if not problem.has_choice:
        return PLAIN
    from distdl_jax.kernels.cpu import choice

    return choice.by_measurements(problem, may_measure)
