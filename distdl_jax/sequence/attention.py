"""Self-attention with the batch, the sequence and the heads split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.backends.base import Workers, World
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.initialization import UniformFanIn, init_block
from distdl_jax.nn.layer import purpose_of
from distdl_jax.nn.parameters import Params, ParamShapeDtypes, check_params, held_by_specs, told_with_params, unboxed
from distdl_jax.output_specs import output_spec
from distdl_jax.partition import CartesianPartition, Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_ranges, checked_integer
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.primitives.all_gather import GatherPlan, plan_all_gather, plan_reduce_scatter
from distdl_jax.primitives.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.primitives.held import common_dtype, owned_grid
from distdl_jax.primitives.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.primitives.repartition import RepartitionPlan, plan_repartition
from distdl_jax.primitives.replicated import ReplicatedPlan, plan_replicated
from distdl_jax.primitives.tie import tie
from distdl_jax.sequence.softmax import Running, added, finished, of_block, rotated, start
from distdl_jax.static import Static
from distdl_jax.tensors import TensorSpec

Exchange = Literal["ring", "heads"]


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """The plan of an attention.

    - `inputs`: what the workers hold of x; `grid`: its blocks; `dtype`: of the output.
    - `gather`: the features of x to all workers along the heads; `scatter`: sums of their outputs back.
    - `of_params`: for each parameter, who holds copies of it.
    - `ring`: how each worker gets the keys and values of the block that is 1, 2, ... behind its own.
    - `to_heads`, `back`: heads for sequence, of queries, keys and values side by side, and of the outputs back.
    """

    inputs: ShapeDtypes = field(hash=False)
    grid: ProductGrid
    dtype: np.dtype
    gather: GatherPlan
    scatter: GatherPlan
    of_params: Mapping[str, ReplicatedPlan] = field(hash=False)
    ring: tuple[RangesPlan, ...]
    to_heads: tuple[RepartitionPlan, ...]
    back: RepartitionPlan | None

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.inputs))

    def output(self, worker: int) -> ShapeDtype:
        return ShapeDtype(self.inputs[worker].shape, self.dtype)

    def places(self, worker: int, behind: int = 0) -> Range:
        """Where in the sequence the block is that is so many behind that of `worker`."""
        index = self.grid.index(self.grid.cell_of[worker])[1]
        return self.grid.ranges[1][(index + behind) % self.grid.shape[1]]


@dataclass(frozen=True)
class DistributedMultiHeadAttention(Static):
    r"""Self-attention over a sequence, of which batch, sequence and heads may be split at the same time.

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | n_b x n_s x n_e | P_x: P_n x P_s x P_h |
    | `query`; `key`, `value` | n_h x d x n_e; n_kv x d x n_e | heads over P_h; copies along P_n and P_s |
    | `out` | n_e x n_h x d | heads over P_h; copies along P_n and P_s |
    | `query_bias`, `key_bias`, `value_bias`; `out_bias` | heads x d; n_e | over P_h; copies along P_n and P_s |

    With d = n_e / n_h: y = softmax(q k^T / sqrt(d)) v of each head, put together by `out`.

    - *Heads* (P_h): the features of x are gathered by the workers along P_h, each has some of the heads, and their
      outputs are summed and scattered (Megatron's pair of layers). Heads need not divide.
    - *Sequence* (P_s), with `exchange="ring"`: keys and values of the other workers come one block at a time, and a
      running maximum and sum are kept, so memory is that of a few blocks. For the way back the blocks are kept, but no
      scores; these are worked out again. With `exchange="heads"` (Ulysses): heads are exchanged for sequence, and back;
      each worker then has the whole sequence of some heads.

    Half precisions are computed in float32. x is in balanced blocks along the sequence and the features.

    **Arguments:**

    - `P_x`: the partition of input and output.
    - `embed_dim`, `num_heads`: n_e, and n_h, which divides it.
    - `num_key_heads`: n_kv, which divides n_h: how many heads keys and values have. Default: n_h. Where it is another
      number, P_h divides both.
    - `causal`: whether each element attends to itself and those before it only.
    - `rotary`: the base of rotary positions (10,000, say); None for none.
    - `bias`: whether there are biases.
    - `exchange`: "ring" or "heads", where the sequence is split.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError`.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1, 1])
    >>> layer = DistributedMultiHeadAttention(P, embed_dim=8, num_heads=2, causal=True)
    >>> layer(layer.init(jax.random.key(0)), jax.numpy.ones((2, 5, 8))).shape
    (2, 5, 8)

    Source: Vaswani et al. (2017); Shoeybi et al. (2019), arXiv:1909.08053 (heads); Liu et al. (2023), arXiv:2310.01889
    (ring); Jacobs et al. (2023), arXiv:2309.14509 (heads for sequence); Su et al. (2021), arXiv:2104.09864 (rotary).
    """

    P_x: Partition
    embed_dim: int
    num_heads: int
    num_key_heads: int | None = None
    causal: bool = False
    rotary: float | None = None
    bias: bool = True
    exchange: Exchange = "ring"

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)
        if self.P_x.dim != 3:
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(self.P_x.shape)}) must have 3 dimensions: batch, sequence, and features."
            )
        checked_integer("embed_dim", self.embed_dim, 1)
        checked_integer("num_heads", self.num_heads, 1)
        if self.embed_dim % self.num_heads:
            raise InvalidArgumentError(
                f"`embed_dim` (={self.embed_dim}) must be divisible by `num_heads` (={self.num_heads})."
            )
        p_h = self.P_x.shape[2]
        if self.num_key_heads is not None:
            checked_integer("num_key_heads", self.num_key_heads, 1)
            if self.num_heads % self.num_key_heads:
                raise InvalidArgumentError(
                    f"`num_heads` (={self.num_heads}) must be divisible by `num_key_heads` (={self.num_key_heads})."
                )
            if self._key_heads != self.num_heads and (self.num_heads % p_h or self._key_heads % p_h):
                raise InvalidArgumentError(
                    f"`num_heads` (={self.num_heads}) and `num_key_heads` (={self.num_key_heads}) must be divisible by "
                    f"the {p_h} workers along the heads where they differ, so that each has whole groups."
                )
        if self.rotary is not None and (not self.rotary > 1 or self._features % 2):
            raise InvalidArgumentError(
                f"`rotary` (={self.rotary!r}) must be a base above 1, and the features of a head ({self._features}) an "
                "even number; or None."
            )
        if self.exchange not in get_args(Exchange):
            raise InvalidArgumentError(f"`exchange` (={self.exchange!r}) must be 'ring' or 'heads'.")
        if self.exchange == "heads" and self._key_heads != self.num_heads and self.P_x.shape[1] > 1:
            raise InvalidArgumentError(
                "`exchange` (='heads') takes as many key heads as heads where the sequence is split; 'ring' does not."
            )

    @property
    def _key_heads(self) -> int:
        return self.num_key_heads or self.num_heads

    @property
    def _features(self) -> int:
        return self.embed_dim // self.num_heads

    def param_specs(self) -> dict[str, TensorSpec]:
        """The global shape and the partition of each parameter; a worker holds those of its heads, copies."""
        p_n, p_s, p_h = self.P_x.shape
        by_head = self.P_x.create_cartesian_topology_partition([p_n, p_s, p_h, 1, 1])
        shapes = {"query": self.num_heads, "key": self._key_heads, "value": self._key_heads}
        d, e = self._features, self.embed_dim
        specs = {name: TensorSpec((heads, d, e), by_head, (0, 1)) for name, heads in shapes.items()}
        second = self.P_x.create_cartesian_topology_partition([p_n, p_s, 1, p_h, 1])
        specs["out"] = TensorSpec((e, self.num_heads, d), second, (0, 1))
        if self.bias:
            flat = self.P_x.create_cartesian_topology_partition([p_n, p_s, p_h, 1])
            specs |= {f"{name}_bias": TensorSpec((heads, d), flat, (0, 1)) for name, heads in shapes.items()}
            specs["out_bias"] = TensorSpec((e,), self.P_x, (0, 1))
        return specs

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """This worker's blocks of the initial parameters: uniform in ±1/sqrt(n_e), and biases of 0."""
        specs = self.param_specs()
        keys = dict(zip(specs, jax.random.split(key, len(specs)), strict=True))
        weights = UniformFanIn(self.embed_dim)
        return {
            name: init_block(jax.nn.initializers.zeros if name.endswith("bias") else weights, keys[name], spec, dtype)
            for name, spec in specs.items()
        }

    def output_spec(self, x_spec: TensorSpec) -> TensorSpec:
        """The `TensorSpec` of the output, that of the input where it fits; nothing moves."""
        return output_spec(self, x_spec, self.P_x)

    def plan(self, x: ShapeDtypes, params: ParamShapeDtypes | None = None) -> AttentionPlan:
        """What the layer makes of what the workers of P_x hold: without a message, and the same on every worker.

        **Raises:** `PlanError` where x or a parameter does not fit.
        """
        x, specs, ranks = taking_part(x, self.P_x.ranks), self.param_specs(), self.P_x.ranks
        dtype = common_dtype("x", x, ranks)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise PlanError(f"`x` must hold real floating-point numbers, but is {dtype}.")
        grid = owned_grid("x", self.P_x, x)
        for d, n in ((1, grid.extent[1]), (2, self.embed_dim)):
            if grid.ranges[d] != balanced_ranges(n, self.P_x.shape[d]):
                lengths = [stop - start for start, stop in grid.ranges[d]]
                raise PlanError(
                    f"`x` must have length {n} in dimension {d}, balanced over {self.P_x.shape[d]} workers, but its "
                    f"blocks have lengths {lengths} there."
                )
        held = held_by_specs(specs, ranks, dtype) if params is None else params
        check_params(held, specs)
        of_params = {
            name: plan_replicated(
                {worker: its[name] for worker, its in held.items()}, spec.partition, (0, 1), f'params["{name}"]'
            )
            for name, spec in specs.items()
        }
        out = np.dtype(jnp.promote_types(dtype, held[ranks[0]]["query"].dtype))
        gather = plan_all_gather(x, self.P_x, 2)
        whole = {w: ShapeDtype((*its.shape[:2], self.embed_dim), out) for w, its in x.items()}
        scatter = plan_reduce_scatter(whole, self.P_x, 2)
        ring, to_heads, back = self._over_sequence(grid, x, out)
        return AttentionPlan(x, grid, out, gather, scatter, of_params, ring, to_heads, back)

    def _over_sequence(self, grid: ProductGrid, x: ShapeDtypes, dtype: np.dtype) -> tuple[Any, Any, Any]:
        """How what is split along the sequence comes together."""
        p_n, p_s, p_h = self.P_x.shape
        if p_s == 1:
            return (), (), None
        if self.exchange == "ring":
            on = self.P_x.create_cartesian_topology_partition([p_n, p_s, p_h, 1])
            held = self._held(x, self._key_heads, 2 * self._features, dtype)
            owned = owned_grid("keys", on, held)
            steps = []
            for behind in range(1, p_s):
                needed = tuple(owned.ranges[1][(i + behind) % p_s] for i in range(p_s))
                halos = Halos(owned, (owned.ranges[0], needed, *owned.ranges[2:]))
                steps.append(plan_ranges("ring", held, on, halos))
            return tuple(steps), (), None
        split, whole = self._exchanged(p_n, p_s, p_h)
        to_heads = plan_repartition(self._held(x, self.num_heads, 3 * self._features, dtype), split, whole)
        outputs = {w: ShapeDtype((*its.shape[:3], self._features), dtype) for w, its in to_heads.outputs.items()}
        return (), (to_heads,), plan_repartition(outputs, whole, split)

    def _exchanged(self, p_n: int, p_s: int, p_h: int) -> tuple[CartesianPartition, CartesianPartition]:
        """P_n x P_s x P_h x 1, and the same workers with those along the sequence along the heads."""
        split = self.P_x.create_cartesian_topology_partition([p_n, p_s, p_h, 1])
        order = np.arange(split.size).reshape(p_n, p_s, p_h).transpose(0, 2, 1).ravel().tolist()
        team = split.create_partition_inclusive(order)
        return split, team.create_cartesian_topology_partition([p_n, 1, p_h * p_s, 1])

    def _held(self, x: ShapeDtypes, heads: int, features: int, dtype: np.dtype) -> dict[int, ShapeDtype]:
        """What the workers have of a tensor of samples x sequence x heads x features."""
        own = balanced_ranges(heads, self.P_x.shape[2])
        found = {}
        for rank, worker in enumerate(self.P_x.ranks):
            a, b = own[rank % len(own)]
            found[worker] = ShapeDtype((*x[worker].shape[:2], b - a, features), dtype)
        return found

    def __call__(self, params: Params, x: Array) -> Array:
        """Apply the layer.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block on P_x; outside P_x a zero-volume array.

        **Returns:** this worker's block of y, of x's shape; outside P_x, `x`.

        **Raises:** `PlanError`, on every worker of P_x, where x or a parameter does not fit.
        """
        if self.P_x.rank is None:
            return x
        world, team = self.P_x.world, tuple(sorted(self.P_x.ranks))
        with jax.named_scope("DistributedMultiHeadAttention"):
            params = unboxed(params)
            plan = self.plan(*told_with_params(world, team, purpose_of(self), self.param_specs(), params, x))
            own = {name: its.run(world, params[name]).astype(plan.dtype) for name, its in plan.of_params.items()}
            whole = plan.gather.run(world, x).astype(plan.dtype)
            q, k, v = (self._projected(own, name, whole) for name in ("query", "key", "value"))
            if self.rotary is not None:
                first = plan.places(world.rank)[0]
                q, k = (rotated(each, first, self.rotary) if each.size else each for each in (q, k))
            heads = self._attended(world, plan, q, k, v)
            y = plan.scatter.run(world, tie(jnp.einsum("nshd,ehd->nse", heads, own["out"]), heads, own["out"]))
            return y + own["out_bias"] if self.bias else y

    apply = __call__

    def _projected(self, own: Params, name: str, x: Array) -> Array:
        y = jnp.einsum("nse,hde->nshd", x, own[name])
        y = y + own[f"{name}_bias"] if self.bias else y
        return tie(y, x, own[name])

    def _attended(self, world: World, plan: AttentionPlan, q: Array, k: Array, v: Array) -> Array:
        """The heads' outputs for this worker's part of the sequence."""
        if plan.back is not None:
            (to_heads,) = plan.to_heads
            together = to_heads.run(world, jnp.concatenate([q, k, v], axis=-1))
            q, k, v = jnp.split(together, 3, axis=-1)
            return plan.back.run(world, self._local(q, k, v))
        if not plan.ring:
            return self._local(q, k, v)
        queries = plan.places(world.rank)
        together = jnp.concatenate([k, v], axis=-1)
        running = start(q)
        if q.size:
            running = added(running, of_block(running.top, q, k, v, queries, queries, self.causal))
        for behind, step in enumerate(plan.ring, 1):
            # Scores are worked out again on the way back. (JAX keeps what was fetched: it runs no message twice.)
            block = jax.checkpoint(self._block, static_argnums=(0, 1, 2, 3))(
                world, step, queries, plan.places(world.rank, behind), running.top, q, together
            )
            running = added(running, block)
        if not q.size:
            return tie(jnp.zeros(q.shape, q.dtype), q, *running)
        return finished(running, plan.dtype)

    def _block(
        self, world: World, step: RangesPlan, queries: Range, keys: Range, top: Array, q: Array, together: Array
    ) -> Running:
        """What one block of another worker's keys and values adds."""
        k, v = jnp.split(fetched := step.run(world, together), 2, axis=-1)
        seen = keys[1] > keys[0] and not (self.causal and keys[0] >= queries[1])
        if not seen or not q.size or not fetched.size:
            nothing = start(q)
            return Running(tie(top, fetched), tie(nothing.total, fetched), tie(nothing.values, fetched))
        return of_block(top, q, k, v, queries, keys, self.causal)

    def _local(self, q: Array, k: Array, v: Array) -> Array:
        if not q.size:
            return tie(jnp.zeros(q.shape, q.dtype), q, k, v)
        places = (0, q.shape[1])
        return finished(of_block(start(q).top, q, k, v, places, places, self.causal), np.dtype(q.dtype))
