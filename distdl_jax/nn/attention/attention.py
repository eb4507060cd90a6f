"""Attention with the batch, the sequence and the heads split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.all_gather import plan_all_gather, plan_reduce_scatter
from distdl_jax.functional.block_checks import outside
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.nn.attention.attention_plan import (
    MASK,
    MEMORY,
    PADDING,
    SEEN,
    AttentionPlan,
    Heads,
    check_mask,
    is_padded,
    memory_of,
    places_of,
    plan_to_heads,
    regions_of,
    ring_steps,
)
from distdl_jax.nn.attention.cache import PREFIX, Cache, cache_specs, check_cache, empty, entries_of, remembered
from distdl_jax.nn.attention.online_softmax import rotated
from distdl_jax.nn.attention.ring import Extras, block_of
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.input_checks import check_probability, checked_key, real_grid
from distdl_jax.nn.base.layer import PartitionedLayer
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes, plan_replicated_params
from distdl_jax.partitions.initialization import UniformFanIn, initialize_params
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import checked_integer, is_real

Exchange = Literal["ring", "heads", "gather"]


@dataclass(frozen=True)
class DistributedMultiHeadAttention(PartitionedLayer):
    r"""Attention over a sequence; batch, sequence and heads may be split at the same time.

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | n_b x n_s x n_e | P_x: P_n x P_s x P_h |
    | `memory`, from which keys and values are; default: x | n_b x n_t x n_e | P_x |
    | `query`; `key`, `value` | n_h x d x n_e; n_kv x d x n_e | heads over P_h; copies along P_n and P_s |
    | `out` | n_e x n_h x d | heads over P_h; copies along P_n and P_s |
    | `query_bias`, `key_bias`, `value_bias`; `out_bias` | heads x d; n_e | over P_h; copies along P_n and P_s |
    | `qkv`, `qkv_bias`: in their place where `fused` | n_kv x (n_h / n_kv + 2) x d (x n_e) | over P_h, as above |

    With d = n_e / n_h: y = softmax(q k^T / sqrt(d)) v for each head, combined by `out`.

    - *Heads* (P_h): the features of x are gathered by the workers along P_h, each computes some of the heads, and their
      outputs are summed and scattered (Megatron's pair of layers). The number of heads need not be divisible.
    - *Sequence* (P_s), with `exchange="ring"`: keys and values of the other workers arrive one block at a time, and
      update a running maximum and sum; they are sent again in the backward pass. Memory is linear in the worker's own
      block. If causal, workers with fewer keys take over queries of workers with more (see `turns`). With
      `exchange="heads"` (Ulysses): heads are exchanged for sequence, and back; each worker then has the whole sequence
      for some heads. With `exchange="gather"` (Megatron's sequence parallelism): the workers along P_s gather the
      sequence, share the *heads*, and sum and scatter along the sequence. In the table P_h then means P_s.

    Half precisions are computed in float32. x is in balanced blocks along the sequence and the features.

    **Arguments:**

    - `P_x`: the partition of input and output.
    - `embed_dim`, `num_heads`: n_e, and n_h, which divides it.
    - `num_key_heads`: n_kv, which divides n_h: how many heads keys and values have. Default: n_h. If it differs, the
      number of workers that share the heads must divide both.
    - `causal`: whether each element attends only to itself and those before it.
    - `rotary`: the base of rotary positions (e.g. 10,000), or None. - `bias`: whether there are biases.
    - `exchange`: "ring", "heads" or "gather", if the sequence is split. With "gather" P_h is 1.
    - `fused`: whether queries, keys and values are one product: a key head, its value head and the heads that they
      serve are one block of the weight (queries first).
    - `dropout`: the probability with which weights are dropped in training, independently of the partition.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; when applied,
    `PlanError`.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
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
    fused: bool = False
    dropout: float = 0.0

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
        if self.exchange not in get_args(Exchange):
            raise InvalidArgumentError(f"`exchange` (={self.exchange!r}) must be 'ring', 'heads' or 'gather'.")
        if self.exchange == "gather" and self.P_x.shape[2] > 1:
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(self.P_x.shape)}) must not split the features if `exchange` is 'gather': the "
                "workers along the sequence share the heads."
            )
        if self.num_key_heads is not None:
            checked_integer("num_key_heads", self.num_key_heads, 1)
            if self.num_heads % self.num_key_heads:
                raise InvalidArgumentError(
                    f"`num_heads` (={self.num_heads}) must be divisible by `num_key_heads` (={self.num_key_heads})."
                )
            p_h = self._work.shape[2]
            if self._key_heads != self.num_heads and (self.num_heads % p_h or self._key_heads % p_h):
                raise InvalidArgumentError(
                    f"`num_heads` (={self.num_heads}) and `num_key_heads` (={self.num_key_heads}) differ, so both must "
                    f"be divisible by the {p_h} workers along the heads, for whole groups on each."
                )
        check_probability("dropout", self.dropout)
        if self.rotary is not None and (not is_real(self.rotary) or self.rotary <= 1 or self._features % 2):
            raise InvalidArgumentError(
                f"`rotary` (={self.rotary!r}) must be a base above 1, and the features of a head ({self._features}) an "
                "even number; or None."
            )

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn in training."""
        return self.dropout > 0

    @property
    def _key_heads(self) -> int:
        return self.num_key_heads or self.num_heads

    @property
    def _features(self) -> int:
        return self.embed_dim // self.num_heads

    @cached_property
    def _work(self) -> Partition:
        """The workers that attend, P_n x (along the sequence) x (along the heads)."""
        p_n, p_s, p_h = self.P_x.shape
        return self.P_x.create_cartesian_topology_partition(
            [p_n, 1, p_s] if self.exchange == "gather" else [p_n, p_s, p_h]
        )

    @property
    def _gathered(self) -> int:
        """The dimension of x that is gathered before attention, and scattered after it."""
        return 1 if self.exchange == "gather" else 2

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each parameter; each worker holds copies for its heads."""
        p_n, p_s, p_h = self._work.shape
        grid = self.P_x.create_cartesian_topology_partition
        d, e, groups = self._features, self.embed_dim, self._key_heads
        shapes: dict[str, tuple[int, ...]] = {"query": (self.num_heads, d), "key": (groups, d), "value": (groups, d)}
        if self.fused:
            shapes = {"qkv": (groups, self.num_heads // groups + 2, d)}
        split = {name: [p_n, p_s, p_h, *(1,) * (len(shape) - 1)] for name, shape in shapes.items()}
        specs = {name: TensorSpec((*shape, e), grid([*split[name], 1]), (0, 1)) for name, shape in shapes.items()}
        specs["out"] = TensorSpec((e, self.num_heads, d), grid([p_n, p_s, 1, p_h, 1]), (0, 1))
        if self.bias:
            specs |= {f"{name}_bias": TensorSpec(shape, grid(split[name]), (0, 1)) for name, shape in shapes.items()}
            specs["out_bias"] = TensorSpec((e,), self.P_x, (0, 1))
        return specs

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """Return this worker's blocks of the initial parameters: uniform in ±1/sqrt(n_e), and biases of 0."""
        specs, weights = self.param_specs(), UniformFanIn(self.embed_dim)
        initializers = {name: jax.nn.initializers.zeros if name.endswith("bias") else weights for name in specs}
        return initialize_params(specs, key, dtype, initializers, tuple(specs))

    def cache_specs(self, batch: int, length: int) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each part of a cache, for `dj.gather`; see `init_cache`."""
        if not self.causal or self._work.shape[1] > 1:
            raise InvalidArgumentError(
                "A cache requires `causal` (=True), and a sequence that is not split, or gathered: this layer has "
                f"`causal` (={self.causal}), and `P_x` ({shape_text(self.P_x.shape)}) with `exchange` "
                f"(={self.exchange!r})."
            )
        return cache_specs(self._work, batch, length, self._key_heads, self._features)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike = jnp.float32) -> Cache:
        """Return this worker's part of an empty cache: keys and values of its heads, for `length` elements.

        `layer(params, x, cache=cache)` continues the sequence in the cache with x, one element or several, and returns
        y and the extended cache. Its shapes don't change, so a jitted step is compiled once.

        **Arguments:**

        - `batch`: the number of sequences, n_b. - `length`: the capacity in elements.
        - `dtype`: of the cached keys and values, real floating-point.

        **Returns:** {"key", "value": n_b x length x n_kv x d, heads over P_h; "length": the number of elements so far}.

        **Raises:** `InvalidArgumentError` if the layer is not causal, or its sequence is split (except with "gather").
        """
        return empty(self.cache_specs(batch, length), dtype)

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> AttentionPlan:
        ranks, lengths = self.P_x.ranks, {1: None, 2: self.embed_dim}
        grid, dtype = real_grid("x", x, self.P_x, lengths)
        memory = memory_of(params, ranks)
        key_grid = grid if memory is None else real_grid(MEMORY, memory, self.P_x, lengths)[0]
        if key_grid.ranges[0] != grid.ranges[0]:
            raise PlanError(f"`{MEMORY}` (of shape {key_grid.extent}) must have the samples of `x` ({grid.extent}).")
        of_params = plan_replicated_params(params, self.param_specs())
        out = np.dtype(jnp.promote_types(dtype, params[ranks[0]]["out"].dtype))
        gather = plan_all_gather(x, self.P_x, self._gathered)
        gather_memory = None if memory is None else plan_all_gather(memory, self.P_x, self._gathered)
        whole, keys = (
            {w: ShapeDtype((*block.shape[:2], self.embed_dim), out) for w, block in plan.outputs.items()}
            for plan in (gather, gather_memory or gather)
        )
        scatter = plan_reduce_scatter(whole, self.P_x, self._gathered)
        heads = Heads(self.num_heads, self._key_heads, self._features, out, is_padded(params, keys))
        way = self.exchange if self._work.shape[1] > 1 else None  # of keys, if the sequence is split
        # A mask has this worker's queries only, so that its keys can't be processed by another worker.
        masked = any(name in shapes for shapes in params.values() for name in (MASK, SEEN))
        steps = ring_steps(heads, whole, keys, self._work, self.causal, balanced=not masked) if way == "ring" else ()
        to_heads = plan_to_heads(heads, x, memory or x, self._work) if way == "heads" else None
        regions, n_t = regions_of(self.num_heads, self._work, grid, to_heads), key_grid.extent[1]
        if any(name.startswith(PREFIX) for shapes in params.values() for name in shapes):
            plain = Heads(heads.queries, heads.keys, heads.features, out, False)
            check_cache(params, whole, plain.blocks(whole, self._work, heads.keys, heads.features))
            n_t = params[ranks[0]][f"{PREFIX}key"].shape[1]
        check_mask(params, regions, n_t)
        return AttentionPlan(
            blocks={worker: ShapeDtype(block.shape, out) for worker, block in x.items()},
            dtype=out,
            gather=gather,
            gather_memory=gather_memory,
            scatter=scatter,
            of_params=of_params,
            regions=regions,
            places=places_of(self._work, grid),
            key_places=places_of(self._work, key_grid),
            shape=(grid.extent[0], self.num_heads, grid.extent[1], n_t),
            steps=steps,
            to_heads=to_heads,
            causal=self.causal,
            padded=heads.padded,
        )

    @overload
    def __call__(
        self,
        params: Params,
        x: Array,
        *,
        memory: Array | None = None,
        attn_mask: Array | None = None,
        mask: Array | None = None,
        key_padding_mask: Array | None = None,
        cache: None = None,
        key: Array | None = None,
        training: bool = True,
    ) -> Array: ...
    @overload
    def __call__(
        self,
        params: Params,
        x: Array,
        *,
        cache: Cache,
        attn_mask: Array | None = None,
        mask: Array | None = None,
        key_padding_mask: Array | None = None,
        key: Array | None = None,
        training: bool = True,
    ) -> tuple[Array, Cache]: ...
    @layer_call
    def __call__(
        self,
        params: Params,
        x: Array,
        *,
        memory: Array | None = None,
        attn_mask: Array | None = None,
        mask: Array | None = None,
        key_padding_mask: Array | None = None,
        cache: Cache | None = None,
        key: Array | None = None,
        training: bool = True,
    ) -> Any:
        """Apply the layer.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block on P_x; outside P_x a zero-volume array.
        - `memory`: the source of keys and values (cross-attention), this worker's block on P_x: with x's samples, of
          any length. Not allowed if the layer is causal, or with a cache. Default: x.
        - `attn_mask`: as in PyTorch: booleans, True where a query does **not** see a key (JAX and Flax mean the
          opposite: `mask`); or numbers added to the scores, which are differentiable. Queries x keys, or samples x
          heads x queries x keys, where the first two may be 1: this worker's samples, heads and queries (with "gather"
          and "heads": its share of the heads, and all queries), and all keys (with a cache: its places). A replicated
          mask with a gradient goes through `dj.replicated`. Outside P_x anything.
        - `mask`: in place of `attn_mask`, as in `jax.nn.dot_product_attention` and Flax: booleans of the same shape,
          True where a query **sees** a key. (A query that sees none gets 0; in JAX the mean of all values.)
        - `key_padding_mask`: as in PyTorch: booleans, True for elements of the memory that no query sees. It covers
          this worker's samples and its part of the sequence (with "gather": all of it), the same along P_h. An element
          that sees nothing gets 0 from all heads. A cache keeps the mask. Outside P_x anything.
        - `cache`: from `init_cache`, or the previous call. Dropout is off then.
        - `key`, `training`: with `dropout`, a JAX random key, the same on every worker; and whether to drop.

        **Returns:** this worker's block of y, of x's shape; outside P_x, `x`. With a cache, the pair of y and the cache
        after x; if x exceeds the cache's capacity, y is NaN.

        **Raises:** `InvalidTypeError` for a flag that is not True or False, `InvalidArgumentError` for arguments that
        exclude each other or a missing key; `PlanError`, on every worker of P_x, if x or another array does not fit.
        """
        if memory is not None and (cache is not None or self.causal):
            raise InvalidArgumentError("`memory` requires a layer that is not `causal`, and no `cache`.")
        if attn_mask is not None and mask is not None:
            raise InvalidArgumentError(
                "`attn_mask` (True: not seen, as in PyTorch) and `mask` (True: seen, as in JAX) exclude each other."
            )
        key = checked_key(key, training, self.draws and cache is None)
        if not self.P_x.active:
            outside(self.P_x.world, x)
            return x if cache is None else (x, cache)
        world = self.P_x.world
        with jax.named_scope("DistributedMultiHeadAttention"):
            params = self._opened(params)
            # A mask for all samples and heads gets those dimensions, so that the plan knows one form only.
            if attn_mask is not None and getattr(attn_mask, "ndim", None) == 2:
                attn_mask = attn_mask[None, None]
            if mask is not None and getattr(mask, "ndim", None) == 2:
                mask = mask[None, None]
            others = {MEMORY: memory, MASK: attn_mask, SEEN: mask, PADDING: key_padding_mask}
            given = {name: value for name, value in others.items() if value is not None}
            # One agreement for everything that this call brings: a missing mask on one worker is told, not waited for.
            plan = self._agree_on_plan(params | entries_of(cache) | given, x)
            if mask is not None:
                attn_mask = ~mask
            own = {name: each.run(world, params[name]).astype(plan.dtype) for name, each in plan.of_params.items()}
            x = plan.gather.run(world, x).astype(plan.dtype)
            q, k, v = self._projected(own, x)
            if plan.gather_memory is not None and memory is not None:
                _, k, v = self._projected(own, plan.gather_memory.run(world, memory).astype(plan.dtype))
            if self.rotary is not None:
                places = (plan.places[world.rank], plan.key_places[world.rank])
                # Angles are those of the position in the whole sequence, whichever worker holds it.
                firsts = [at[0] if cache is None else cache["length"] for at in places]
                q, k = (rotated(a, b, self.rotary) if a.size else a for a, b in zip((q, k), firsts, strict=True))
            if cache is not None:
                heads, cache = remembered(cache, q, k, v, key_padding_mask, attn_mask)
            else:
                block = block_of(k, v, key_padding_mask)
                heads = plan.run(world, q, block, Extras(attn_mask, key), self.dropout)
            # Heads are summed over before the bias is added: it must count once, not once a worker.
            y = plan.scatter.run(world, tie(jnp.einsum("nshd,ehd->nse", heads, own["out"]), heads, own["out"]))
            y = y + own["out_bias"] if self.bias else y
            return y if cache is None else (y, cache)

    apply = __call__

    def _projected(self, own: Params, x: Array) -> tuple[Array, Array, Array]:
        """Return queries, keys and values: samples x sequence x heads x features."""
        if self.fused:
            y = tie(jnp.einsum("nse,gkde->nsgkd", x, own["qkv"]), x, own["qkv"])
            y = y + own["qkv_bias"] if self.bias else y
            q = y[:, :, :, :-2].reshape(*y.shape[:2], y.shape[2] * (y.shape[3] - 2), self._features)
            return q, y[:, :, :, -2], y[:, :, :, -1]
        parts = []
        for name in ("query", "key", "value"):
            y = jnp.einsum("nse,hde->nshd", x, own[name])
            parts.append(tie(y + own[f"{name}_bias"] if self.bias else y, x, own[name]))
        return parts[0], parts[1], parts[2]
