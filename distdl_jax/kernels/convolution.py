"""One worker's convolution and transposed convolution: the algorithm, by a rule of shapes, and both gradients.

On CPUs, except for integers, `algorithm` chooses: oneDNN if `python -m distdl_jax.onednn` has compiled it and it has a
fast implementation; otherwise XLA, or `products` where XLA is slow. Elsewhere, and with
`DISTDL_JAX_FAST_CONVOLUTIONS=0`, a convolution is XLA's, with JAX's derivatives. docs/benchmarks.md has the timings
behind the rule.

On CPUs half precision is computed in float32, and rounded once: XLA's convolutions of float16 and bfloat16 take up to
46 times as long as those of float32. What is kept for the gradients has the dtype of the operands.

Forward and the two gradients are linear in both of their operands, and the derivatives of each are the other two. So
they can be differentiated repeatedly, and every derivative is as fast as the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.kernels import onednn, products, xla
from distdl_jax.kernels.dtypes import accumulation_dtype, in_own_width
from distdl_jax.kernels.geometry import channels_first, channels_last
from distdl_jax.kernels.phases import TransposedProblem, by_phases
from distdl_jax.kernels.precision import default_has_fast_products
from distdl_jax.kernels.problem import Direction, Problem, conv
from distdl_jax.settings import current_settings

as_operations = ContextVar("as_operations", default=False)
"""Whether convolutions are traced as XLA's on every machine, because the program is only read, never run."""

Algorithm = Literal["onednn", "xla", "products"]

_ALGORITHMS: dict[Algorithm, ModuleType] = {"onednn": onednn, "xla": xla, "products": products}
"""The modules that have a function for each direction."""

FEW = 17
"""With fewer input and output channels, XLA's fast library is not used."""


def convolution(problem: Problem, x: Array, weight: Array) -> Array:
    """Return the convolution of `x` with `weight`, which have one dtype."""
    if problem.has_choice and not as_operations.get():
        if problem.dtype == "float32" and default_has_fast_products():
            problem = replace(problem, fast_math=True)
        return _forward(problem, x, weight)
    window = problem.window
    by_xla = partial(
        conv, stride=window.stride, padding=window.padding, dilation=window.dilation, groups=problem.groups
    )
    return _in_float32(by_xla, x, weight)


def transposed_convolution(problem: TransposedProblem, x: Array, weight: Array) -> Array:
    """Return the transposed convolution of `x` with `weight`."""
    if problem.ordinary is None or as_operations.get():
        return _in_float32(partial(_with_zeros_between, problem), x, weight)
    return by_phases(problem, problem.ordinary, x, weight, convolution)


def in_direction(problem: Problem, direction: Direction, *operands: Array) -> Array:
    """Return the convolution, or one of its gradients, of the operands in the order of `products`.

    It can be differentiated. A problem with `channels_last` has all arrays in that order.
    """
    return _DIFFERENTIABLE[direction](problem, *operands)


def algorithm(problem: Problem, direction: Direction) -> Algorithm:
    """Return the algorithm for the convolution, or one of its gradients."""
    variants = _variants(problem)
    if any(_onednn_can(variant, direction) for variant in variants):
        return "onednn"
    if problem.dtype in ("float64", "float32", "float16", "bfloat16") and _is_slow_in_xla(variants[-1], direction):
        return "products"
    return "xla"


def _variants(problem: Problem) -> list[Problem]:
    """Return the problem as given; in float32, if it is of half precision; and that with the channels first."""
    wide = replace(problem, dtype=accumulation_dtype(np.dtype(problem.dtype)).name)
    return list(dict.fromkeys((problem, wide, replace(wide, channels_last=False, fast_math=False))))


def _onednn_can(problem: Problem, direction: Direction) -> bool:
    return current_settings().onednn == "on" and onednn.can_compute(problem, direction)


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


def _computed(problem: Problem, direction: Direction, *operands: Array) -> Array:
    """Compute by the fastest algorithm; other than oneDNN's are of float32 and more, with the channels first."""
    way, variants = algorithm(problem, direction), _variants(problem)
    as_taken = (variant for variant in variants if way == "onednn" and _onednn_can(variant, direction))
    variant = next(as_taken, variants[-1])
    compute = partial(getattr(_ALGORITHMS[way], direction), variant)
    if variant.channels_last == problem.channels_last:
        return _in_dtype(variant.dtype, compute, *operands)
    *are_weights, is_weight = _ARE_WEIGHTS[direction]
    firsts = map(channels_first, operands, are_weights)
    return channels_last(_in_dtype(variant.dtype, compute, *firsts), is_weight)


_ARE_WEIGHTS: dict[Direction, tuple[bool, bool, bool]] = {
    "forward": (False, True, False),
    "input_gradient": (True, False, False),
    "weight_gradient": (False, False, True),
}
"""Whether the operands, and the result, are weights."""


def _in_float32(compute: Callable[..., Array], *operands: Array) -> Array:
    """Compute in float32 and round the result, if the operands are of half precision and on a CPU."""
    dtype = np.dtype(operands[0].dtype)
    on_cpu = jax.default_backend() == "cpu" and not as_operations.get()
    return _in_dtype(accumulation_dtype(dtype) if on_cpu else dtype, compute, *operands)


def _in_dtype(wide: DTypeLike, compute: Callable[..., Array], *operands: Array) -> Array:
    """Compute in the dtype `wide`, and round the result to that of the operands."""
    dtype = operands[0].dtype
    if dtype == wide:
        return compute(*operands)
    return compute(*(operand.astype(wide) for operand in operands)).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(problem: Problem, x: Array, weight: Array) -> Array:
    return _computed(problem, "forward", x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _input_gradient(problem: Problem, weight: Array, dy: Array) -> Array:
    """Return the gradient of x, from the cotangent `dy` of the result."""
    return _computed(problem, "input_gradient", weight, dy)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weight_gradient(problem: Problem, x: Array, dy: Array) -> Array:
    """Return the gradient of the weight, from the cotangent `dy` of the result."""
    return _computed(problem, "weight_gradient", x, dy)


def _backward(problem: Problem, operands: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight = operands
    return _input_gradient(problem, weight, dy), _weight_gradient(problem, x, dy)


def _backward_of_input_gradient(problem: Problem, operands: tuple[Array, Array], x: Array) -> tuple[Array, Array]:
    weight, dy = operands
    return _weight_gradient(problem, x, dy), _forward(problem, x, weight)


def _backward_of_weight_gradient(problem: Problem, operands: tuple[Array, Array], weight: Array) -> tuple[Array, Array]:
    x, dy = operands
    return _input_gradient(problem, weight, dy), _forward(problem, x, weight)


def _with_operands(function: Callable[..., Array], problem: Problem, *operands: Array) -> tuple[Array, Any]:
    return function(problem, *operands), operands


_DIFFERENTIABLE: dict[Direction, Callable[..., Array]] = {
    "forward": _forward,
    "input_gradient": _input_gradient,
    "weight_gradient": _weight_gradient,
}

for _function, _rule in (
    (_forward, _backward),
    (_input_gradient, _backward_of_input_gradient),
    (_weight_gradient, _backward_of_weight_gradient),
):
    _function.defvjp(in_own_width(partial(_with_operands, _function)), in_own_width(_rule))


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
