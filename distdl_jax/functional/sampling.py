"""The plan of operations that resample, pad or crop: the inputs that each output reads, dimension by dimension.

An output at index o is a weighted sum of inputs, dimension by dimension: y[o] = sum_k w_k[o] x[i_k[o]]. Each worker
fetches the range of inputs that its balanced block of outputs reads, and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import PlanError
from distdl_jax.functional.block_checks import owned_grid
from distdl_jax.functional.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.functional.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.kernels.dtypes import accumulation_dtype, in_own_width
from distdl_jax.kernels.geometry import between_layers
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.decomposition import Range, balanced_range
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import Workers, World

MOST_TAPS = 4
"""The largest number of inputs of an output that are added one by one; more are gathered together."""

MOST_UNEVEN = 4
"""How much longer the adjoint of a gather may become because of the most frequently read input."""

MOST_STRETCHES = 8
"""The largest number of slices to join for outputs."""


@dataclass(frozen=True, eq=False)
class Taps:
    """The inputs of each output along one dimension, and their weights, both taps x outputs.

    If `periodic`, inputs below 0 or beyond the length wrap around.
    """

    inputs: np.ndarray
    weights: np.ndarray
    periodic: bool = False

    @property
    def outputs(self) -> int:
        return self.inputs.shape[1]

    def block(self, p: int, i: int) -> Taps:
        """Return the taps of the balanced block of outputs of worker `i` of `p`."""
        own = slice(*balanced_range(self.outputs, p, i))
        return Taps(self.inputs[:, own], self.weights[:, own], self.periodic)

    def needed(self, size: int) -> Range:
        """Return the range of inputs, out of `size`, that are read."""
        if not self.inputs.size:
            return (0, 0)
        start, stop = int(self.inputs.min()), int(self.inputs.max()) + 1
        return (start, stop) if self.periodic else (min(max(start, 0), size), min(max(stop, 0), size))

    @cached_property
    def is_slice(self) -> bool:
        """Whether outputs equal a range of inputs."""
        steps = np.diff(self.inputs[0]) if len(self.inputs) == 1 else [0]
        return len(self.inputs) == 1 and bool(np.all(steps == 1)) and bool(np.all(self.weights == 1))

    @cached_property
    def is_selection(self) -> bool:
        """Whether each output equals an input."""
        return len(self.inputs) == 1 and not self.periodic and bool(np.all(self.weights == 1))

    @cached_property
    def window(self) -> int:
        """The number of inputs of an output, if these are adjacent windows of equal weights; otherwise 0."""
        k, m = self.inputs.shape
        follow = self.inputs[:1, :1] + np.arange(k)[:, None] + k * np.arange(m)[None, :]
        return k if m and np.all(self.inputs == follow) and np.all(self.weights == self.weights[0, 0]) else 0

    @cached_property
    def stretches(self) -> list[tuple[int, int, int]]:
        """Runs of outputs that read one input each: the first input (-1: nothing), the step, the number of outputs."""
        where = np.where(self.weights[0] != 0, self.inputs[0], -1)
        found: list[tuple[int, int, int]] = []
        for place in where.tolist():
            first, step, n = found[-1] if found else (0, 0, 0)
            reads = found and (first < 0) == (place < 0)
            if reads and n == 1 and abs(place - first) <= 1:
                found[-1] = (first, place - first, 2)
            elif reads and n > 1 and place == first + step * n:
                found[-1] = (first, step, n + 1)
            else:
                found.append((place, 0, 1))
        return found

    def apply(self, x: Array, d: int, start: int) -> Array:
        """Return the outputs along dimension `d`, from inputs that start at `start`."""
        places = self.inputs - start
        if self.is_slice:
            return lax.slice_in_dim(x, int(places[0, 0]), int(places[0, -1]) + 1, axis=d)
        if self.window and self.weights[0, 0]:
            inputs = lax.slice_in_dim(x, int(places[0, 0]), int(places[-1, -1]) + 1, axis=d)
            windows = inputs.reshape(*x.shape[:d], self.outputs, self.window, *x.shape[d + 1 :])
            return jnp.sum(windows, d + 1) * self.weights[0, 0].astype(x.dtype)
        ones = np.all((self.weights == 0) | (self.weights == 1))
        if len(places) == 1 and ones and not self.periodic and len(self.stretches) <= MOST_STRETCHES:
            return self._in_stretches(x, d, start)
        return between_layers(_applied(Taps(places, self.weights), x, d))

    def _in_stretches(self, x: Array, d: int, start: int) -> Array:
        """Join slices of the inputs, whose derivative is sums of slices, not an elementwise scatter."""
        parts: list[Array] = []
        ends, stretches = [0, 0], list(self.stretches)
        for side, place in enumerate((0, -1)):
            if len(stretches) > 1 and stretches[place][0] < 0:
                ends[side] = stretches.pop(place)[2]
        for place, step, n in stretches:
            shape = (*x.shape[:d], n, *x.shape[d + 1 :])
            if place < 0:
                parts.append(jnp.zeros(shape, x.dtype))
                continue
            first, last = sorted((place - start, place - start + step * (n - 1)))
            run = lax.slice_in_dim(x, first, last + 1, axis=d)
            parts.append(jnp.broadcast_to(run, shape) if step == 0 else lax.rev(run, (d,)) if step < 0 else run)
        inside = parts[0] if len(parts) == 1 else jnp.concatenate(parts, d)
        return lax.pad(inside, jnp.zeros((), x.dtype), [(*(ends if k == d else (0, 0)), 0) for k in range(x.ndim)])

    def is_even(self, size: int) -> bool:
        """Say whether the `size` inputs are read about equally often, so that the adjoint is not much longer."""
        read = np.clip(self.inputs[np.nonzero(self.weights)], 0, size - 1)
        return int(np.max(np.bincount(read, minlength=1))) * size <= MOST_UNEVEN * max(read.size, size)

    def adjoint(self, size: int) -> Taps:
        """Return the taps of the adjoint: for each of `size` inputs, the outputs whose cotangents it reads."""
        tap, output = np.nonzero(self.weights)
        inputs = np.clip(self.inputs[tap, output], 0, size - 1)
        order = np.argsort(inputs, kind="stable")
        tap, output, inputs = tap[order], output[order], inputs[order]
        turn = np.arange(inputs.size) - np.searchsorted(inputs, inputs)  # counts the readers of each input
        most = int(turn.max(initial=-1)) + 1
        outputs, weights = np.zeros((max(most, 1), size), int), np.zeros((max(most, 1), size))
        outputs[turn, inputs], weights[turn, inputs] = output, self.weights[tap, output]
        return Taps(outputs, weights)


def _applied(taps: Taps, x: Array, d: int) -> Array:
    """Return the outputs along dimension `d` of `x`. An input of weight 0 is not read, since 0 times infinity is NaN.

    A matrix product would combine all inputs with all outputs. Gradients are gathered, too, unless most outputs read
    few inputs: JAX's own would be an elementwise scatter, which takes ten times as long.
    """
    size = x.shape[d]
    if not taps.is_even(size):
        return _summed(taps, x, d)

    @jax.custom_vjp
    def gathered(x: Array) -> Array:
        return _summed(taps, x, d)

    gathered.defvjp(
        in_own_width(lambda x: (gathered(x), None)),
        in_own_width(lambda _, dy: (_applied(taps.adjoint(size), dy, d),)),
    )
    y: Array = gathered(x)
    return y


def _selected(own: Sequence[Taps | None], x: Array) -> Array:
    """Return outputs that equal inputs, by dimension. Cotangents are summed in float32, and rounded once."""

    @jax.custom_vjp
    def selected(x: Array) -> Array:
        y = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")  # as XLA might convert float16 to move it
        for d, taps in enumerate(own):
            y = y if taps is None else jnp.take(y, taps.inputs[0], axis=d, mode="clip")
        return between_layers(lax.bitcast_convert_type(y, x.dtype))

    def backward(_: None, dy: Array) -> tuple[Array]:
        for d, taps in reversed(list(enumerate(own))):
            dy = dy if taps is None else between_layers(_applied(taps.adjoint(x.shape[d]), dy, d))
        return (dy.astype(x.dtype),)

    selected.defvjp(in_own_width(lambda x: (selected(x), None)), in_own_width(backward))
    y: Array = selected(x)
    return y


def _summed(taps: Taps, x: Array, d: int) -> Array:
    if len(taps.inputs) > MOST_TAPS:
        return jnp.sum(_taken(x, taps.inputs.T, taps.weights.T, d), d + 1)
    return reduce(jnp.add, (_taken(x, *tap, d) for tap in zip(taps.inputs, taps.weights, strict=True)))


def _taken(x: Array, places: np.ndarray, weights: np.ndarray, d: int) -> Array:
    """Return the inputs at `places` along dimension `d`, times their weights."""
    taken = jnp.take(x, places, axis=d, mode="clip")
    taken = taken.astype(accumulation_dtype(np.dtype(x.dtype)))
    along = (*weights.shape, *(1,) * (x.ndim - d - 1))
    if not np.all(weights):
        taken = jnp.where((weights != 0).reshape(along), taken, 0)
    return taken if np.all((weights == 0) | (weights == 1)) else taken * weights.astype(x.dtype).reshape(along)


@dataclass(frozen=True)
class SamplingPlan(Plan):
    """The plan of an operation whose outputs are sums of inputs along each dimension.

    - `fetch`: the movement of the inputs that each worker's outputs read.
    - `taps`: by dimension, the taps of all outputs along it; None if outputs equal inputs.
    - `dtype`: of the output.
    - `fill`: the value of outputs that read nothing.
    """

    fetch: RangesPlan
    taps: Sequence[Taps | None] = field(hash=False, compare=False)
    dtype: np.dtype
    fill: float = 0.0

    @property
    def workers(self) -> Workers:
        return self.fetch.workers

    def block(self, worker: int) -> list[Taps | None]:
        """Return the taps of the outputs of `worker`, by dimension."""
        owned = self.fetch.halos.owned
        index = owned.index(owned.cell_of[worker])
        along = zip(self.taps, owned.shape, index, strict=True)
        return [None if taps is None else taps.block(p, i) for taps, p, i in along]

    def output(self, worker: int) -> ShapeDtype:
        owned = self.fetch.halos.owned
        box = owned.box(owned.cell_of[worker])
        lengths = [stop - start for start, stop in box]
        shape = (n if taps is None else taps.outputs for n, taps in zip(lengths, self.block(worker), strict=True))
        return ShapeDtype(tuple(shape), self.dtype)

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block of the outputs; `x` on other workers."""
        if world.rank not in self.fetch.inputs:
            return x
        block, output = self.fetch.run(world, x), self.output(world.rank)
        if output.size == 0 or block.size == 0:
            return tie(jnp.zeros(output.shape, output.dtype), block)
        halos = self.fetch.halos
        index = halos.owned.index(halos.owned.cell_of[world.rank])
        own = self.block(world.rank)
        # Rows that are only chosen need no arithmetic: half precision is copied as it is, where a sum would be widened.
        if accumulation_dtype(self.dtype) != block.dtype == self.dtype and all(
            taps is None or taps.is_selection for taps in own
        ):
            starts = [halos.needed[d][i][0] for d, i in enumerate(index)]
            along = zip(own, starts, strict=True)
            return _selected([taps and Taps(taps.inputs - start, taps.weights) for taps, start in along], block)
        y = (
            block
            if all(taps is None or taps.is_slice for taps in own)
            else block.astype(accumulation_dtype(self.dtype))
        )
        for d, taps in enumerate(own):
            # One dimension after another: the weights are products, so a contraction for each costs the least.
            if taps is not None:
                y = taps.apply(y, d, halos.needed[d][index[d]][0])
                if self.fill:
                    reads = np.any(taps.weights, axis=0).reshape(-1, *(1,) * (y.ndim - d - 1))
                    y = jnp.where(reads, y, np.asarray(self.fill).astype(y.dtype))
        return y.astype(output.dtype)


def plan_sampling(
    x: ShapeDtypes, P_x: Partition, taps: Sequence[Taps | None], dtype: np.dtype | None = None, fill: float = 0.0
) -> SamplingPlan:
    """Plan the outputs that read the inputs `taps` along each dimension of a tensor on P_x; None for the inputs.

    `dtype` is the output's (default: x's), and `fill` the value of outputs that read nothing.

    **Raises:** `PlanError` if the blocks don't form a grid, or outputs read along a dimension of length 0.
    """
    x = taking_part(x, P_x.ranks)
    owned = owned_grid("x", P_x, x)
    needed = []
    for d, along_d in enumerate(taps):
        if along_d is None:
            needed.append(owned.ranges[d])
            continue
        p, size = P_x.shape[d], owned.extent[d]
        if size == 0 and along_d.outputs:
            raise PlanError(
                f"`x` (of shape {owned.extent}) must have at least one element along dimension {d} to read."
            )
        needed.append(tuple(along_d.block(p, i).needed(size) for i in range(p)))
    periodic = tuple(each is not None and each.periodic for each in taps)
    fetch = plan_ranges("sampling", x, P_x, Halos(owned, tuple(needed), periodic))
    return SamplingPlan(fetch, taps, dtype or fetch.dtype, fill)
