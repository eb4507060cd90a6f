"""Gather and scatter of whole pytrees: all blocks to one worker, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.broadcast import plan_broadcast
from distdl_jax.functional.plan import MovementPlan, Plan, ShapeDtypes, taking_part
from distdl_jax.functional.repartition import plan_repartition
from distdl_jax.partitions.formats.slices import plain
from distdl_jax.partitions.partition import CartesianPartition, Partition, check_partitions
from distdl_jax.partitions.spec_trees import Leaf, check_alike, check_shape, described, leaves_with_specs, specs_by_path
from distdl_jax.partitions.tensors import TensorSpec, device_array
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import nothing, tie
from distdl_jax.tracing.traced import one_program
from distdl_jax.transports.agreement import agree, sendable_dtype
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import checked_integer


def gather(tree: Any, specs: Any, root: int = 0) -> Any:
    """Gather the blocks of every leaf on one worker.

    **Arguments:**

    - `tree`: this worker's pytree of blocks: parameters, gradients, optimiser state, an equinox module. A leaf outside
      its spec's partition is ignored: an optimiser may store something in place of a placeholder.
    - `specs`: a pytree of the same structure with a `TensorSpec` for each leaf (`layer.param_specs()`, `specs_like`). A
      spec in place of a subtree applies to all its leaves; None leaves a subtree unchanged, but not the whole tree.
    - `root`: the world rank of the worker that gets the whole tensors.

    **Returns:** a pytree of the same structure: the global tensors on the root, zero-volume arrays elsewhere. Among
    copies the first is used. Collective over the workers of all partitions in `specs` and the root. Differentiable;
    works inside jit.

    **Raises,** on every participating worker and before any communication: `PlanError` if a leaf does not have the
    shape given by its spec, or trees differ between workers; `InvalidArgumentError` if a leaf has no spec, or a spec no
    leaf (None and empty containers in `tree` are not leaves).

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2])
    ...     spec = dj.TensorSpec((3,), P)
    ...     x = spec.block(jnp.arange(3))
    ...     return dj.gather(x, spec).tolist()
    >>> dj.simulate(2, program)
    [[0, 1, 2], []]
    """
    return _move("gather", plan_gather, tree, specs, root)


def scatter(tree: Any, specs: Any, root: int = 0) -> Any:
    """Scatter the global tensors of one worker to all workers, block by block.

    It is the inverse of `gather`.

    **Arguments:**

    - `tree`: a pytree of global tensors on the root, of which masked entries of numpy become NaN; elsewhere one of the
      same structure, with zero-volume arrays of the same kinds as leaves. Other leaves there are ignored.
    - `specs`: a pytree of the same structure with a `TensorSpec` for each leaf, as for `gather`.
    - `root`: the world rank of the worker with the whole tensors.

    **Returns:** this worker's pytree of blocks, zero-volume if it holds none. All copies of a block are equal.

    **Raises,** on every participating worker and before any communication: `PlanError` if a leaf on the root does not
    have the shape given by its spec, or trees differ between workers; `InvalidArgumentError` as in `gather`, and if
    entries are masked in a dtype without NaN.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2])
    ...     spec = dj.TensorSpec((3,), P)
    ...     whole = jnp.arange(3) if P.rank == 0 else dj.zero_volume_tensor(dtype=int)
    ...     return dj.scatter(whole, spec).tolist()
    >>> dj.simulate(2, program)
    [[0, 1], [2]]
    """
    return _move("scatter", plan_scatter, tree, specs, root)


@dataclass(frozen=True)
class LeafPlan(Plan):
    """The plan of one leaf: the blocks of a tensor move to the root (`gathers`), or from the root to its workers.

    - `tensor`: the description of `spec`, the same on all workers.
    - `inputs`: the shapes and dtypes of the leaf on all participating workers.
    """

    gathers: bool
    tensor: tuple[Any, ...]
    root: int
    inputs: ShapeDtypes = field(hash=False)
    spec: TensorSpec = field(compare=False)

    @property
    def sources(self) -> Workers:
        """The workers whose blocks are moved; others count as placeholders."""
        return self.spec.first_copies.ranks if self.gathers else (self.root,)

    @property
    def out_shapes(self) -> Mapping[int, tuple[int, ...]]:
        """The shapes of the blocks afterwards, by world rank; all other workers have placeholders."""
        return {self.root: self.spec.global_shape} if self.gathers else self.spec.block_shapes

    @cached_property
    def movements(self) -> tuple[MovementPlan, ...]:
        """The movements, in order. They treat scalars as tensors of one element."""
        first, root = _with_dimensions(self.spec.first_copies), _on_root(self.spec, self.root)
        if self.gathers:
            return (plan_repartition(self._blocks, first, root, preserve_batch=False),)
        cut = plan_repartition(self._blocks, root, first, preserve_batch=False)
        P = self.spec.partition
        ones = [1 if d in self.spec.replicated else p for d, p in enumerate(P.shape)]
        source = first.create_cartesian_topology_partition(ones)
        return cut, plan_broadcast(cut.after(self._blocks), source, P, preserve_batch=False)

    @cached_property
    def _blocks(self) -> dict[int, ShapeDtype]:
        return {
            worker: ShapeDtype((block.shape or (1,)) if worker in self.sources else (0,), block.dtype)
            for worker, block in self.inputs.items()
        }

    def output(self, worker: int) -> ShapeDtype:
        return ShapeDtype(self.out_shapes.get(worker, (0,)), self.inputs[self.sources[0]].dtype)

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block afterwards, given its block `x`."""
        if world.rank not in self.workers:
            return x if x.size == 0 else tie(nothing(x.dtype), x)
        x = x.reshape(self._blocks[world.rank].shape) if world.rank in self.sources else tie(nothing(x.dtype), x)
        for movement in self.movements:
            x = movement.run(world, x)
        return x.reshape(self.out_shapes[world.rank]) if world.rank in self.out_shapes else x


