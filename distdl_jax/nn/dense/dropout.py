"""Dropout whose noise does not depend on the partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, outside, owned_grid
from distdl_jax.functional.plan import Plan, ShapeDtypes, Unmoved
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.input_checks import check_probability, checked_key
from distdl_jax.nn.base.layer import ParameterFreeLayer
from distdl_jax.partitions.initialization import initialize_block
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.random import standard_uniform


@dataclass(frozen=True)
class Dropout(ParameterFreeLayer):
    """Set elements to 0 with probability p in training, and divide the others by 1 - p; in evaluation, do nothing.

    For a given key, the same elements are dropped whatever the partition: those of `jax.random.bernoulli(key, 1 - p,
    shape)` for the shape of the whole tensor. Each worker generates its own block's numbers, without communication.

    **Arguments:**

    - `P_x`: the partition of x, with as many dimensions; blocks may be uneven and empty.
    - `p`: the probability, from 0 to below 1.
    - `channels`: whether whole channels of a sample are dropped (N x C x features), as by PyTorch's Dropout1d, 2d, 3d.

    Call it as `layer(x, key=key, training=True)`, with the same key on every worker, and another one at each step.
    `nn.Sequential` splits its key among its layers.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid, or there is no
    key in training; `PlanError`, on every worker of P_x, if x holds integers.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> float(Dropout(P, 0.5)(jax.numpy.ones((40, 50)), key=jax.random.key(0)).max())
    2.0

    Source: Srivastava et al. (2014).
    """

    P_x: Partition
    p: float = 0.5
    channels: bool = False

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)
        check_probability("p", self.p)
        if self.channels and self.P_x.dim < 2:
            raise InvalidArgumentError("`channels` (=True) must be False if `P_x` has one dimension.")

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn in training."""
        return self.p > 0

    def _plan(self, x: ShapeDtypes, params: object) -> Plan:
        return Unmoved(x)

    @layer_call
    def __call__(self, *args: Any, key: Array | None = None, training: bool = True) -> Array:
        """Return this worker's output block from its input block: `layer(x, key=key)`, or with `{}` in front of x."""
        x = super().__call__(*args)
        key = checked_key(key, training, self.draws)
        if key is None or self.P_x.rank is None:
            return x
        with jax.named_scope("Dropout"):
            blocks, _ = self._agree_on_shapes({}, x)
            if not jnp.issubdtype(dtype := common_dtype("x", blocks, self.P_x.ranks), jnp.inexact):
                raise PlanError(f"`x` must hold floating-point numbers, but is {dtype}.")
            grid = owned_grid("x", self.P_x, blocks)
            shape, box = grid.extent, grid.box(self.P_x.rank)
            if self.channels:
                rest = len(shape) - 2
                shape, box = (*shape[:2], *(1,) * rest), (*box[:2], *((0, 1),) * rest)
            numbers = initialize_block(standard_uniform, key, shape, box, np.dtype(jnp.result_type(float)))
            scale = np.asarray(1 / (1 - self.p), x.dtype)
            return jnp.where(numbers < 1 - self.p, x * scale, jnp.zeros((), x.dtype))

    def _apply(self, x: Array) -> Array:
        return x if self.P_x.active else outside(self.P_x.world, x)
