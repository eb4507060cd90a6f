"""Values of which several workers hold copies: the sum of their gradients, and the comparison of the copies.

Copies are compared by a digest of 32-bit words, of which the team shares those of all its workers in one small
all-sum-reduction. Integers must be equal. Floating-point numbers may differ by rounding, since XLA may compile an
update differently on workers with different other parameters; so their digest is linear: products with fixed
pseudo-random numbers r, for which <r, x> - <r, x'> = <r, x - x'> is about as large as the norm of x - x'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from distdl_jax.errors import InvalidTypeError, PlanError
from distdl_jax.functional.all_sum_reduce import AllSum, AllSumPlan, Copy, teams_of
from distdl_jax.functional.movement import Movement, move
from distdl_jax.functional.plan import ShapeDtypes, taking_part
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.spec_trees import leaves_with_specs
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.settings import current_settings
from distdl_jax.source_lines import user_line
from distdl_jax.text import quoted
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.marks import part_of_sum
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import exchange_named_shapes, is_array
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import checked_axes, is_traced

T = TypeVar("T")


@dataclass(frozen=True)
class ReplicatedPlan(AllSumPlan):
    """A value replicated on each of `teams`: only its gradient moves, which is summed over the team."""

    name: str = field(default="tree", compare=False)

    def __post_init__(self) -> None:
        self._check(self.name, "hold copies of it")

    def _movement(self, team: Workers, differentiable: bool) -> Copy:
        return Copy(team, differentiable)

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's copy `x`; with `DISTDL_JAX_DEBUG=1` compare it with the others."""
        if current_settings().debug and self.part(world.rank) is not None:
            _compare(world, self.team_of[world.rank], {self.name: x})
        return super().run(world, x)


def plan_replicated(
    shape_dtypes: ShapeDtypes,
    P: Partition,
    axes: int | Sequence[int] | None = None,
    name: str = "tree",
    kind: type[ReplicatedPlan] = ReplicatedPlan,
) -> ReplicatedPlan:
    """Plan one leaf of `replicated` from the shapes and dtypes on the workers of P, or on some of its teams."""
    teams = teams_of(P, _along(P, axes), shape_dtypes)
    return kind(teams, taking_part(shape_dtypes, *teams), name)


def replicated(tree: T, P: Partition, axes: int | Sequence[int] | None = None) -> T:
    """Mark values as replicated on all workers of `P`, so that their gradient is the sum over the copies.

    A parameter that every worker uses with its own data, such as the scale of a normalisation, is one variable with
    many copies. JAX gives each worker the gradient of its own copy; the optimiser needs their sum, the same on all
    workers, to keep the copies equal. With P of shape p_0 x ... x p_{D-1}, workers with equal indices outside `axes`
    hold copies of one value:

        y_w = x_w,        the gradient on w = the sum of dy_u over all u that hold copies of x_w

    There is no communication in the forward pass, except with `DISTDL_JAX_DEBUG=1`: then each call compares the copies,
    up to rounding, as `check_replicated` does. Apply it to parameters, where a function starts to use them, not to
    values computed from other workers' data: the gradient of the output of an `all_sum_reduce` or a `broadcast` is
    already summed.

    **Arguments:**

    - `tree`: a pytree of arrays of any shape and dtype, the same on all workers of a team; other leaves are unchanged.
      Anything outside P. The copies must be equal.
    - `P`: the partition whose workers hold copies.
    - `axes`: the dimensions of P along which values are replicated. Default: all, for a single value.

    **Returns:** `tree`.

    **Raises:** `InvalidArgumentError` for a dimension that P doesn't have; `PlanError`, on every worker of a team,
    if leaves differ in shape or dtype between its workers, or, with the setting, in their values.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0])
    >>> float(jax.grad(lambda scale: (replicated(scale, P) * jax.numpy.arange(3.0)).sum())(2.0))
    3.0

    Source: Hewett and Grady (2020): the adjoint of a copy is a sum. `TensorSpec(..., replicated=...)` describes it.
    """
    check_partitions(P=P)
    return _copied("tree", tree, P, _along(P, axes), ReplicatedPlan)


