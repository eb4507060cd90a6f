"""Reshaping in the order of the whole tensor: to any shape, to a flat one, and back."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import owned_grid
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.functional.reshape import ReshapePlan, checked_shape, plan_reshape
from distdl_jax.nn.base.layer import ParameterFreeLayer
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.validation import checked_integers


class _Reshaping(ParameterFreeLayer):
    """The base of layers that move x's blocks to the balanced blocks of an output of another shape."""

    P_x: Partition
    P_y: Partition

    def _plan(self, x: ShapeDtypes, params: object) -> ReshapePlan:
        return plan_reshape(x, self.P_x, self.P_y, self._shape_from(owned_grid("x", self.P_x, x).extent))

    def _formula(self, params: object, x: Array) -> Array:
        return x.reshape(self._shape_from(x.shape))

    @abstractmethod
    def _shape_from(self, extent: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the output, from the shape of x."""


@dataclass(frozen=True, init=False)
class Reshape(_Reshaping):
    """A tensor on P_x reshaped on P_y, in row-major order: `x.reshape(shape)` of the whole tensor.

    One movement brings every worker of P_y its balanced block, whatever the partitions.

    **Arguments:**

    - `P_x`: the partition of x, with as many dimensions; blocks may have any length.
    - `P_y`: the partition of the output.
    - `shape`: of the output, a length for each dimension of P_y, the batch included; one may be -1, to be computed.

    **Raises:** `InvalidArgumentError`, on every worker, if `shape` doesn't fit P_y; `PlanError` if x doesn't.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0])
    >>> P_x, P_y = (P.grid(shape) for shape in ([1, 1], [1, 1, 1]))
    >>> Reshape(P_x, P_y, (-1, 2, 5))(jnp.ones((3, 20))).shape
    (6, 2, 5)
    """

    P_x: Partition
    P_y: Partition
    shape: tuple[int, ...]

    def __init__(self, P_x: Partition, P_y: Partition, shape: int | Sequence[int]) -> None:
        check_partitions(P_x=P_x, P_y=P_y)
        self._store(P_x=P_x, P_y=P_y, shape=checked_shape(shape, P_y))

    def _shape_from(self, extent: tuple[int, ...]) -> tuple[int, ...]:
        return self.shape


@dataclass(frozen=True, init=False)
class Flatten(_Reshaping):
    """Reshape N x C x features on P_x to N x F on P_y, F = C times the features, in the order of the whole tensor.

    **Arguments:**

    - `P_x`: the partition of x, with as many dimensions, 2 or more; any may be split, and blocks may have any length.
    - `P_y`: the partition of the output, P_n x P_f. Default: all of P_x, with its dimensions after the first merged.

    **Raises:** `InvalidArgumentError`, on every worker, if partitions don't fit; `PlanError` if x doesn't.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> Flatten(P)(jnp.ones((2, 3, 4))).shape
    (2, 12)
    """

    P_x: Partition
    P_y: Partition

    def __init__(self, P_x: Partition, P_y: Partition | None = None) -> None:
        check_partitions(P_x=P_x, **({} if P_y is None else {"P_y": P_y}))
        if P_x.dim < 2:
            raise InvalidArgumentError(f"`P_x` ({shape_text(P_x.shape)}) must have 2 dimensions or more.")
        if P_y is not None and P_y.dim != 2:
            raise InvalidArgumentError(f"`P_y` ({shape_text(P_y.shape)}) must have 2 dimensions: batch, and features.")
        if P_y is None:
            P_y = P_x.create_cartesian_topology_partition((P_x.shape[0], math.prod(P_x.shape[1:])))
        self._store(P_x=P_x, P_y=P_y)

    def _shape_from(self, extent: tuple[int, ...]) -> tuple[int, ...]:
        return extent[0], math.prod(extent[1:])


@dataclass(frozen=True, init=False)
class Unflatten(_Reshaping):
    """Reshape N x F on P_x to N x C x features on P_y, in the order of the whole tensor: the inverse of `Flatten`.

    **Arguments:**

    - `P_x`: the partition of x, P_n x P_f.
    - `P_y`: the partition of the output, with as many dimensions, 2 or more.
    - `shape`: C and the features of the whole tensor; F is their product.

    **Raises:** `InvalidArgumentError`, on every worker, if arguments are invalid; `PlanError` if x doesn't fit.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4)
    >>> layer = Unflatten(P.grid([1, 4]), P.grid([1, 1, 2, 2]), (3, 5, 4))
    >>> layer.output_spec(dj.TensorSpec((2, 60), P.grid([1, 4]))).block_shapes
    {0: (2, 3, 3, 2), 1: (2, 3, 3, 2), 2: (2, 3, 2, 2), 3: (2, 3, 2, 2)}
    """

    P_x: Partition
    P_y: Partition
    shape: tuple[int, ...]

    def __init__(self, P_x: Partition, P_y: Partition, shape: Sequence[int]) -> None:
        check_partitions(P_x=P_x, P_y=P_y)
        lengths = checked_integers("shape", shape)
        if P_x.dim != 2:
            raise InvalidArgumentError(f"`P_x` ({shape_text(P_x.shape)}) must have 2 dimensions: batch, and features.")
        if P_y.dim != len(lengths) + 1 or not lengths or min(lengths) < 1:
            raise InvalidArgumentError(
                f"`shape` (={tuple(shape)}) must be channels and features, each 1 or more, one for each dimension of "
                f"`P_y` ({shape_text(P_y.shape)}) after the batch."
            )
        self._store(P_x=P_x, P_y=P_y, shape=lengths)

    def _shape_from(self, extent: tuple[int, ...]) -> tuple[int, ...]:
        if extent[1] != math.prod(self.shape):
            raise PlanError(
                f"`x` (of shape {extent}) must have {math.prod(self.shape)} features, {shape_text(self.shape)}."
            )
        return extent[0], *self.shape
