"""The product that one worker of a distributed convolution computes."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.nn.local.conv_cpu import convolution
from distdl_jax.nn.local.layout import between_layers
from distdl_jax.plans.decomposition import Range
from distdl_jax.plans.windows import Pairs, WindowSpec
from distdl_jax.primitives.tie import tie


@dataclass(frozen=True)
class LocalConvolution:
    """A convolution of this worker's copy of x, as exchanged, with its block of the weight.

    - `weight_shape`: that of the block, c_out x c_in/groups x kernel.
    - `channels`: which channels of the copy it reads.
    - `groups`: the number of groups that these channels form.
    - `windows`: kernel, stride and dilation.
    - `padding`: the zeros (low, high) to put around the copy, per feature dimension.
    - `outputs`: the number of outputs along each feature dimension; may be 0.
    - `adds_bias`: whether the bias is added here; of the workers whose products are summed, one adds it.
    """

    weight_shape: tuple[int, ...]
    channels: Range
    groups: int
    windows: WindowSpec
    padding: Pairs
    outputs: tuple[int, ...]
    adds_bias: bool

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the product, from that of the copy of x."""
        return x[0], self.weight_shape[0], *self.outputs

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """The product of x and weight, which have one dtype; depends on both even where it is empty."""
        start, stop = self.channels
        shape = self.output(x.shape)
        if 0 in (*shape, *self.weight_shape, stop - start):
            y = tie(jnp.zeros(shape, x.dtype), x, weight)
        else:
            own = x if stop - start == x.shape[1] else lax.slice_in_dim(x, start, stop, axis=1)
            windows = self.windows
            y = convolution(own, weight, windows.stride, self.padding, windows.dilation, self.groups)
        return between_layers(y if bias is None else y + bias.reshape(-1, *(1,) * len(self.outputs)))