def _copied(name: str, tree: T, P: Partition, along: tuple[int, ...], kind: type[ReplicatedPlan]) -> T:
    """Return the argument `name`, a tree of copies along dimensions of P, whose arrays are moved by such plans."""
    team = P.create_allreduction_partition(along)
    if team.size <= 1:
        return tree
    paths_and_leaves, structure = jax.tree.flatten_with_path(tree)
    arrays = {f"{name}{jax.tree_util.keystr(path)}": leaf for path, leaf in paths_and_leaves if is_array(leaf)}
    shapes = exchange_named_shapes(P.world, team.ranks, f"replicated on {P.describe()} along {along}", arrays)
    _check_names(shapes)
    plans = [
        plan_replicated({worker: of_worker[leaf] for worker, of_worker in shapes.items()}, P, along, leaf, kind)
        for leaf in arrays
    ]
    copies = iter([plan.run(P.world, x) for plan, x in zip(plans, arrays.values(), strict=True)])
    moved: T = jax.tree.unflatten(structure, [next(copies) if is_array(leaf) else leaf for _, leaf in paths_and_leaves])
    return moved


def _along(P: Partition, axes: int | Sequence[int] | None) -> tuple[int, ...]:
    return tuple(range(P.dim)) if axes is None else checked_axes("axes", axes, P.shape)


def _check_names(shapes: Mapping[int, Mapping[str, ShapeDtype]]) -> None:
    """Reject trees that differ between the workers of a team."""
    first = min(shapes)
    for worker, of_worker in shapes.items():
        if different := sorted(of_worker.keys() ^ shapes[first].keys()):
            holder = worker if different[0] in of_worker else first
            raise PlanError(
                f"`tree` must have the same arrays on all workers that hold copies of it, but `{different[0]}` is on "
                f"worker {holder} and not on worker {worker + first - holder}."
            )


def part(value: ArrayLike, P: Partition) -> Array:
    """Return this worker's part of a value that all workers of `P` hold: a p-th of it, for p workers.

    The parts add up to the value, so it counts once in a loss, which is the sum of what the workers return: as

        loss = dj.part(F.all_sum_reduce(x, P, axes_keep=()) ** 2, P)        not as p equal losses

    and in its gradient, since the gradient of a sum over workers, or of a copy, is summed over them.

    **Arguments:**

    - `value`: a number or an array, equal on all workers of P: real or complex.
    - `P`: the partition whose workers hold it.

    **Returns:** `value` divided by the number of workers of P; zeros outside P. `dj.value_and_grad` takes it for this
    worker's part, though it is equal on all. In a function of `dj.distribute`, which is of whole arrays, `value`.

    **Raises:** `InvalidTypeError` if `value` is not a number or an array of numbers, or P not a partition.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition()
    ...     loss = lambda w: dj.part(dj.functional.all_sum_reduce(jnp.sum(w), P, axes_keep=()), P)
    ...     value, gradient = dj.value_and_grad(loss)(jnp.ones(2) + P.rank)
    ...     return float(value), gradient.tolist()
    >>> dj.simulate(2, program)
    [(6.0, [1.0, 1.0]), (6.0, [1.0, 1.0])]

    Source: Hewett and Grady (2020), inner products of distributed tensors; `docs/contract.md`.
    """
    if not isinstance(value, int | float | complex) and not is_array(value):
        raise InvalidTypeError(f"`value` (={quoted(value)}) must be a number or an array of numbers.")
    check_partitions(P=P)
    x = jnp.asarray(value)
    if trace_context.whole_program:
        return x
    return part_of_sum(x / P.size if P.active else tie(jnp.zeros_like(x / 1), x))


# --- from copies of a vector to blocks, and back ----------------------------------------------------------------------

# `all_sum_reduce` and `replicated` map blocks to blocks: in <x, y>, the sum over all workers, each copy counts. When
# every worker differentiates a function of copies alone, each of p backward passes begins with 1. So there a vector
# counts once, <s, t> = <s_w, t_w> on any worker w; and between such vectors and blocks
#     share s = (s, ..., s),    total x = x_0 + ... + x_{p-1},    <share s, x> = <s, total x>:
# each is the adjoint of the other, in derivatives of any order. (With the adjoint of `all_sum_reduce`, a gradient would
# be p times too large.)


class Share(Copy):
    """One worker's part of the map from a vector, of which all have copies, to a block on each worker."""

    def adjoint(self) -> AllSum:
        return Total(self.team, self.differentiable)


