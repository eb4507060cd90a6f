"""A split weight as a matrix: its dimensions as rows and columns, and sums along them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.all_sum_reduce import all_sum_reduce
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import checked_integers


@dataclass(frozen=True)
class SplitWeight:
    """The weight of `spec`, whose dimensions `rows` are those of the rows of a matrix."""

    spec: TensorSpec
    rows: tuple[int, ...]

    @property
    def columns(self) -> tuple[int, ...]:
        """The dimensions that are not those of rows."""
        return tuple(d for d in range(len(self.spec.global_shape)) if d not in self.rows)

    def axes(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions of the partition that cut dimensions of the weight."""
        cut = [axis for axis in range(self.spec.partition.dim) if axis not in self.spec.replicated]
        return tuple(cut[d] for d in dims) if cut else ()

    def spec_along(self, dims: Sequence[int]) -> TensorSpec:
        """Return the spec of a tensor with these dimensions of the weight, of which its workers hold copies."""
        P, axes = self.spec.partition, self.axes(dims)
        shape = tuple(self.spec.global_shape[d] for d in dims)
        return TensorSpec(shape, P, tuple(axis for axis in range(P.dim) if axis not in axes) if axes else True)

    def sums(self, x: Array, dims: Sequence[int]) -> Array:
        """Return the sums along dimensions of x, a block of the weight's shape, over its workers; without these."""
        return self.sums_over_workers(tie(jnp.sum(x, tuple(dims)), x), dims)

    def sums_over_workers(self, x: Array, dims: Sequence[int]) -> Array:
        """Return the sum of x over the workers along dimensions of the weight."""
        axes = self.axes(dims)
        return all_sum_reduce(x, self.spec.partition, axes_reduce=axes) if axes else x

    def spread(self, x: Array, dims: Sequence[int]) -> Array:
        """Return a tensor with these dimensions of the weight in a shape that broadcasts with its block."""
        lengths = dict(zip(dims, x.shape, strict=True))
        return x.reshape([lengths.get(d, 1) for d in range(len(self.spec.global_shape))])


def split_weight(specs: Any, name: Any, dim: Any) -> SplitWeight:
    """Return the weight `name` of parameters of `specs`, with rows along `dim`: a dimension, several, or None.

    **Raises:** `InvalidArgumentError` where there is no such weight, or no such dimension.
    """
    entries = specs.items() if isinstance(specs, Mapping) else ()
    names = sorted(each for each, spec in entries if isinstance(spec, TensorSpec))
    if name not in names:
        raise InvalidArgumentError(
            f"`name` (={name!r}) must be one of the layer's parameters, {', '.join(map(repr, names)) or 'none'}."
        )
    spec: TensorSpec = specs[name]
    dims = len(spec.global_shape)
    given = () if dim is None else checked_integers("dim", dim, or_one=True)
    rows = tuple(sorted({d % dims for d in given if -dims <= d < dims}))
    if len(rows) != len(given):
        raise InvalidArgumentError(
            f"`dim` (={dim!r}) must name dimensions of {name!r}, 0 to {dims - 1}, each at most once."
        )
    return SplitWeight(spec, rows)
