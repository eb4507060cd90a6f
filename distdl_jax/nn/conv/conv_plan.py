"""The product that one worker of a convolution, or of a transposed one, computes."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.nn.kernels.conv_transpose import transposed_convolution
from distdl_jax.nn.kernels.convolution import convolution
from distdl_jax.nn.kernels.geometry import between_layers
from distdl_jax.nn.kernels.phases import TransposedProblem
from distdl_jax.nn.kernels.problem import Problem
from distdl_jax.plans.decomposition import Range
from distdl_jax.tracing.tie import tie


@dataclass(frozen=True)
class LocalConvolution:
    """A convolution, or a transposed one, of one worker's copy of x with its block of the weight.

    - `problem`: what is computed, of the channels that are read.
    - `channels`: which channels of the copy these are.
    - `adds_bias`: whether the bias is added here; of the workers whose products are summed, one adds it.
    """

    problem: Problem | TransposedProblem
    channels: Range
    adds_bias: bool

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the block of the weight."""
        return self.problem.weight

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the product."""
        return self.problem.y

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """Return the product of x and weight, which have one dtype; depends on both even where it is empty."""
        y = self._product(x, weight)
        return between_layers(y if bias is None else y + bias.reshape(-1, *(1,) * (y.ndim - 2)))

    def _product(self, x: Array, weight: Array) -> Array:
        if self.problem.is_empty:
            return tie(jnp.zeros(self.problem.y, x.dtype), x, weight)
        start, stop = self.channels
        x = between_layers(x if stop - start == x.shape[1] else lax.slice_in_dim(x, start, stop, axis=1))
        if isinstance(self.problem, TransposedProblem):
            return transposed_convolution(self.problem, x, weight)
        return convolution(self.problem, x, weight)
