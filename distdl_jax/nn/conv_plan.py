"""Plans of convolutions, transposed ones among them, and the product that one worker computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.conv_transpose import TransposedProblem, transposed_convolution
from distdl_jax.kernels.convolution import convolution
from distdl_jax.kernels.geometry import between_layers
from distdl_jax.kernels.problem import PLAIN, Algorithms, Parts, Problem
from distdl_jax.layer.matmul_plan import ProductPlan
from distdl_jax.layer.sliding_windows import WindowsPlan
from distdl_jax.layer.split_halo import SplitHaloPlan, plan_split_halo
from distdl_jax.plans.alike import derived, representatives, workers_of
from distdl_jax.plans.decomposition import Range
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.work import Work
from distdl_jax.primitives.plan import Action, MovementPlan, ShapeDtypes, Unmoved
from distdl_jax.tracing.tie import tie
from distdl_jax.world import World

Choose = Callable[[Problem], Algorithms]


@dataclass(frozen=True)
class LocalConvolution:
    """A convolution, or a transposed one, of one worker's copy of x with its block of the weight.

    - `problem`: what is computed, of the channels that are read.
    - `channels`: which channels of the copy these are.
    - `adds_bias`: whether the bias is added here; of the workers whose products are summed, one adds it.
    - `algorithms`: those of the convolution.
    """

    problem: Problem | TransposedProblem
    channels: Range
    adds_bias: bool
    algorithms: Algorithms = PLAIN

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
        scratch, of_x, of_params = (size * numbers for numbers in self._scratch)
        return replace(work, saves_x=True, saved=0, scratch=scratch, scratch_x=of_x, scratch_params=of_params)

    @property
    def _scratch(self) -> tuple[int, int, int]:
        """How many numbers the three directions take: arrays in the order in memory that XLA computes in.

        The rewritten algorithm writes padding around them. In three dimensions and more, it has as many copies of
        planes as the kernel is deep, for both gradients at one time.
        """
        problem = self.ordinary
        if problem is None:
            return 0, 0, 0
        x, y = math.prod(problem.x), math.prod(problem.y)
        if "rewritten" not in self.algorithms:
            return max(x, y), max(x, y), x + y
        if problem.dims > 2:
            copies = math.prod(problem.weight[2 : problem.dims])
            return copies * x + y, copies * y + max(x, y), copies * (x + y) + max(x, y) + 2 * y
        reach = problem.window.reach(problem.weight[2:])
        with_padding = [
            math.prod(of[:2]) * math.prod(n + more for n, more in zip(sizes, reach, strict=True))
            for of, sizes in ((problem.x, problem.y[2:]), (problem.y, problem.x[2:]))
        ]
        return max(with_padding[0], x, y), max(with_padding[1], x), x + y

    def __call__(self, x: Array | Parts, weight: Array, bias: Array | None) -> Array:
        """Return the product of x and weight, which have one dtype; depends on both even where it is empty."""
        y = self._product(x, weight)
        return between_layers(y if bias is None else y + bias.reshape(-1, *(1,) * (y.ndim - 2)))

    def _product(self, x: Array | Parts, weight: Array) -> Array:
        if isinstance(x, tuple):  # a block and its halo
            assert isinstance(self.problem, Problem)
            return convolution(self.problem, x, weight, self.algorithms)
        if self.problem.is_empty:
            return tie(jnp.zeros(self.problem.y, x.dtype), x, weight)
        start, stop = self.channels
        x = between_layers(x if stop - start == x.shape[1] else lax.slice_in_dim(x, start, stop, axis=1))
        if isinstance(self.problem, TransposedProblem):
            return transposed_convolution(self.problem, x, weight, self.algorithms)
        return convolution(self.problem, (x,), weight, self.algorithms)


@dataclass(frozen=True)
class ConvolutionPlan(ProductPlan):
    """The plan of a convolution.

    - `split_halo`: the exchange in place of `fetch` that keeps halos in buffers of their own, where all workers can.
    """

    split_halo: SplitHaloPlan | None = None

    def choose(self, choose: Choose) -> Algorithms | None:
        """Return the algorithms of all workers: those for the one that has most to compute; None if none has."""
        several = (self.local[worker] for worker in representatives(self.local))
        local = (each for each in several if isinstance(each, LocalConvolution))
        problems = [problem for each in local if (problem := each.ordinary) is not None]
        return choose(max(problems, key=lambda problem: problem.multiplications)) if problems else None

    def with_algorithms(self, algorithms: Algorithms | None) -> ConvolutionPlan:
        """Return this plan with all workers computing in these algorithms; None: in those that it has."""
        if algorithms is None:
            return self

        def with_them(worker: int) -> LocalConvolution:
            each = self.local[worker]
            assert isinstance(each, LocalConvolution)
            return replace(each, algorithms=algorithms)

        return replace(self, local=derived(with_them, self.local))

    @property
    def _fetching(self) -> tuple[Action, ...]:
        return super()._fetching if self.split_halo is None else self.split_halo.actions

    def _fetched(self, world: World, x: Array) -> Array | Parts:
        return super()._fetched(world, x) if self.split_halo is None else self.split_halo.run(world, x)


def with_split_halo(
    local: Mapping[int, LocalConvolution], fetch: WindowsPlan, to_work: MovementPlan, copies: ShapeDtypes
) -> tuple[Mapping[int, LocalConvolution], SplitHaloPlan | None]:
    """Plan the exchange that keeps halos in buffers of their own, and what workers compute then, where all can."""
    is_filled = fetch.spec.mode not in ("zeros", "circular")
    if is_filled or not isinstance(to_work, Unmoved) or workers_of(local) != workers_of(copies):
        return local, None
    split_halo = plan_split_halo(fetch.movement)
    for worker in representatives(derived(lambda _: None, local, fetch.movement.inputs, copies)):
        problem, block = local[worker].ordinary, fetch.movement.inputs[worker].shape
        if split_halo is None or problem is None or 0 in block or problem.x != copies[worker].shape:
            return local, None

    def with_halo(worker: int) -> LocalConvolution:
        problem = local[worker].problem
        assert isinstance(problem, Problem) and split_halo is not None
        return replace(local[worker], problem=replace(problem, split_input=split_halo.split_halo(worker)))

    return derived(with_halo, local), split_halo
