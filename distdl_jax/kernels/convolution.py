"""The product that one worker of a distributed convolution computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.kernels.conv_algorithms import PLAIN, Forms, Problem, convolution, convolution_apart
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.layout import between_layers
from distdl_jax.kernels.split_halo import Apart, Parts
from distdl_jax.plans.decomposition import Range
from distdl_jax.plans.windows import Pairs, WindowSpec
from distdl_jax.primitives.plan import ShapeDtypes
from distdl_jax.tracing.tie import tie


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
    - `forms`: how it is computed.
    - `apart`: where what is around this worker's block lies, if it can stay apart from it; None: joined to it.
    """

    weight_shape: tuple[int, ...]
    channels: Range
    groups: int
    windows: WindowSpec
    padding: Pairs
    outputs: tuple[int, ...]
    adds_bias: bool
    forms: Forms = PLAIN
    apart: Apart | None = None

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the product, from that of the copy of x."""
        return x[0], self.weight_shape[0], *self.outputs

    def problem(self, x: tuple[int, ...], dtype: np.dtype) -> Problem:
        """What is computed of a copy of x of this shape, without the bias."""
        channels = self.channels[1] - self.channels[0]
        whole = (x[0], channels, *x[2:])
        return Problem(whole, self.weight_shape, self._placement, self.groups, dtype.name, self.apart)

    @property
    def _placement(self) -> Placement:
        return Placement(self.windows.stride, self.padding, self.windows.dilation)

    def __call__(self, x: Array | Parts, weight: Array, bias: Array | None) -> Array:
        """The product of x and weight, which have one dtype; depends on both even where it is empty.

        `x` may be a block and what is around it, `apart`, all of whose channels it reads; its result is not empty then.
        """
        if isinstance(x, tuple):
            assert self.apart is not None
            y = convolution_apart(x, weight, self._placement, self.groups, self.forms, self.apart)
            return self._with_bias(y, bias)
        start, stop = self.channels
        shape = self.output(x.shape)
        if 0 in (*shape, *self.weight_shape, stop - start):
            y = tie(jnp.zeros(shape, x.dtype), x, weight)
        else:
            own = x if stop - start == x.shape[1] else lax.slice_in_dim(x, start, stop, axis=1)
            y = convolution(between_layers(own), weight, self._placement, self.groups, self.forms)
        return self._with_bias(y, bias)

    def _with_bias(self, y: Array, bias: Array | None) -> Array:
        return between_layers(y if bias is None else y + bias.reshape(-1, *(1,) * len(self.outputs)))


Choose = Callable[[Problem], Forms]


class HasForms(Protocol):
    """What a worker computes, as a dataclass with a field `forms`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def problem(self, x: tuple[int, ...], dtype: np.dtype) -> Problem:
        """What is computed of a copy of x of this shape, without the bias."""


Local = TypeVar("Local", bound=HasForms)


def in_equal_forms(
    local: Mapping[int, Local], copies: ShapeDtypes, products: ShapeDtypes, choose: Choose
) -> dict[int, Local]:
    """What all workers compute, in one choice of forms: that for the one which has most to compute.

    - `local`, `copies`, `products`: what each computes, of what copy of x, and what it has then.
    """
    problems = [its.problem(copies[worker].shape, products[worker].dtype) for worker, its in local.items()]
    problems = [problem for problem in problems if 0 not in (*problem.x, *problem.weight) and min(problem.y) > 0]
    if not problems:
        return dict(local)
    forms = choose(max(problems, key=lambda problem: problem.products))
    return {worker: replace(its, forms=forms) for worker, its in local.items()}
