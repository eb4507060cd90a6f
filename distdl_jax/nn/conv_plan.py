"""The plan of a convolution, which is run without joining the neighbours' rows to a worker's block where that pays.

To join them is a copy of the block. oneDNN copies it anyway, into the order in which it computes, and takes both as
they are. So where it computes, block and rows are handed on apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax import Array

from distdl_jax.backends.base import World
from distdl_jax.nn.local.apart import Apart
from distdl_jax.nn.local.conv import LocalConvolution
from distdl_jax.nn.parameters import Params
from distdl_jax.nn.product import ProductPlan
from distdl_jax.nn.rows_around import rows_around
from distdl_jax.nn.windows import WindowsPlan
from distdl_jax.primitives.plan import Unmoved


@dataclass(frozen=True)
class ConvolutionApart:
    """`whole`, of a block and the rows around it."""

    whole: LocalConvolution
    apart: Apart

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.whole.weight_shape

    @property
    def adds_bias(self) -> bool:
        return self.whole.adds_bias

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        return self.whole.output(x)

    def __call__(self, x: tuple[Array, Array], weight: Array, bias: Array | None) -> Array:
        return self.whole.of_parts(x, self.apart, weight, bias)


@dataclass(frozen=True)
class ConvolutionPlan(ProductPlan):
    """The plan of a convolution."""

    def run(self, world: World, params: Params, x: Array) -> Array:
        if self._apart is None:
            return super().run(world, params, x)
        return self._apart.run(world, params, x)

    @cached_property
    def _apart(self) -> ProductPlan | None:
        """The plan that joins nothing; None where there is none, or it would not be faster."""
        fetch = self.fetch
        if not (
            isinstance(fetch, WindowsPlan)
            and isinstance(self.to_work, Unmoved)
            and set(self.local) == set(self.products)
        ):
            return None
        wholes = {worker: its for worker, its in self.local.items() if isinstance(its, LocalConvolution)}
        if fetch.spec.mode != "zeros" or len(wholes) < len(self.local):
            return None
        if not all(self._takes_parts(worker, its) for worker, its in wholes.items()):
            return None
        rows = rows_around(fetch.movement)
        if rows is None:
            return None
        apart = {worker: ConvolutionApart(its, rows.apart(worker)) for worker, its in wholes.items()}
        return ProductPlan(self.to_work, self.of_params, self.products, self.to_y, apart, rows)

    def _takes_parts(self, worker: int, local: LocalConvolution) -> bool:
        """Whether what `worker` computes is something for oneDNN."""
        x, y = self.to_work.output(worker), self.products[worker]
        return (
            local.forms.count("onednn") > 1  # others join what they read
            and local.channels == (0, x.shape[1])
            and min(map(min, local.padding)) >= 0
            and y.dtype == np.dtype("float32")
            and 0 not in (*x.shape, *y.shape)
        )
