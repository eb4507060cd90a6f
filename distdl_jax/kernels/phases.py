"""A transposed convolution as an ordinary one, by the phases of its outputs relative to the stride.

With stride s, the outputs at positions p modulo s read only the taps p, p + s, ... of the kernel. So it is an ordinary
convolution with s times the channels and 1/s of the taps in each dimension, whose channels are then interleaved: there
are no products with the zeros between the inputs.

Source: Shi et al. (2016), arXiv:1609.07009.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.geometry import Pairs, Placement
from distdl_jax.kernels.problem import Problem, Shape


@dataclass(frozen=True)
class TransposedProblem:
    """The adjoint of a convolution, from a range of its outputs to a range of its inputs.

    - `x`, `weight`: the shapes, N x C x features and C x c_out/groups x kernel.
    - `stride`, `dilation`: of the convolution whose adjoint it is.
    - `inputs`: per feature dimension, the range of x; `outputs`: the range to compute.
    - `low`: the padding at the low end, per feature dimension.
    """

    x: Shape
    weight: Shape
    groups: int
    dtype: str
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    inputs: Pairs
    outputs: Pairs
    low: tuple[int, ...]

    @classmethod
    def of_input_gradient(cls, problem: Problem) -> TransposedProblem:
        """Return the input's gradient of a convolution, as a computation on the result's cotangent."""
        inputs, outputs = (tuple((0, n) for n in shape[2:]) for shape in (problem.y, problem.x))
        window, lows = problem.window, tuple(low for low, _ in problem.window.padding)
        strides = window.stride, window.dilation
        return cls(problem.y, problem.weight, problem.groups, problem.dtype, *strides, inputs, outputs, lows)

    @property
    def y(self) -> Shape:
        """The shape of the result."""
        return self.x[0], self.weight[1] * self.groups, *(stop - start for start, stop in self.outputs)

    @property
    def is_empty(self) -> bool:
        """Whether the result has no entries, or is computed from none."""
        return 0 in (*self.y, *self.x, *self.weight)

    @property
    def flops(self) -> int:
        """Multiplications and additions in one direction, of the algorithm in use."""
        if self.is_empty:
            return 0
        if (ordinary := self.ordinary) is not None:
            return ordinary.flops
        taps = math.prod(self.weight[2:])
        return 2 * self.x[0] * self.weight[0] * self.weight[1] * math.prod(self.x[2:]) * taps

    @property
    def ordinary(self) -> Problem | None:
        """The equivalent ordinary convolution; None if a dimension has a stride and a dilation."""
        if not all(1 in pair for pair in zip(self.stride, self.dilation, strict=True)):
            return None
        c_in, c_out = self.weight[:2]
        weight = (self.groups * c_out * math.prod(self.stride), c_in // self.groups, *self.taps)
        # Output o is at position (o + low) // stride, and reads up to there.
        padding = []
        along = zip(self.taps, self.stride, self.dilation, self.inputs, self.outputs, self.low, strict=True)
        for taps, s, d, (first, last), (start, stop), low in along:
            padding.append((first - (start + low) // s + d * (taps - 1), (stop - 1 + low) // s - (last - 1)))
        placement = Placement((1,) * len(self.stride), tuple(padding), self.dilation)
        return Problem(self.x, weight, placement, self.groups, self.dtype)

    @property
    def taps(self) -> tuple[int, ...]:
        """The largest number of taps of the kernel that one output reads, per feature dimension."""
        return tuple(-(-k // s) for k, s in zip(self.weight[2:], self.stride, strict=True))


def by_phases(
    p: TransposedProblem,
    ordinary: Problem,
    x: Array,
    weight: Array,
    convolve: Callable[[Problem, Array, Array], Array],
) -> Array:
    """Return the transposed convolution `p`, by computing its `ordinary` one with `convolve`."""
    c_in, c_out, *kernel = p.weight
    dims = range(len(kernel))
    ends = [(0, taps * s - k) for taps, s, k in zip(p.taps, p.stride, kernel, strict=True)]
    # groups x c_in x c_out, and for each dimension its taps of a phase x phases
    split = (n for pair in zip(p.taps, p.stride, strict=True) for n in pair)
    weight = jnp.pad(weight, [(0, 0), (0, 0), *ends]).reshape(p.groups, c_in // p.groups, c_out, *split)
    weight = jnp.flip(weight, [3 + 2 * d for d in dims])
    weight = weight.transpose(0, 2, *(4 + 2 * d for d in dims), 1, *(3 + 2 * d for d in dims))
    y = convolve(ordinary, x, weight.reshape(ordinary.weight))
    places = y.shape[2:]
    y = y.reshape(len(x), p.groups * c_out, *p.stride, *places)
    y = y.transpose(0, 1, *(axis for d in dims for axis in (2 + len(kernel) + d, 2 + d)))
    y = y.reshape(len(x), p.groups * c_out, *(n * s for n, s in zip(places, p.stride, strict=True)))
    for d, ((start, stop), s, low) in enumerate(zip(p.outputs, p.stride, p.low, strict=True)):
        y = lax.slice_in_dim(y, (start + low) % s, (start + low) % s + stop - start, axis=2 + d)
    return y


def input_gradient(
    problem: Problem, weight: Array, dy: Array, convolve: Callable[[Problem, Array, Array], Array]
) -> Array:
    """Return the input's gradient of a convolution, the transposed convolution of `dy`, by ordinary ones.

    XLA's own, with zeros between the entries, takes far longer with a stride. For some small three-dimensional shapes
    jaxlib 0.12 crashes.
    """
    transposed = TransposedProblem.of_input_gradient(problem)
    if transposed.ordinary is not None:
        return by_phases(transposed, transposed.ordinary, dy, weight, convolve)
    # A stride and a dilation in one dimension: with zeros between the entries the stride is removed.
    spread = [(0, 0, stride - 1) for stride in problem.window.stride]
    dy = lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0)] * 2 + spread)
    window = replace(problem.window, stride=(1,) * problem.dims)
    window = replace(window, padding=window.padding_read(problem.x[2:], weight.shape[2:], dy.shape[2:]))
    return input_gradient(replace(problem, window=window), weight, dy, convolve)
