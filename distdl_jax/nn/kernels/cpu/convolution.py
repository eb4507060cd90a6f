"""A convolution on a CPU, forward and both gradients, each by the algorithm that `rule` selects.

The three are linear in both of their operands, and the derivatives of each are the other two, so they can be
differentiated repeatedly, and every derivative is as fast as the first.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import jax
from jax import Array

from distdl_jax.nn.kernels.cpu import plain, products, rule
from distdl_jax.nn.kernels.cpu.onednn import convolution as onednn
from distdl_jax.nn.kernels.problem import Direction, Problem
from distdl_jax.tracing.context import in_own_width

_WAYS: dict[rule.Way, ModuleType] = {"onednn": onednn, "xla": plain, "products": products}
"""The modules that have a function for each direction."""


def _computed(problem: Problem, direction: Direction, *operands: Array) -> Array:
    compute = getattr(_WAYS[rule.way(problem, direction)], direction)
    result: Array = compute(problem, *operands)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def convolution(problem: Problem, x: Array, weight: Array) -> Array:
    """Return the convolution of `x` with `weight`."""
    return _computed(problem, "forward", x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def input_gradient(problem: Problem, weight: Array, dy: Array) -> Array:
    """Return the gradient of x, from the cotangent `dy` of the result."""
    return _computed(problem, "input_gradient", weight, dy)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def weight_gradient(problem: Problem, x: Array, dy: Array) -> Array:
    """Return the gradient of the weight, from the cotangent `dy` of the result."""
    return _computed(problem, "weight_gradient", x, dy)


def _forward(function: Any, problem: Problem, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    return function(problem, *operands), operands


def _backward(problem: Problem, operands: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight = operands
    return input_gradient(problem, weight, dy), weight_gradient(problem, x, dy)


def _backward_of_input_gradient(problem: Problem, operands: tuple[Array, Array], x: Array) -> tuple[Array, Array]:
    weight, dy = operands
    return weight_gradient(problem, x, dy), convolution(problem, x, weight)


def _backward_of_weight_gradient(problem: Problem, operands: tuple[Array, Array], weight: Array) -> tuple[Array, Array]:
    x, dy = operands
    return input_gradient(problem, weight, dy), convolution(problem, x, weight)


for _function, _rule in (
    (convolution, _backward),
    (input_gradient, _backward_of_input_gradient),
    (weight_gradient, _backward_of_weight_gradient),
):
    _function.defvjp(in_own_width(partial(_forward, _function)), in_own_width(_rule))
