"""The algorithms that compute a convolution on a CPU: forward, and the gradients of input and weight apart.

- "plain": XLA's own (`plain`).
- "rewritten": in words that meet the compiler's fast kernels (`rewritten`).
- "products": as products of matrices (`products`); for kernels of one tap, and the weight gradient of few inputs.
- "taps": as a sum over the kernel's taps (`products`); for one input channel a group.
- "onednn": oneDNN's (`onednn`), where it is installed; in float32.

All give the same to rounding. `choice` says which is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType

import jax
from jax import Array

from distdl_jax.kernels.cpu import plain, products, rewritten, taps
from distdl_jax.kernels.cpu.onednn import convolution as onednn
from distdl_jax.kernels.problem import DIRECTIONS, Algorithms, Direction, Parts, Problem, Shape
from distdl_jax.settings import current_settings

_ALGORITHMS: dict[str, ModuleType] = {"plain": plain, "rewritten": rewritten, "products": products, "taps": taps}
"""The modules with a function of x, weight, perhaps dy, window and groups for each direction."""

MOST_COPIES = 256
"""The most copies, counting channels and taps, of which a product's matrix is made."""


def available(problem: Problem, direction: Direction) -> tuple[str, ...]:
    """Return the algorithms that can compute it, "plain" first."""
    _, c_in, *kernel = problem.weight
    few = c_in <= 4 and c_in * math.prod(kernel) <= MOST_COPIES
    others = {
        "products": problem.groups == 1 and (math.prod(kernel) == 1 or (few and direction == "weight_gradient")),
        "taps": problem.groups > 1 and c_in == 1 and math.prod(kernel) <= taps.MOST_TAPS,
        "onednn": problem.dtype == "float32"
        and current_settings().onednn != "off"
        and onednn.can_compute(problem, direction),
    }
    return ("plain", "rewritten", *(name for name, can in others.items() if can))


def algorithm(problem: Problem, direction: Direction, name: str) -> Callable[..., Array | Parts]:
    """Return the function of the parts of x, the weight and, for gradients, dy.

    The input's gradient is in parts, too. All algorithms but oneDNN's join the parts that they read.
    """
    if name == "onednn":
        return partial(getattr(onednn, direction), problem)
    compute = getattr(_ALGORITHMS[name], direction)

    def of_parts(parts: Parts, *others: Array) -> Array | Parts:
        result: Array = compute(problem.join(parts), *others, window=problem.window, groups=problem.groups)
        return problem.split(result) if direction == "input_gradient" else result

    return of_parts


def as_program(
    problem: Problem, direction: Direction, name: str
) -> tuple[Callable[..., Array | Parts], tuple[Shape, ...]]:
    """Return the function of arrays alone, and the shapes of these: the parts of x, the weight and, perhaps, dy."""
    compute, parts = algorithm(problem, direction, name), problem.part_shapes
    others = (problem.weight,) if direction == "forward" else (problem.weight, problem.y)
    return lambda *arrays: compute(arrays[: len(parts)], *arrays[len(parts) :]), (*parts, *others)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def convolution(problem: Problem, parts: Parts, weight: Array, algorithms: Algorithms) -> Array:
    """Return the convolution of x, which lies in `parts`, with `weight`."""
    y = algorithm(problem, "forward", algorithms.forward)(parts, weight)
    assert not isinstance(y, tuple)
    return y


def _forward(
    problem: Problem, parts: Parts, weight: Array, algorithms: Algorithms
) -> tuple[Array, tuple[Parts, Array]]:
    return convolution(problem, parts, weight, algorithms), (parts, weight)


def _backward(
    problem: Problem, algorithms: Algorithms, residuals: tuple[Parts, Array], dy: Array
) -> tuple[Array | Parts, ...]:
    gradients = zip(DIRECTIONS[1:], algorithms[1:], strict=True)
    return tuple(algorithm(problem, direction, name)(*residuals, dy) for direction, name in gradients)


convolution.defvjp(_forward, _backward)
