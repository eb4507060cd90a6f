"""The product that one worker of a distributed transposed convolution computes.

With stride s, the outputs whose place is p modulo s read the taps p, p + s, ... of the kernel alone. So a transposed
convolution is an ordinary one with s times the channels and an s-th of the taps in each dimension, whose channels are
then put next to each other: no products with the zeros between the inputs, and all forms that convolutions have.

Source: Shi et al. (2016), arXiv:1609.07009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.kernels.conv_algorithms import PLAIN, Forms, Problem, convolution
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.grouped_conv import conv
from distdl_jax.kernels.layout import between_layers
from distdl_jax.plans.decomposition import Range
from distdl_jax.tracing.tie import tie


@dataclass(frozen=True)
class LocalTransposedConvolution:
    """A transposed convolution of this worker's copy of x, as fetched, with its block of the weight.

    - `weight_shape`: that of the block, c_in x c_out/groups x kernel.
    - `channels`: which channels of the copy it reads; `groups`: the number of groups that they form.
    - `stride`, `dilation`: of the convolution whose adjoint it is.
    - `inputs`: per feature dimension, the range of inputs that the copy holds; `outputs`: the range that is computed.
    - `low`: the padding in front, per feature dimension.
    - `adds_bias`: whether the bias is added here; of the workers whose products are summed, one adds it.
    - `forms`: how the ordinary convolution is computed.
    """

    weight_shape: tuple[int, ...]
    channels: Range
    groups: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    inputs: tuple[Range, ...]
    outputs: tuple[Range, ...]
    low: tuple[int, ...]
    adds_bias: bool
    forms: Forms = PLAIN

    @property
    def is_by_phases(self) -> bool:
        """Whether it is an ordinary convolution: where a dimension has a stride and a dilation, it is not."""
        return all(1 in pair for pair in zip(self.stride, self.dilation, strict=True))

    def problem(self, x: tuple[int, ...], dtype: np.dtype) -> Problem:
        """The ordinary convolution of a copy of x of this shape, without the bias."""
        channels = self.channels[1] - self.channels[0]
        c_in, c_out = self.weight_shape[:2]
        weight = (self.groups * c_out * math.prod(self.stride), c_in // self.groups, *self._taps)
        return Problem((x[0], channels, *x[2:]), weight, self._placement, self.groups, dtype.name)

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the product, from that of the copy of x."""
        return x[0], self.weight_shape[1] * self.groups, *(stop - start for start, stop in self.outputs)

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """The product of x and weight, which have one dtype; depends on both even where it is empty."""
        start, stop = self.channels
        shape = self.output(x.shape)
        if 0 in (*shape, *x.shape, *self.weight_shape, stop - start):
            y = tie(jnp.zeros(shape, x.dtype), x, weight)
        else:
            own = x if stop - start == x.shape[1] else lax.slice_in_dim(x, start, stop, axis=1)
            own = between_layers(own)
            y = self._by_phases(own, weight) if self.is_by_phases else self._with_zeros_between(own, weight)
        return between_layers(y if bias is None else y + bias.reshape(-1, *(1,) * len(self.outputs)))

    def _by_phases(self, x: Array, weight: Array) -> Array:
        c_in, c_out, *kernel = self.weight_shape
        dims = range(len(kernel))
        ends = [(0, taps * s - k) for taps, s, k in zip(self._taps, self.stride, kernel, strict=True)]
        # groups x c_in x c_out, and for each dimension its taps of a phase x phases
        split = (n for pair in zip(self._taps, self.stride, strict=True) for n in pair)
        weight = jnp.pad(weight, [(0, 0), (0, 0), *ends]).reshape(self.groups, c_in // self.groups, c_out, *split)
        weight = jnp.flip(weight, [3 + 2 * d for d in dims])
        weight = weight.transpose(0, 2, *(4 + 2 * d for d in dims), 1, *(3 + 2 * d for d in dims))
        weight = weight.reshape(-1, c_in // self.groups, *self._taps)
        y = convolution(x, weight, self._placement, self.groups, self.forms)
        places = y.shape[2:]
        y = y.reshape(len(x), self.groups * c_out, *self.stride, *places)
        y = y.transpose(0, 1, *(axis for d in dims for axis in (2 + len(kernel) + d, 2 + d)))
        y = y.reshape(len(x), self.groups * c_out, *(n * s for n, s in zip(places, self.stride, strict=True)))
        for d, ((start, stop), s, low) in enumerate(zip(self.outputs, self.stride, self.low, strict=True)):
            y = lax.slice_in_dim(y, (start + low) % s, (start + low) % s + stop - start, axis=2 + d)
        return y

    @property
    def _taps(self) -> tuple[int, ...]:
        """How many taps of the kernel one output reads, per feature dimension, at most."""
        return tuple(-(-k // s) for k, s in zip(self.weight_shape[2:], self.stride, strict=True))

    @property
    def _placement(self) -> Placement:
        """How the taps of a phase lie on the copy: output o is at place (o + low) // stride, and reads up to there."""
        padding = []
        along = zip(self._taps, self.stride, self.dilation, self.inputs, self.outputs, self.low, strict=True)
        for taps, s, d, (first, last), (start, stop), low in along:
            padding.append((first - (start + low) // s + d * (taps - 1), (stop - 1 + low) // s - (last - 1)))
        return Placement((1,) * len(self.stride), tuple(padding), self.dilation)

    def _with_zeros_between(self, x: Array, weight: Array) -> Array:
        return conv(
            x,
            self._turned(weight),
            (1,) * len(self.stride),
            self._padding(),
            x_dilation=self.stride,
            dilation=self.dilation,
            groups=self.groups,
        )

    def _turned(self, weight: Array) -> Array:
        """The weight as the convolution of the spread input has it: c_out x c_in/groups x kernel, back to front."""
        c_in, c_out, *kernel = self.weight_shape
        by_group = weight.reshape(self.groups, c_in // self.groups, c_out, *kernel)
        turned = jnp.swapaxes(by_group, 1, 2).reshape(self.groups * c_out, c_in // self.groups, *kernel)
        return jnp.flip(turned, axis=tuple(range(2, turned.ndim)))

    def _padding(self) -> list[tuple[int, int]]:
        """What is put around the input that is spread by the stride, or taken away from it where it is negative.

        Output o reads what lies from o + low - dilation * (kernel - 1) on, input i at i * stride.
        """
        pairs = []
        kernel = self.weight_shape[2:]
        along = zip(kernel, self.stride, self.dilation, self.inputs, self.outputs, self.low, strict=True)
        for k, s, d, (first, last), (start, stop), low in along:
            before = first * s - (start + low - d * (k - 1))
            length = (last - first - 1) * s + 1
            pairs.append((before, (stop - start) + d * (k - 1) - length - before))
        return pairs
