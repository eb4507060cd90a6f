"""One worker's convolution by oneDNN, forward and gradients: calls of the library that `distdl_jax.onednn` compiles.

float32 only. What oneDNN can't compute, or only slowly, XLA does. Each of the three is linear in both of its operands,
and their derivatives are each other, so that they can be differentiated again and again. x is one array, or a block and
what is around it, which oneDNN then joins as it brings them into its own order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.kernels import conv_plain
from distdl_jax.kernels.geometry import Placement, padded
from distdl_jax.kernels.onednn.compiled import DIRECTIONS, bytes_needed, target
from distdl_jax.kernels.split_halo import Apart, Parts, joined, taken_apart

CHOSEN, AS_THEY_ARE, CHANNELS_LAST = range(3)
"""In which order activations are in memory while oneDNN computes; as convolution.cc numbers them."""

Shape = tuple[int, ...]
ONE = Apart(())
"""x as one array."""


class Call(NamedTuple):
    """What one call computes: the shapes, how the kernel lies on x, the groups, and the parts in which x is."""

    direction: str
    x: Shape
    weight: Shape
    y: Shape
    window: Placement
    groups: int
    apart: Apart = ONE

    @property
    def order(self) -> int:
        """In which order it is computed: what was fastest of 43 shapes on an AMD EPYC, by up to seven times."""
        (c_out, c_in), dims = self.weight[:2], len(self.x) - 2
        if self.groups > 1:
            return CHOSEN
        if math.prod(self.weight[2:]) == 1:
            return AS_THEY_ARE  # a product of matrices, which takes less time than another order
        # In oneDNN's own order there are blocks of 16 channels, of which few fill a part.
        match self.direction:
            case "input_gradient" if c_in == 1 or (c_in <= 3 and dims < 3):
                return AS_THEY_ARE
            case "input_gradient" if c_out < 16:
                return CHANNELS_LAST
            case "weight_gradient" if c_out < 16 or 3 < c_in < 16:
                return CHANNELS_LAST
        return CHOSEN


@cache
def memory(call: Call) -> int | None:
    """How many bytes it needs beside its operands and its result; None where oneDNN can't compute it, or slowly."""
    low, high = zip(*call.window.padding, strict=True)
    window = call.window.stride, call.window.dilation, low, high
    direction = DIRECTIONS.index(call.direction)
    shapes, sides = (call.x, call.weight, call.y), call.apart.sides
    return bytes_needed(direction, call.order, call.groups, (*shapes, *window, (len(sides),), *sides))


def _run(call: Call, operands: Parts, results: tuple[Shape, ...], needed: int) -> Parts:
    """`operands` and `results` as convolution.cc has them: x last, in its parts."""
    low, high = np.array(call.window.padding, np.int64).T
    axes, before, _ = np.array(call.apart.sides, np.int64).reshape(-1, 3).T
    outputs = [jax.ShapeDtypeStruct(result, jnp.float32) for result in results]
    own = len(outputs) if call.direction != "input_gradient" else 0
    outputs.insert(own, jax.ShapeDtypeStruct((needed,), jnp.uint8))
    found = jax.ffi.ffi_call(target(call.direction), outputs, vmap_method="sequential")(
        *operands,
        stride=np.array(call.window.stride, np.int64),
        dilation=np.array(call.window.dilation, np.int64),
        low=low,
        high=high,
        groups=np.int64(call.groups),
        order=np.int64(call.order),
        axes=axes,
        before=before,
    )
    return (*found[:own], *found[own + 1 :])


def can_compute(direction: str, x: Shape, weight: Shape, y: Shape, window: Placement, groups: int) -> bool:
    """Whether oneDNN is here, and has something fast for it."""
    cut, window = _cut(x, window)
    return memory(Call(direction, cut, weight, y, window, groups)) is not None


def forward(x: Array, weight: Array, window: Placement, groups: int) -> Array:
    """The convolution of `x`, N x C x features, with `weight`, c_out x C/groups x kernel."""
    x, window = _without_unread(x, window)
    return _forward((x,), weight, window, groups, ONE)


def input_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """The gradient of x, from the cotangent `dy` of the result."""
    cut, placed = _cut(x.shape, window)
    (gradient,) = _input_gradient(weight, dy, cut, placed, groups, ONE)
    return padded(gradient, [(max(0, -low), max(0, -high)) for low, high in window.padding])


