"""The product that one worker of a convolution, or of a transposed one, computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.conv_transpose import transposed_convolution
from distdl_jax.kernels.convolution import convolution
from distdl_jax.kernels.convolution import scratch as scratch_of
from distdl_jax.kernels.geometry import between_layers
from distdl_jax.kernels.phases import TransposedProblem
from distdl_jax.kernels.problem import Problem
from distdl_jax.plans.decomposition import Range
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.work import Work
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

    @property
    def ordinary(self) -> Problem | None:
        """The ordinary convolution that is computed, if it is one, and not empty."""
        problem = self.problem.ordinary if isinstance(self.problem, TransposedProblem) else self.problem
        return None if problem is None or 0 in (*problem.x, *problem.weight, *problem.y) else problem

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the product."""
        return self.problem.y

    def work(self, x: ShapeDtype) -> Work:
        """Return what it takes; x is stored for the weight's gradient."""
        flops, size = self.problem.flops, x.dtype.itemsize
        arrays = math.prod(self.problem.x), math.prod(self.problem.weight), math.prod(self.problem.y)
        read, written = size * sum(arrays[:2]), size * arrays[2]
        work = Work("convolution", flops, flops, flops, read, written, shape=self.problem)
        scratch, of_x, of_params = (0, 0, 0) if self.ordinary is None else scratch_of(self.ordinary)
        return replace(work, saves_x=True, saved=0, scratch=scratch, scratch_x=of_x, scratch_params=of_params)

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