class Total(AllSum):
    """One worker's part of the map from blocks to their sum, of which all get copies."""

    def adjoint(self) -> Any:
        return Share(self.team, self.differentiable)


@dataclass(frozen=True)
class SharePlan(ReplicatedPlan):
    """A vector with copies on each of `teams`, as a block of each worker."""

    def _movement(self, team: Workers, differentiable: bool) -> Copy:
        return Share(team, differentiable)


@dataclass(frozen=True)
class TotalPlan(AllSumPlan):
    """The sum of the blocks of each of `teams`, as one vector with copies."""

    def _movement(self, team: Workers, differentiable: bool) -> Movement:
        return Total(team, differentiable)


def share(tree: T, P: Partition) -> T:
    """Return vectors of which all workers of P have copies as blocks, whose cotangents are summed."""
    return _copied("theta", tree, P, _along(P, None), SharePlan)


def total_of_blocks(x: Array, P: Partition) -> Array:
    """Return the sum of the blocks of P's workers, which have equal shapes and dtypes, as copies of one vector."""
    block = ShapeDtype(x.shape, np.dtype(x.dtype))
    return TotalPlan((P.ranks,), dict.fromkeys(P.ranks, block)).run(P.world, x)


# --- whether copies are equal -----------------------------------------------------------------------------------------


def check_replicated(tree: T, specs: Any) -> T:
    """Check that the copies of replicated values still agree, up to rounding, with `DISTDL_JAX_DEBUG=1`.

    XLA may compile an update differently on workers with different other parameters. So copies of floating-point
    numbers may differ by the square root of their precision (1.5e-8 in float64, 3.5e-4 in float32), relative to the
    norm of the value: equal gradients give a few roundings per step, which take millions of steps to accumulate to
    that, and a missing `dj.replicated`, another rate or another key give a part of the update itself, which exceeds it
    after a few steps. Integers and booleans must be equal.

    Copies that differ (for instance of a scale or a running mean, after an update that was not the same on all workers)
    raise no error by themselves, and training continues with a mixture. Used in a step, before or after the update,
    this check detects it in the call in which it happens. `dj.replicated`, and layers with copies of their parameters,
    compare them in the same way. Without the setting it does nothing, and sends nothing.

    **Arguments:**

    - `tree`: this worker's blocks of any pytree: parameters, optimiser states, running statistics.
    - `specs`: a pytree of `TensorSpec`, like `tree` or a prefix of it; None for values to skip. Only values whose spec
      has `replicated` dimensions are checked.

    **Returns:** `tree`, unchanged.

    **Raises:** `InvalidArgumentError`, with or without the setting, if `specs` does not have the structure of `tree`;
    `PlanError`, on all workers that hold copies of a value that differs, naming it and two of them. In a jitted
    function JAX raises it after the run, as a runtime error that includes this text.

    Collective among the workers that hold copies, which share a digest of some 20 bytes of each value.

    >>> import distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> check_replicated({"scale": 2.0}, {"scale": dj.TensorSpec((), P)})
    {'scale': 2.0}
    """
    pairs = leaves_with_specs(tree, specs)
    if not current_settings().debug:
        return tree
    groups: dict[tuple[Partition, tuple[int, ...]], dict[str, Any]] = {}
    for path, value, spec in pairs:
        if spec is not None and _has_copies(spec):
            groups.setdefault((spec.partition, spec.replicated), {})[f"tree{path}"] = value
    for (P, axes), leaves in groups.items():
        team = P.create_allreduction_partition(axes)
        if team.active:
            _compare(team.world, team.ranks, leaves)
    return tree


def _has_copies(spec: TensorSpec) -> bool:
    return any(spec.partition.shape[d] > 1 for d in spec.replicated)


def _compare(world: World, team: Workers, values: Mapping[str, Any]) -> None:
    """Raise on all workers of `team`, now or when the program runs, if their copies of a value differ."""
    if world.records:
        return  # nothing runs
    arrays = {name: lax.stop_gradient(jnp.asarray(value)) for name, value in values.items()}
    words = [_digest(x) for x in arrays.values()]
    own = jnp.zeros((len(team), sum(x.size for x in words)), np.uint32)
    own = own.at[team.index(world.rank)].set(jnp.concatenate(words))
    rows = move(world, AllSum(team, differentiable=False), own)
    dtypes = {name: np.dtype(x.dtype) for name, x in arrays.items()}
    compare = partial(_raise_if_different, team, dtypes, [x.size for x in words], user_line())
    if is_traced(rows):
        jax.debug.callback(compare, rows)
    else:
        compare(rows)


