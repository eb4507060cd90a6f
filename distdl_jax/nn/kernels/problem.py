"""A convolution that one worker computes, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from distdl_jax.nn.kernels.geometry import Placement
from distdl_jax.settings import current_settings

Direction = Literal["forward", "input_gradient", "weight_gradient"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """One worker's convolution.

    - `x`, `weight`: the shapes, N x C x features and c_out x C/groups x kernel.
    """

    x: Shape
    weight: Shape
    window: Placement
    groups: int
    dtype: str

    @property
    def dims(self) -> int:
        """How many feature dimensions there are."""
        return len(self.x) - 2

    @property
    def y(self) -> Shape:
        """The shape of the result."""
        outputs = self.window.outputs(self.x[2:], self.weight[2:])
        return self.x[0], self.weight[0], *(max(n, 0) for n in outputs)

    @property
    def is_empty(self) -> bool:
        """Whether the result has no entries, or is of no channels or taps."""
        return 0 in (*self.y, *self.weight, self.x[1])

    @property
    def flops(self) -> int:
        """Multiplications and additions of one direction, without those with padding."""
        if self.is_empty:
            return 0
        pairs = self.window.pairs(self.x[2:], self.weight[2:])
        return 2 * self.x[0] * math.prod(self.weight[:2]) * pairs

    @property
    def has_choice(self) -> bool:
        """Whether there are several ways to compute it: on CPUs, unless it is empty or of integers."""
        fast = current_settings().fast_convolutions and jax.default_backend() == "cpu"
        return fast and jnp.issubdtype(self.dtype, jnp.inexact) and 0 not in (*self.x, *self.weight, *self.y)
