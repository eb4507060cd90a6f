"""The forms in which one worker's convolution is computed: forward, and the gradients of input and weight apart.

- "plain": XLA's own (`conv_plain`).
- "rewritten": in words that meet the compiler's fast kernels (`conv_cpu`).
- "products": as products of matrices (`conv_products`); for kernels of one tap, and the weight gradient of few inputs.
- "taps": as a sum over the kernel's taps (`conv_products`); for one input channel a group.
- "onednn": oneDNN's (`conv_onednn`), where it is installed; in float32.

All give the same to rounding. Which is the fastest depends on the shape and on the machine: `conv_choice` says.
Elsewhere than on a CPU, in other dtypes than float32 and float64, and with `DISTDL_JAX_FAST_CONVOLUTIONS=0`, it is the
operation as lax has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
from jax import Array

from distdl_jax.kernels import conv_cpu, conv_onednn, conv_plain, conv_products
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.layout import between_layers
from distdl_jax.kernels.split_halo import Apart, Parts, joined, taken_apart
from distdl_jax.settings import current_settings

Direction = Literal["forward", "input_gradient", "weight_gradient"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


class Forms(NamedTuple):
    """The names of three forms."""

    forward: str = "plain"
    input_gradient: str = "plain"
    weight_gradient: str = "plain"


PLAIN = Forms()

_FORMS: dict[Direction, dict[str, Callable[..., Array]]] = {
    "forward": {
        "plain": conv_plain.forward,
        "rewritten": conv_cpu.forward,
        "products": conv_products.by_pixels,
        "taps": conv_products.by_taps,
        "onednn": conv_onednn.forward,
    },
    "input_gradient": {
        "plain": conv_plain.input_gradient,
        "rewritten": conv_cpu.input_gradient,
        "products": conv_products.input_gradient_by_pixels,
        "taps": conv_products.input_gradient_by_taps,
        "onednn": conv_onednn.input_gradient,
    },
    "weight_gradient": {
        "plain": conv_plain.weight_gradient,
        "rewritten": conv_cpu.weight_gradient,
        "products": conv_products.weight_gradient_by_products,
        "taps": conv_products.weight_gradient_by_taps,
        "onednn": conv_onednn.weight_gradient,
    },
}

MOST_COPIES = 256
"""The most copies, counting channels and taps, of which a product's matrix is made."""

FEWEST_ROWS = 8
"""So many rows of results, at least, are what is measured in place of more."""

MANY_SAMPLES = 17
"""From so many samples on, XLA and the rewritten form take another way to the weight's gradient."""


