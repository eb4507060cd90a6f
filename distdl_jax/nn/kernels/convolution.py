"""One worker's convolution and transposed convolution.

On CPUs, except for integers, a rule based on shapes selects the algorithm (cpu/rule.py). Elsewhere, and with
`DISTDL_JAX_FAST_CONVOLUTIONS=0`, it is XLA's, and `cpu` is not imported.
"""

from __future__ import annotations

from contextvars import ContextVar

import jax.numpy as jnp
from jax import Array

from distdl_jax.nn.kernels.phases import TransposedProblem, by_phases
from distdl_jax.nn.kernels.problem import Problem, conv

as_operations = ContextVar("as_operations", default=False)
"""Whether convolutions are traced as XLA's on every machine, because the program is only read, never run."""


def convolution(problem: Problem, x: Array, weight: Array) -> Array:
    """Return the convolution of `x` with `weight`, which have one dtype."""
    if problem.has_choice and not as_operations.get():
        from distdl_jax.nn.kernels.cpu import convolution as cpu

        return cpu.convolution(problem, x, weight)
    window = problem.window
    return conv(x, weight, window.stride, window.padding, dilation=window.dilation, groups=problem.groups)


def transposed_convolution(problem: TransposedProblem, x: Array, weight: Array) -> Array:
    """Return the transposed convolution of `x` with `weight`."""
    if problem.ordinary is None or as_operations.get():
        return _with_zeros_between(problem, x, weight)
    return by_phases(problem, problem.ordinary, x, weight, convolution)


def _with_zeros_between(p: TransposedProblem, x: Array, weight: Array) -> Array:
    """Compute it as a convolution of the input, spread by the stride, with the reversed kernel."""
    c_in, c_out, *kernel = p.weight
    by_group = weight.reshape(p.groups, c_in // p.groups, c_out, *kernel)
    turned = jnp.swapaxes(by_group, 1, 2).reshape(p.groups * c_out, c_in // p.groups, *kernel)
    turned = jnp.flip(turned, axis=tuple(range(2, turned.ndim)))
    # Output o reads from o + low - dilation * (kernel - 1) on, input i is at i * stride.
    padding = []
    for k, s, d, (first, last), (start, stop), low in zip(
        kernel, p.stride, p.dilation, p.inputs, p.outputs, p.low, strict=True
    ):
        before = first * s - (start + low - d * (k - 1))
        length = (last - first - 1) * s + 1
        padding.append((before, (stop - start) + d * (k - 1) - length - before))
    ones = (1,) * len(kernel)
    return conv(x, turned, ones, padding, x_dilation=p.stride, dilation=p.dilation, groups=p.groups)
