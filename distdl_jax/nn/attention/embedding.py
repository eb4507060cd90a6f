"""Embedding, with a split vocabulary or split features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.all_gather import plan_reduce_scatter
from distdl_jax.functional.block_checks import common_dtype, outside
from distdl_jax.functional.broadcast import plan_broadcast, plan_sum_reduce
from distdl_jax.functional.collectives import as_indices
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes
from distdl_jax.functional.products import SummedPlan
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes, unboxed
from distdl_jax.nn.base.weighted_layer import WeightedLayer
from distdl_jax.partitions.initialization import Initializer
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import balanced_ranges, index_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import World
from distdl_jax.validation import checked_integer


@dataclass(frozen=True)
class EmbeddingPlan(SummedPlan):
    """The plan of an embedding.

    - `rows`: by world rank, the first and the last row (excluded) of each worker's block, and its number of features.
    - `padding_idx`: the index whose row has no gradient.
    """

    rows: Mapping[int, tuple[int, int, int]] = field(hash=False)
    padding_idx: int | None

    def after(self, shape_dtypes: ShapeDtypes) -> dict[int, ShapeDtype]:
        """Return the blocks of all workers: those that take no part hold placeholders of y, no longer of indices."""
        dtype = next(iter(self.products.values())).dtype
        return {**{worker: ShapeDtype(x.shape, dtype) for worker, x in shape_dtypes.items()}, **self.outputs}

    def run(self, world: World, params: Params, x: Array) -> Array:
        """Return this worker's block of the output."""
        product = self.products[world.rank]
        x = as_indices(self.to_work.run(world, x))
        block = self.rows.get(world.rank)
        start, stop, features = block or (0, 0, 0)
        weight, _ = self.of_params.run(world, params, (stop - start, features) if block else (0,))
        if block is None or 0 in (*product.shape, stop - start):
            part = tie(jnp.zeros(product.shape, product.dtype), x, weight)
        else:
            known = (x >= start) & (x < stop)
            if self.padding_idx is not None and start <= self.padding_idx < stop:
                row = self.padding_idx - start
                weight = weight.at[row].set(jax.lax.stop_gradient(weight[row]))
            rows = jnp.take(weight, jnp.clip(x - start, 0, stop - start - 1), axis=0)
            part = jnp.where(known[..., None], rows, 0)
        return self.to_y.run(world, tie(part, x, *params.values()))