def plan_gather(blocks: ShapeDtypes, spec: TensorSpec, root: int = 0, name: str = "tree") -> LeafPlan:
    """Plan `gather` of one leaf, the tensor `spec`, from the shapes and dtypes on at least its workers."""
    inputs = taking_part(blocks, spec.partition.ranks, (root,))
    for worker, shape in spec.block_shapes.items():
        check_shape(name, blocks[worker].shape, spec, shape, f"On worker {worker}: ")
    return _complete(LeafPlan(True, described(spec), root, inputs, spec), name)


def plan_scatter(blocks: ShapeDtypes, spec: TensorSpec, root: int = 0, name: str = "tree") -> LeafPlan:
    """Plan `scatter` of one leaf, the tensor `spec`, from the shapes and dtypes on at least its workers."""
    inputs = taking_part(blocks, spec.partition.ranks, (root,))
    check_shape(name, blocks[root].shape, spec, spec.global_shape, f"On worker {root}: ")
    return _complete(LeafPlan(False, described(spec), root, inputs, spec), name)


def _complete(plan: LeafPlan, name: str) -> LeafPlan:
    """Return `plan` with its movements planned, so that all workers detect misfits."""
    try:
        _ = plan.movements
    except PlanError as error:
        raise PlanError(f"`{name}`: {error}") from None
    return plan


def _on_root(spec: TensorSpec, root: int) -> CartesianPartition:
    one = Partition.of_workers(spec.partition.world, (root,))
    return one.create_cartesian_topology_partition((1,) * max(len(spec.global_shape), 1))


def _with_dimensions(P: CartesianPartition) -> CartesianPartition:
    """Return `P`, with a dimension added for the element of a scalar."""
    return P if P.shape else P.create_cartesian_topology_partition([1])


def _move(
    kind: str, plan: Callable[[ShapeDtypes, TensorSpec, int, str], LeafPlan], tree: Any, specs: Any, root: int
) -> Any:
    """Return the tree after its leaves have moved, with one agreement and, if eager, one program for all of them."""
    given = [spec for spec in specs_by_path(specs).values() if spec is not None]
    if not given:
        leaves_with_specs(tree, specs)
        return tree
    check_partitions(**{f"the partition of spec {n}": spec.partition for n, spec in enumerate(given)})
    world = given[0].partition.world
    root = _checked_root(root, world)
    team = tuple(sorted({root}.union(*(spec.partition.ranks for spec in given))))
    if world.rank not in team:  # it takes no part in the agreement, and has nothing to move
        placed = [
            value
            if spec is None
            else _plain(path, value)
            if np.size(value) == 0
            else jnp.zeros((0,), _shape_dtype(f"tree{path}", value).dtype)
            for path, value, spec in leaves_with_specs(tree, specs)
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), placed)
    leaves: list[Leaf] = []
    moving: list[tuple[str, Any, TensorSpec]] = []

    def contribute() -> Any:
        leaves.extend(leaves_with_specs(tree, specs))
        moving.extend((f"tree{path}", _plain(path, value), spec) for path, value, spec in leaves if spec is not None)
        paths = [(path, described(spec)) for path, _, spec in leaves if spec]
        return paths, [_shape_dtype(name, value) for name, value, _ in moving]

    # One agreement for the whole tree: all paths and shapes travel at once, and all workers raise the same error.
    label = f"the {kind} of a tree {'to' if kind == 'gather' else 'from'} worker {root}"
    contributions = agree(world, team, label, contribute)
    check_alike({worker: paths for worker, (paths, _) in contributions.items()})
    plans = [
        plan({worker: blocks[n] for worker, (_, blocks) in contributions.items()}, spec, root, name)
        for n, (name, _, spec) in enumerate(moving)
    ]
    moved = iter(_run(world, tuple(plans), [_on_device(value) for _, value, _ in moving]))
    values = [leaf.value if leaf.spec is None else next(moved) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), values)


@one_program(static_argnums=(0, 1))
def _run(world: World, plans: tuple[LeafPlan, ...], values: list[Array]) -> list[Array]:
    return [leaf.run(world, value) for leaf, value in zip(plans, values, strict=True)]


def _checked_root(root: Any, world: World) -> int:
    number = checked_integer("root", root)
    if not 0 <= number < world.size:
        raise InvalidArgumentError(f"`root` (={root}) must be a rank of the world, 0 to {world.size - 1}.")
    return number


def _plain(path: str, value: Any) -> Any:
    """Return a leaf without a mask and in this machine's byte order, neither of which JAX takes."""
    return plain(f"tree{path}", value) if isinstance(value, np.ndarray) else value


def _on_device(value: Any) -> Array:
    return device_array(value) if isinstance(value, np.ndarray) else jnp.asarray(value)


def _shape_dtype(name: str, value: Any) -> ShapeDtype:
    """Return the shape and dtype of an array or a number."""
    try:
        native = np.empty(0, value.dtype.newbyteorder("=")) if isinstance(value, np.ndarray) else value
        shape, dtype = np.shape(value), np.dtype(jnp.result_type(native))
    except TypeError:
        raise InvalidTypeError(
            f"`{name}` (={value!r}) must be an array of numbers, or a number. None at its place in `specs` leaves it "
            "unchanged (and jax.random.key_data converts a random key to numbers)."
        ) from None
    return ShapeDtype(shape, sendable_dtype(name, dtype))
