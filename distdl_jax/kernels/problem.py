"""A convolution that one worker computes, as a value, and the names of the algorithms that compute it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, get_args

import jax
from jax import Array

from distdl_jax.kernels.geometry import Placement, between_layers
from distdl_jax.settings import current_settings

Direction = Literal["forward", "input_gradient", "weight_gradient"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

Shape = tuple[int, ...]
Parts = tuple[Array, ...]
"""The input of a convolution: one array, or a block and the entries around it."""


class Algorithms(NamedTuple):
    """The name of one algorithm for each direction."""

    forward: str = "plain"
    input_gradient: str = "plain"
    weight_gradient: str = "plain"


PLAIN = Algorithms()

MANY_SAMPLES = 17
"""From so many samples on, XLA and the rewritten algorithm take another way to the weight's gradient."""

FEWEST_ROWS = 8
"""So many rows of results, at least, are measured in place of more."""


class SplitInput(Protocol):
    """How an input lies in several arrays: a block, and for each side one array of the entries there.

    It must be hashable.
    """

    @property
    def sides(self) -> tuple[tuple[int, int, int], ...]:
        """For each side its axis, and how many entries it has before the block and after it."""

    def joined_shape(self, block: Shape) -> Shape:
        """Return the shape of the whole input, from the block's."""

    def shapes(self, joined: Shape) -> tuple[Shape, ...]:
        """Return the shapes of the parts, from the shape of the whole input."""

    def join(self, parts: Parts) -> Array:
        """Return the whole input."""

    def split(self, x: Array) -> Parts:
        """Return the parts of the whole input `x`."""


@dataclass(frozen=True)
class Problem:
    """One worker's convolution.

    - `x`, `weight`: the shapes, N x C x features and c_out x C/groups x kernel.
    - `split_input`: how x lies in several arrays; None where it is one array.
    """

    x: Shape
    weight: Shape
    window: Placement
    groups: int
    dtype: str
    split_input: SplitInput | None = None

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
    def multiplications(self) -> int:
        """How many numbers are multiplied."""
        return math.prod(self.y) * math.prod(self.weight[1:])

    @property
    def flops(self) -> int:
        """Multiplications and additions of one direction, without those with padding."""
        if self.is_empty:
            return 0
        pairs = self.window.pairs(self.x[2:], self.weight[2:])
        return 2 * self.x[0] * math.prod(self.weight[:2]) * pairs

    @property
    def has_choice(self) -> bool:
        """Whether there are several algorithms: on CPUs, in single and double precision."""
        fast = current_settings().fast_convolutions and jax.default_backend() == "cpu"
        return fast and self.dtype in ("float32", "float64") and 0 not in (*self.x, *self.weight, *self.y)

    @property
    def part_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the parts of x."""
        return (self.x,) if self.split_input is None else self.split_input.shapes(self.x)

    def join(self, parts: Parts) -> Array:
        """Return x as one array."""
        return parts[0] if self.split_input is None else between_layers(self.split_input.join(parts))

    def split(self, x: Array) -> Parts:
        """Return the parts of `x`."""
        return (x,) if self.split_input is None else self.split_input.split(x)

    def smaller(self, multiplications: int) -> Problem:
        """Return a problem of the same kind with at most so many multiplications, as far as that can be.

        It has fewer samples, but not few in place of many. Then it has fewer rows, but not along the last dimension.
        """
        fewest = min(self.x[0], MANY_SAMPLES) if self.x[0] >= MANY_SAMPLES else 1
        samples = min(self.x[0], max(fewest, self.x[0] * multiplications // max(self.multiplications, 1)))
        fewer = replace(self, x=(samples, *self.x[1:]))
        if len(self.x) == 3 or fewer.multiplications <= multiplications:
            return fewer
        least = self.window.reach(self.weight[2:])[0] + FEWEST_ROWS * self.window.stride[0]
        rows = min(self.x[2], max(least, self.x[2] * multiplications // fewer.multiplications))
        return replace(fewer, x=(*fewer.x[:2], rows, *self.x[3:]))