@dataclass(frozen=True)
class DistributedEmbedding(WeightedLayer):
    r"""A table row for each index; vocabulary, features and the batch of indices may be split.

    | tensor | global shape | partition |
    |---|---|---|
    | x, integers | n_b x ... | P_x: P_n x 1 x ... |
    | y | n_b x ... x n_e | P_y: P_n x 1 x ... x P_e |
    | W (`params["weight"]`) | n_v x n_e | P_W's first slice, P_v x P_e |

    P_W has shape P_v x P_e, or P_n x P_v x P_e if the batch is split. The indices are sent to all workers of P_W at
    their index along P_n, each looks up those in its rows, and the results, at most one of which is nonzero, are summed
    over P_v. Rows and features are balanced and need not divide. The backward pass reverses this.

    With P_y of shape P_n x 1 x ... x P_v x P_e, on P_W's workers in order, sums are scattered along the last dimension
    of the indices, the sequence, so y is cut over P_v there.

    Its weight has the layout of a linear layer to the vocabulary, so a tied output layer is `DistributedLinear(P_y,
    P_logits, P_W, n_e, n_v, bias=False)` called with the embedding's parameters.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: partitions of these shapes; teams may be equal, overlap or be disjoint.
    - `num_embeddings`, `embedding_dim`: n_v and n_e.
    - `padding_idx`: an index whose row is initially 0 and has no gradient.
    - `sharded`: whether the weight is also cut along the vocabulary over P_n, and gathered, as in `DistributedLinear`.

    An index outside the vocabulary gives zeros.

    **Raises:** `InvalidTypeError` if `sharded` is not True or False; `InvalidArgumentError`, on every worker, if
    arguments are inconsistent; when applied, `PlanError`.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = DistributedEmbedding(P, P.grid([1, 1, 1]), P, 7, 3)
    >>> layer(layer.init(jax.random.key(0)), jax.numpy.arange(4).reshape(2, 2)).shape
    (2, 2, 3)

    Source: Narayanan et al. (2021), arXiv:2104.04473; PyTorch's Embedding.
    """

    P_x: Partition
    P_y: Partition
    P_W: Partition
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        check_partitions(P_W=self.P_W, P_x=self.P_x, P_y=self.P_y)
        checked_integer("num_embeddings", self.num_embeddings, 1)
        checked_integer("embedding_dim", self.embedding_dim, 1)
        if self.P_W.dim not in (2, 3):
            raise InvalidArgumentError(
                f"`P_W` ({shape_text(self.P_W.shape)}) must have two dimensions, P_v x P_e, workers along the "
                "vocabulary and along the features; or three, P_n x P_v x P_e."
            )
        p_n, _, p_e = self._work.shape
        for name, P, shape in (
            ("P_x", self.P_x, (p_n, *(1,) * (self.P_x.dim - 1))),
            ("P_y", self.P_y, (p_n, *(1,) * (self.P_x.dim - 1), p_e)),
        ):
            if P.shape != shape and not (name == "P_y" and self._cuts_sequence):
                raise InvalidArgumentError(
                    f"`{name}` ({shape_text(P.shape)}) must have shape {shape_text(shape)}, since `P_W` is "
                    f"{shape_text(self.P_W.shape)} and `P_x` has {self.P_x.dim} dimensions."
                )
        if (
            self.padding_idx is not None
            and not 0 <= checked_integer("padding_idx", self.padding_idx) < self.num_embeddings
        ):
            raise InvalidArgumentError(
                f"`padding_idx` (={self.padding_idx}) must be an index, 0 to {self.num_embeddings - 1}."
            )

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    @property
    def takes_indices(self) -> bool:
        """Whether the input holds only integers: True."""
        return True

    @property
    def _cuts_sequence(self) -> bool:
        """Whether y is cut over P_v along the last dimension of the indices."""
        p_n, p_v, p_e = self._work.shape
        shape = (p_n, *(1,) * (self.P_x.dim - 2), p_v, p_e)
        return p_v > 1 and self.P_x.dim > 1 and (self.P_y.shape, self.P_y.ranks) == (shape, self._work.ranks)

    def init(  # type: ignore[override]
        self, key: Array, dtype: DTypeLike = jnp.float32, *, weight_init: Initializer | None = None
    ) -> Params:
        """Return this worker's block of the initial weight, standard normal as in PyTorch, for any partition."""
        params = super().init(key, dtype, weight_init=weight_init or jax.nn.initializers.normal(1))
        spec = self.param_specs()["weight"]
        if self.padding_idx is None or spec.box is None:
            return params
        start, stop = spec.box[0]
        rows = jnp.arange(start, stop)[:, None]
        return {"weight": jnp.where(rows == self.padding_idx, 0, params["weight"]).astype(params["weight"].dtype)}

    def _param_dtype(self, x: ShapeDtypes) -> np.dtype:
        return np.dtype(np.float32)

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> EmbeddingPlan:
        dtype = common_dtype("x", x, self.P_x.ranks)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise PlanError(f"`x` must hold integers, indices of rows, but is {dtype}.")
        work = self._work
        p_n, p_v, p_e = work.shape
        to_work = plan_broadcast(x, self.P_x.create_cartesian_topology_partition([p_n, 1, 1]), work)
        of_params, copies = self._plan_weights(params), to_work.after(x)
        rows, columns = balanced_ranges(self.num_embeddings, p_v), balanced_ranges(self.embedding_dim, p_e)
        blocks, products = {}, {}
        for rank, worker in enumerate(work.ranks):
            _, i, j = index_of(rank, work.shape)
            blocks[worker] = (*rows[i], columns[j][1] - columns[j][0])
        # Each worker looks up the indices whose rows it holds, and gives zeros for the others: the sum over P_v is the
        # row.
        for worker, copy in copies.items():
            shape = (*copy.shape, blocks[worker][2]) if worker in blocks else (*copy.shape[:1], 0)
            products[worker] = ShapeDtype(shape, of_params.dtype)
        to_y: MovementPlan
        if self._cuts_sequence:
            to_y = plan_reduce_scatter(products, self.P_y, self.P_y.dim - 2)
        else:
            to_y = plan_sum_reduce(products, work, self.P_y.create_cartesian_topology_partition([p_n, 1, p_e]))
        return EmbeddingPlan(to_work, of_params, products, to_y, blocks, self.padding_idx)

    @layer_call
    def __call__(self, params: Params, x: Array) -> Array:
        """Apply the layer.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block of the indices on P_x; elsewhere a zero-volume array of integers.

        **Returns:** this worker's block on P_y; elsewhere a zero-volume array of the weight's dtype.

        **Raises:** `PlanError`, on every worker of the layer, if x or the weight does not fit.
        """
        if self.P_W.world.rank not in self._team:
            outside(self.P_W.world, x)
            return x.astype(np.dtype(unboxed(params)["weight"].dtype))  # a placeholder of y for the next layer
        return super().__call__(params, x)

    apply = __call__