@dataclass(frozen=True)
class Problem:
    """One worker's convolution.

    - `x`, `weight`: the shapes, N x C x features and c_out x C/groups x kernel.
    - `apart`: where what is around the worker's block lies; None where x is one array.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    window: Placement
    groups: int
    dtype: str
    apart: Apart | None = None

    @property
    def y(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.x[0], self.weight[0], *self.window.outputs(self.x[2:], self.weight[2:])

    @property
    def products(self) -> int:
        """How many numbers are multiplied."""
        return math.prod(self.y) * math.prod(self.weight[1:])

    @property
    def has_forms(self) -> bool:
        """Whether there is a choice."""
        fast = current_settings().fast_convolutions and jax.default_backend() == "cpu"
        return fast and self.dtype in ("float32", "float64") and 0 not in (*self.x, *self.weight, *self.y)

    def smaller(self, products: int) -> Problem:
        """The same with fewer samples, but not with few in place of many, and then with fewer rows, but not along the
        last dimension, so that no more numbers are multiplied."""
        fewest = min(self.x[0], MANY_SAMPLES) if self.x[0] >= MANY_SAMPLES else 1
        samples = min(self.x[0], max(fewest, self.x[0] * products // max(self.products, 1)))
        fewer = replace(self, x=(samples, *self.x[1:]))
        if len(self.x) == 3 or fewer.products <= products:
            return fewer
        least = self.window.reach(self.weight[2:])[0] + FEWEST_ROWS * self.window.stride[0]
        rows = min(self.x[2], max(least, self.x[2] * products // fewer.products))
        return replace(fewer, x=(*fewer.x[:2], rows, *self.x[3:]))

    def forms(self, direction: Direction) -> tuple[str, ...]:
        """The forms that can compute it, "plain" first."""
        one_tap, one_channel = math.prod(self.weight[2:]) == 1, self.weight[1] == 1
        few = self.weight[1] <= 4 and math.prod(self.weight[1:]) <= MOST_COPIES
        products = self.groups == 1 and (one_tap or (few and direction == "weight_gradient"))
        taps = self.groups > 1 and one_channel and math.prod(self.weight[2:]) <= conv_cpu.MOST_TAPS
        onednn = self.dtype == "float32" and current_settings().onednn != "off" and self._is_onednns(direction)
        others = {"products": products, "taps": taps, "onednn": onednn}
        return ("plain", "rewritten", *(form for form, is_one in others.items() if is_one))

    def _is_onednns(self, direction: Direction) -> bool:
        return conv_onednn.can_compute(direction, self.x, self.weight, self.y, self.window, self.groups)

    def function(self, direction: Direction, form: str) -> tuple[Callable[..., Array], tuple[tuple[int, ...], ...]]:
        """What computes it, and the shapes of its arguments: x (or its parts), the weight and, of gradients, the
        cotangent."""
        others = (self.weight,) if direction == "forward" else (self.weight, self.y)
        placed = {"window": self.window, "groups": self.groups}
        if self.apart is None:
            return partial(_FORMS[direction][form], **placed), (self.x, *others)
        compute = partial(_of_parts(direction, form), **placed, apart=self.apart)
        shapes = self.apart.parts(self.x)
        return lambda *arrays: compute(arrays[: len(shapes)], *arrays[len(shapes) :]), (*shapes, *others)


def convolution(x: Array, weight: Array, window: Placement, groups: int, forms: Forms) -> Array:
    """The convolution of `x`, N x C x features, with `weight`, c_out x C/groups x kernel; both of one dtype."""
    if not Problem(x.shape, weight.shape, window, groups, np.dtype(x.dtype).name).has_forms:
        return conv_plain.as_lax_has_it(x, weight, window, groups)
    return _convolution(x, weight, window, groups, forms)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _convolution(x: Array, weight: Array, window: Placement, groups: int, forms: Forms) -> Array:
    return _FORMS["forward"][forms.forward](x, weight, window, groups)


def _forward(
    x: Array, weight: Array, window: Placement, groups: int, forms: Forms
) -> tuple[Array, tuple[Array, Array]]:
    return _convolution(x, weight, window, groups, forms), (x, weight)


def _backward(
    window: Placement, groups: int, forms: Forms, residuals: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    of_x, of_weight = _FORMS["input_gradient"][forms.input_gradient], _FORMS["weight_gradient"][forms.weight_gradient]
    return of_x(*residuals, dy, window, groups), of_weight(*residuals, dy, window, groups)


_convolution.defvjp(_forward, _backward)


def convolution_apart(parts: Parts, weight: Array, window: Placement, groups: int, forms: Forms, apart: Apart) -> Array:
    """`convolution` of a block and what is around it, `parts`; what oneDNN computes takes them as they are."""
    if not Problem(apart.whole(parts[0].shape), weight.shape, window, groups, np.dtype(weight.dtype).name).has_forms:
        return convolution(between_layers(joined(parts, apart)), weight, window, groups, forms)
    return _convolution_apart(parts, weight, window, groups, forms, apart)


_ONEDNNS_OF_PARTS: dict[Direction, Callable[..., Any]] = {
    "forward": conv_onednn.forward_apart,
    "input_gradient": conv_onednn.input_gradient_apart,
    "weight_gradient": conv_onednn.weight_gradient_apart,
}


def _of_parts(direction: Direction, form: str) -> Callable[..., Any]:
    """What computes a direction of a block and what is around it: all forms but oneDNN's join what they read."""
    if form == "onednn":
        return _ONEDNNS_OF_PARTS[direction]

    def compute(parts: Parts, *others: Array, window: Placement, groups: int, apart: Apart) -> Any:
        result = _FORMS[direction][form](between_layers(joined(parts, apart)), *others, window=window, groups=groups)
        return taken_apart(result, apart) if direction == "input_gradient" else result

    return compute


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _convolution_apart(
    parts: Parts, weight: Array, window: Placement, groups: int, forms: Forms, apart: Apart
) -> Array:
    return _of_parts("forward", forms.forward)(parts, weight, window=window, groups=groups, apart=apart)


def _forward_apart(
    parts: Parts, weight: Array, window: Placement, groups: int, forms: Forms, apart: Apart
) -> tuple[Array, tuple[Parts, Array]]:
    return _convolution_apart(parts, weight, window, groups, forms, apart), (parts, weight)


def _backward_apart(
    window: Placement,
    groups: int,
    forms: Forms,
    apart: Apart,
    residuals: tuple[Parts, Array],
    dy: Array,
) -> tuple[Parts, Array]:
    of_x, of_weight = (
        _of_parts(direction, form)(*residuals, dy, window=window, groups=groups, apart=apart)
        for direction, form in zip(DIRECTIONS[1:], forms[1:], strict=True)
    )
    return of_x, of_weight


_convolution_apart.defvjp(_forward_apart, _backward_apart)