def weight_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """The gradient of the weight, from the cotangent `dy` of the result."""
    x, window = _without_unread(x, window)
    return _weight_gradient((x,), dy, weight.shape, window, groups, ONE)


# The same of a block and what is around it, where no padding is less than none.


def forward_apart(parts: Parts, weight: Array, window: Placement, groups: int, apart: Apart) -> Array:
    """The convolution of what lies apart."""
    return _forward(parts, weight, window, groups, apart)


def input_gradient_apart(parts: Parts, weight: Array, dy: Array, window: Placement, groups: int, apart: Apart) -> Parts:
    """The gradients of the parts."""
    return _input_gradient(weight, dy, apart.whole(parts[0].shape), window, groups, apart)


def weight_gradient_apart(
    parts: Parts, weight: Array, dy: Array, window: Placement, groups: int, apart: Apart
) -> Array:
    """The gradient of the weight."""
    return _weight_gradient(parts, dy, weight.shape, window, groups, apart)


def _cut(x: Shape, window: Placement) -> tuple[Shape, Placement]:
    """The shape of what is left of x where padding is less than none, and how the kernel lies on that."""
    left = (n + min(0, low) + min(0, high) for n, (low, high) in zip(x[2:], window.padding, strict=True))
    padding = tuple((max(0, low), max(0, high)) for low, high in window.padding)
    return (*x[:2], *left), replace(window, padding=padding)


def _without_unread(x: Array, window: Placement) -> tuple[Array, Placement]:
    return padded(x, [(min(0, low), min(0, high)) for low, high in window.padding]), _cut(x.shape, window)[1]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _forward(x: Parts, weight: Array, window: Placement, groups: int, apart: Apart) -> Array:
    shape = apart.whole(x[0].shape)
    y = (shape[0], weight.shape[0], *window.outputs(shape[2:], weight.shape[2:]))
    call = Call("forward", shape, weight.shape, y, window, groups, apart)
    if (needed := memory(call)) is None:
        return conv_plain.forward(joined(x, apart), weight, window, groups)
    return _run(call, (weight, *x), (y,), needed)[0]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _input_gradient(weight: Array, dy: Array, x: Shape, window: Placement, groups: int, apart: Apart) -> Parts:
    call = Call("input_gradient", x, weight.shape, dy.shape, window, groups, apart)
    if (needed := memory(call)) is None:
        gradient = conv_plain.input_gradient(jnp.zeros(x, dy.dtype), weight, dy, window, groups)
        return taken_apart(gradient, apart)
    return _run(call, (weight, dy), apart.parts(x), needed)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _weight_gradient(x: Parts, dy: Array, weight: Shape, window: Placement, groups: int, apart: Apart) -> Array:
    call = Call("weight_gradient", apart.whole(x[0].shape), weight, dy.shape, window, groups, apart)
    if (needed := memory(call)) is None:
        return conv_plain.weight_gradient(joined(x, apart), jnp.zeros(weight, dy.dtype), dy, window, groups)
    return _run(call, (dy, *x), (weight,), needed)[0]


def _forward_backward(
    window: Placement, groups: int, apart: Apart, operands: tuple[Parts, Array], dy: Array
) -> tuple[Parts, Array]:
    x, weight = operands
    of_x = _input_gradient(weight, dy, apart.whole(x[0].shape), window, groups, apart)
    return of_x, _weight_gradient(x, dy, weight.shape, window, groups, apart)


def _input_gradient_backward(
    _: Shape, window: Placement, groups: int, apart: Apart, operands: tuple[Array, Array], x: Parts
) -> tuple[Array, Array]:
    weight, dy = operands
    of_weight = _weight_gradient(x, dy, weight.shape, window, groups, apart)
    return of_weight, _forward(x, weight, window, groups, apart)


def _weight_gradient_backward(
    _: Shape, window: Placement, groups: int, apart: Apart, operands: tuple[Parts, Array], weight: Array
) -> tuple[Parts, Array]:
    x, dy = operands
    of_x = _input_gradient(weight, dy, apart.whole(x[0].shape), window, groups, apart)
    return of_x, _forward(x, weight, window, groups, apart)


_forward.defvjp(lambda *arguments: (_forward(*arguments), arguments[:2]), _forward_backward)
_input_gradient.defvjp(lambda *arguments: (_input_gradient(*arguments), arguments[:2]), _input_gradient_backward)
_weight_gradient.defvjp(lambda *arguments: (_weight_gradient(*arguments), arguments[:2]), _weight_gradient_backward)
