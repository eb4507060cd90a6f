"""What moves between the layouts of a value: sums, gathered blocks, neighbourhoods, and blocks cut in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.distribute.layouts import Cut, Mesh, axes_in, uncut
from distdl_jax.functional.all_gather import GatherPlan
from distdl_jax.functional.all_sum_reduce import AllSumPlan, Copy
from distdl_jax.functional.block_checks import GridBlocks
from distdl_jax.functional.halo_exchange import RangesPlan
from distdl_jax.functional.movement import Movement, move, pulled_back
from distdl_jax.functional.plan import MovementPlan, Plan
from distdl_jax.functional.repartition import RepartitionPlan
from distdl_jax.plans.decomposition import Range
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.transports.threads.lone_worker import alone
from distdl_jax.transports.world import World
from distdl_jax.watchdog.programs.ir import Operation

Needed = Mapping[int, Sequence[Range]]
"""For some cut dimensions, the range that each index along it needs."""


def _together(move_packed: Callable[[Array], Array], xs: Sequence[Array]) -> list[Array]:
    """Return the results of a movement of several arrays of one dtype, packed into one."""
    if len(xs) == 1:
        return [move_packed(xs[0])]
    packed, start, results = move_packed(jnp.concatenate([x.ravel() for x in xs])), 0, []
    for x in xs:
        results.append(lax.slice_in_dim(packed, start, start + x.size).reshape(x.shape))
        start += x.size
    return results


@dataclass(frozen=True)
class Moved:
    """A movement of this worker, for `f.plan`.

    - `line`, `primitive`: where the program asks for it.
    - `what`: the kind of movement. `shape`, `dtype`: of the whole value.
    - `before`, `after`: the numbers of blocks along its dimensions; `pending`: whether a sum was pending.
    - `operations`: this worker's messages. `times`: how often, in a loop of known length; of another, one pass counts.
    """

    line: str
    primitive: str
    what: str
    shape: tuple[int, ...]
    dtype: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    operations: tuple[Operation, ...]
    times: int = 1


class Movements:
    """The movements of one distributed program.

    - `asked_by`: the line and the primitive of the equation that asks for them.
    - `moved`: what moved, if `notes` are taken. `requests`: the number of movements, of any worker.
    - `gather`: the number of bytes above which a gathered value isn't kept; None for no limit.
    - `dry_runs`: what bodies of loops and branches would do, by the body and the layouts of its arguments.
    """

    def __init__(self, mesh: Mesh, *, notes: bool = False) -> None:
        self.mesh, self.notes = mesh, notes
        self.moved: list[Moved] = []
        self.asked_by: tuple[str, str] = ("", "")
        self.requests = 0
        self.times = 1
        self.gather: int | None = None
        self.dry_runs: dict[Any, Any] = {}

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count each movement inside so many times."""
        before = self.times
        self.times *= times
        yield
        self.times = before

    def run(self, plan: MovementPlan, x: Array, what: str, shape: Sequence[int], before: Cut, after: Cut) -> Array:
        """Run a plan of one movement, and note it."""
        world = self.mesh.world
        self.requests += 1
        self._note(plan.part(world.rank), x, what, shape, before, after)
        return self._stand_in(plan) if self.notes else plan.run(world, x)

    def _stand_in(self, plan: Plan) -> Array:
        """Return an array like this worker's result of a plan, for a program that isn't run."""
        result = plan.output(self.mesh.world.rank)
        return jnp.zeros(result.shape, result.dtype)

    def _note(self, part: Movement | None, x: Array, what: str, shape: Sequence[int], before: Cut, after: Cut) -> None:
        if part is None or not self.notes:
            return
        dtype = np.dtype(x.dtype)
        operations = part.operations(self.mesh.world.rank, ShapeDtype(tuple(x.shape), dtype))
        numbers = [tuple(self.mesh.size(axes) for axes in cut) for cut in (before, after)]
        line, primitive = self.asked_by
        self.moved.append(
            Moved(line, primitive, what, tuple(shape), dtype.name, numbers[0], numbers[1], operations, self.times)
        )

    def blocks(self, cut: Cut, shape: Sequence[int], dtype: Any) -> GridBlocks:
        """Return the shapes and dtypes of the blocks of the workers that share a value with this one."""
        return GridBlocks(self.mesh.grid(cut, shape), np.dtype(dtype))

    # --- sums ---------------------------------------------------------------------------------------------------------

    def all_sum(
        self, x: Array, axes: Iterable[int], shape: Sequence[int] | None = None, cut: Cut | None = None
    ) -> Array:
        """Return the sum of the workers' arrays along `axes`."""
        team = self.mesh.team(axes)
        if len(team) == 1:
            return x
        inputs = dict.fromkeys(team, ShapeDtype(tuple(x.shape), np.dtype(x.dtype)))
        own = cut or ((),) * x.ndim
        return self.run(AllSumPlan((team,), inputs), x, "sum", x.shape if shape is None else shape, own, own)

    def all_sums(self, xs: Sequence[Array], axes: Iterable[int]) -> list[Array]:
        """Return the sums of several arrays of one dtype in one movement."""
        return _together(lambda packed: self.all_sum(packed, axes), xs)

    def gradients_of_copies(self, cotangents: Sequence[Array], axes: Iterable[int]) -> list[Array]:
        """Return the gradients of variables with copies along `axes`, from the cotangents of this worker's copies."""
        team = self.mesh.team(axes)
        if len(team) == 1:
            return list(cotangents)
        copy = Copy(team, True)

        def summed(packed: Array) -> Array:
            self._note(copy.adjoint(), packed, "sum", packed.shape, uncut(packed.shape), uncut(packed.shape))
            return pulled_back(self.mesh.world, copy, packed)

        return _together(summed, cotangents)

    def of_first(self, x: Array) -> Array:
        """Return the first worker's number, on all workers."""
        team = self.mesh.team(self.mesh.axes)
        inputs = dict.fromkeys(team, ShapeDtype(tuple(x.shape), np.dtype(x.dtype)))
        own = x if self.mesh.is_first(self.mesh.axes) else jnp.zeros_like(x)
        return self.run(AllSumPlan((team,), inputs), own, "first worker's", x.shape, (), ())

    def scattered_sum(self, x: Array, shape: Sequence[int], cut: Cut, dims: tuple[int, ...]) -> Array:
        """Return this worker's block of a sum, from terms that are whole along `dims`."""
        grid = self.mesh.grid(cut, shape)
        inputs = dict.fromkeys(grid.ranks, ShapeDtype(tuple(x.shape), np.dtype(x.dtype)))
        plan = GatherPlan("reduce_scatter", inputs, np.dtype(x.dtype), grid, dims, gathers=False)
        before = tuple(() if d in dims else axes for d, axes in enumerate(cut))
        return self.run(plan, x, "scattered sum", shape, before, cut)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def gathered(self, x: Array, shape: Sequence[int], cut: Cut, dims: Iterable[int]) -> tuple[Array, Cut]:
        """Return the array with `dims` whole, and its cut."""
        along = tuple(d for d in dims if cut[d])
        after = tuple(() if d in along else axes for d, axes in enumerate(cut))
        if along:
            blocks = self.blocks(cut, shape, x.dtype)
            plan = GatherPlan("all_gather", blocks, np.dtype(x.dtype), blocks.grid, along, gathers=True)
            x = self.run(plan, x, "gather", shape, cut, after)
        return x, after

    def cut_again(self, x: Array, shape: Sequence[int], a: Cut, b: Cut) -> Array:
        """Return the block of a value with the cut `b`, from its block with the cut `a`.

        Copies are cut for nothing. Axes that `b` doesn't use are gathered. The rest is one exchange, among the workers
        that share the value.
        """
        x, a = self._sliced(x, shape, a, b)
        x, a = self.gathered(
            x, shape, a, [d for d in range(len(shape)) if a[d] != b[d] and not set(a[d]) <= axes_in(b)]
        )
        x, a = self._sliced(x, shape, a, b)
        if axes_in(a) != axes_in(b):
            x, a = self.gathered(x, shape, a, [d for d in range(len(shape)) if a[d] != b[d]])
            x, a = self._sliced(x, shape, a, b)
        if a == b:
            return x
        exchange = Exchange(self.mesh.grid(a, shape), self.mesh.grid(b, shape))
        plan = RepartitionPlan("repartition", self.blocks(a, shape, x.dtype), np.dtype(x.dtype), exchange, True)
        return self.run(plan, x, "blocks", shape, a, b)

    def _sliced(self, x: Array, shape: Sequence[int], a: Cut, b: Cut) -> tuple[Array, Cut]:
        """Cut whole dimensions along axes on which there are copies: each worker takes its part."""
        used, cut = axes_in(a), list(a)
        for d, axes in enumerate(b):
            if axes and not a[d] and not used & set(axes):
                cut[d] = axes
                used |= set(axes)
        after = tuple(cut)
        if after == a:
            return x, a
        boxes = zip(self.mesh.box(a, shape), self.mesh.box(after, shape), a, after, strict=True)
        ranges = [
            (new[0] - old[0], new[1] - old[0]) if own != then else (0, old[1] - old[0]) for old, new, own, then in boxes
        ]
        return lax.slice(x, *zip(*ranges, strict=True)), after

    # --- neighbourhoods -----------------------------------------------------------------------------------------------

    def ranges(self, x: Array, shape: Sequence[int], cut: Cut, needed: Needed, periodic: Iterable[int] = ()) -> Array:
        """Return, for this worker, the ranges that its indices need: in `needed` dimensions those, else its own."""
        return self.run(self._ranges(x.dtype, shape, cut, needed, periodic), x, "neighbours", shape, cut, cut)

    def added_ranges(self, y: Array, shape: Sequence[int], cut: Cut, needed: Needed) -> Array:
        """Return the adjoint: each worker's ranges are added to the blocks that they came from."""
        part = self._ranges(y.dtype, shape, cut, needed, ()).part(self.mesh.world.rank)
        self.requests += 1
        if part is None:
            return y
        self._note(part.adjoint(), y, "added neighbours", shape, cut, cut)
        if self.notes:
            return jnp.zeros(self.mesh.block_shape(cut, shape), y.dtype)
        return move(self.mesh.world, part.adjoint(), y)

    def _ranges(
        self, dtype: Any, shape: Sequence[int], cut: Cut, needed: Needed, periodic: Iterable[int]
    ) -> RangesPlan:
        blocks = self.blocks(cut, shape, dtype)
        wanted = tuple(tuple(map(tuple, needed.get(d, own))) for d, own in enumerate(blocks.grid.ranges))
        wraps = tuple(d in set(periodic) for d in range(len(shape)))
        return RangesPlan("windows", blocks, np.dtype(dtype), Halos(blocks.grid, wanted, wraps))  # type: ignore[arg-type]

    # --- plans of several movements -----------------------------------------------------------------------------------

    def compute(self, plan: Any, x: Any, what: str, shape: Sequence[int], before: Cut, after: Cut) -> Any:
        """Run a plan of a computation around movements, and note it."""
        if self.notes:
            with alone(self.mesh.world) as world:
                return self._noted(world, partial(plan.run, world), x, what, shape, before, after)
        self.requests += 1
        return plan.run(self.mesh.world, x)

    def computed(
        self, run: Callable[[Any], Any], x: Any, what: str, shape: Sequence[int], before: Cut, after: Cut
    ) -> Any:
        """Return `run(x)`, a function that moves data, and note it."""
        if self.notes:
            return self._noted(self.mesh.world, run, x, what, shape, before, after)
        self.requests += 1
        return run(x)

    def _noted(
        self, world: World, run: Callable[[Any], Any], x: Any, what: str, shape: Sequence[int], before: Cut, after: Cut
    ) -> Any:
        """Note what a function moves, and return an array like its result."""
        self.requests += 1
        with trace_context.set(anchors=None):
            traced, result = jax.make_jaxpr(run, return_shape=True)(x)
        read = read_program(world.transport, traced.jaxpr)
        operations = tuple(operation for operation in read if isinstance(operation, Operation))
        numbers = [tuple(self.mesh.size(axes) for axes in cut) for cut in (before, after)]
        line, primitive = self.asked_by
        dtype = np.dtype(jnp.result_type(x)).name
        self.moved.append(
            Moved(line, primitive, what, tuple(shape), dtype, numbers[0], numbers[1], operations, self.times)
        )
        return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), result)
