"""One worker's convolution.

On CPUs, but for integers, a rule of shapes says how it is computed (cpu/rule.py). Elsewhere, and with
`DISTDL_JAX_FAST_CONVOLUTIONS=0`, it is XLA's (xla_conv.py), and nothing of `cpu` is imported.
"""

from __future__ import annotations

from contextvars import ContextVar

from jax import Array

from distdl_jax.nn.kernels.problem import Problem
from distdl_jax.nn.kernels.xla_conv import conv

as_operations = ContextVar("as_operations", default=False)
"""Whether convolutions are traced as XLA's on every machine, since their program is read and never runs."""


def convolution(problem: Problem, x: Array, weight: Array) -> Array:
    """Return the convolution of `x` with `weight`, which have one dtype."""
    if problem.has_choice and not as_operations.get():
        from distdl_jax.nn.kernels.cpu import convolution as cpu

        return cpu.convolution(problem, x, weight)
    window = problem.window
    return conv(x, weight, window.stride, window.padding, dilation=window.dilation, groups=problem.groups)
