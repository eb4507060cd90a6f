"""The product that one worker of a distributed transposed convolution computes."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.nn.local.layout import between_layers
from distdl_jax.plans.decomposition import Range
from distdl_jax.primitives.tie import tie


@dataclass(frozen=True)
class LocalTransposedConvolution:
    """A transposed convolution of this worker's copy of x, as fetched, with its block of the weight.

    - `weight_shape`: that of the block, c_in x c_out/groups x kernel.
    - `channels`: which channels of the copy it reads; `groups`: the number of groups that they form.
    - `stride`, `dilation`: of the convolution whose adjoint it is.
    - `inputs`: per feature dimension, the range of inputs that the copy holds; `outputs`: the range that is computed.
    - `low`: the padding in front, per feature dimension.
    - `adds_bias`: whether the bias is added here; of the workers whose products are summed, one adds it.
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
            y = lax.conv_general_dilated(
                own,
                self._turned(weight),
                (1,) * len(self.stride),
                self._padding(),
                lhs_dilation=self.stride,
                rhs_dilation=self.dilation,
                feature_group_count=self.groups,
            )
        return between_layers(y if bias is None else y + bias.reshape(-1, *(1,) * len(self.outputs)))

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