def _raise_if_different(
    team: Workers, dtypes: Mapping[str, np.dtype], lengths: Sequence[int], where: str, rows: Any
) -> None:
    """Raise if a value's digest on a worker of the team, in a row, differs from the first one's."""
    columns = np.split(np.asarray(rows), np.cumsum(lengths)[:-1], axis=1)
    for (name, dtype), digests in zip(dtypes.items(), columns, strict=True):
        other = next(
            (worker for worker, row in zip(team, digests, strict=True) if _differ(dtype, digests[0], row)), None
        )
        if other is not None:
            raise PlanError(
                f"`{name}` must be the same on all workers that hold copies of it, but is not on workers {team[0]} and "
                f"{other} (compared at {where}). Every worker must start from the same values, and update its copies "
                "with the same gradient: dj.replicated sums it over the copies."
            )


_WEIGHTS = 2  # pseudo-random vectors; a difference that is orthogonal to one of them is not so to the other


def _digest(x: Array) -> Array:
    """Return a digest of an array: 32-bit words, as many on all workers with this dtype."""
    wide = x.dtype.itemsize > 4 and x.dtype != np.complex64
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x if wide else x.astype(np.int32)
        return _exact(lax.bitcast_convert_type(x, np.uint32).ravel())[None]
    real = np.float64 if wide else np.float32
    parts = [x.real, x.imag] if jnp.issubdtype(x.dtype, jnp.complexfloating) else [x]
    numbers = jnp.stack(parts).astype(real).ravel()
    # NaN and infinities in their places; other numbers are divided by the largest, so that no square overflows.
    kinds = jnp.isnan(numbers) + 2 * jnp.isposinf(numbers) + 3 * jnp.isneginf(numbers)
    finite = jnp.where(kinds == 0, numbers, 0)
    largest = jnp.max(jnp.abs(finite), initial=0)
    z = finite / jnp.where(largest == 0, 1, largest)
    products = [jnp.sum(z * _weights(z.size, k).astype(real)) for k in range(_WEIGHTS)]
    linear = jnp.stack([largest, jnp.sqrt(jnp.sum(z * z)), *products])
    return jnp.concatenate([_exact(kinds.astype(np.uint32))[None], lax.bitcast_convert_type(linear, np.uint32).ravel()])


def _differ(dtype: np.dtype, one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two digests are of arrays of `dtype` that differ by more than rounding."""
    if one[0] != other[0]:
        return True
    if one.size == 1:
        return False
    precision = float(jnp.finfo(dtype).eps) ** 0.5
    real = np.float32 if one.size == 1 + 2 + _WEIGHTS else np.float64
    (largest, norm, *products), (its_largest, _, *its_products) = one[1:].view(real), other[1:].view(real)
    apart = np.abs(np.subtract(products, its_products)).max()
    return bool(abs(largest - its_largest) > precision * largest or apart > precision * norm)


def _exact(words: Array) -> Array:
    """Return a sum of 32-bit words that changes if one of them does, modulo 2^32: its factor is odd."""
    return jnp.sum(words * (_hashed(words.size, _WEIGHTS) | 1), dtype=np.uint32)


def _weights(n: int, k: int) -> Array:
    """Return the k-th vector of n pseudo-random numbers, between .5 and 1.5 in magnitude."""
    bits = _hashed(n, k)
    magnitude = 0.5 + (bits >> 8).astype(np.float32) * 2.0**-24
    return jnp.where(bits & 1 == 0, magnitude, -magnitude)


def _hashed(n: int, k: int) -> Array:
    """Return a hash of each of the numbers 0 to n - 1: the last steps of MurmurHash3 (Appleby, public domain)."""
    bits = lax.iota(np.uint32, n) * np.uint32(2654435761) + np.uint32(k + 1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * np.uint32(factor)
    return bits ^ (bits >> 16)
