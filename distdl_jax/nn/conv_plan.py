"""The plan of a convolution, which is run without joining the neighbours' entries to a worker's block where it can be.

To join them is a copy of the block for each dimension. oneDNN copies it anyway, into the order in which it computes,
and takes all parts as they are. Other forms join them just before they read them, and no cotangent is written twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jax import Array

from distdl_jax.kernels.convolution import LocalConvolution
from distdl_jax.layer.matmul_plan import ProductPlan
from distdl_jax.layer.parameters import Params
from distdl_jax.layer.sliding_windows import WindowsPlan
from distdl_jax.layer.split_halo import halo_apart
from distdl_jax.primitives.plan import MovementPlan, ShapeDtypes, Unmoved
from distdl_jax.world import World


@dataclass(frozen=True)
class ConvolutionPlan(ProductPlan):
    """The plan of a convolution."""

    def run(self, world: World, params: Params, x: Array) -> Array:
        if self._apart is None:
            return super().run(world, params, x)
        return self._apart.run(world, params, x)

    @cached_property
    def _apart(self) -> ProductPlan | None:
        """The plan that joins nothing; None where there is none."""
        assert isinstance(self.fetch, WindowsPlan)
        if any(not isinstance(its, LocalConvolution) or its.apart is None for its in self.local.values()):
            return None
        fetch = halo_apart(self.fetch.movement)
        return ProductPlan(self.to_work, self.of_params, self.products, self.to_y, self.local, fetch)


def left_apart(
    local: Mapping[int, LocalConvolution], fetch: WindowsPlan, to_work: MovementPlan, products: ShapeDtypes
) -> Mapping[int, LocalConvolution]:
    """What all workers compute, and of what parts, where what is around their blocks can stay apart from these.

    - `products`: what each has then; the others as in `ProductPlan`.
    """
    is_filled = fetch.spec.mode not in ("zeros", "circular")
    if is_filled or not isinstance(to_work, Unmoved) or set(local) != set(products):
        return local
    if any(0 in held.shape for held in fetch.movement.inputs.values()):
        return local
    for worker, its in local.items():
        x, y = to_work.output(worker), products[worker]
        reads_all = its.channels == (0, x.shape[1]) and min(map(min, its.padding)) >= 0
        if not reads_all or 0 in (*x.shape, *y.shape):
            return local
    plan = halo_apart(fetch.movement)
    return local if plan is None else {worker: replace(its, apart=plan.apart(worker)) for worker, its in local.items()}
