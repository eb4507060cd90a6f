"""The distributed linear layer."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.all_gather import plan_all_gather, plan_reduce_scatter
from distdl_jax.functional.all_sum_reduce import plan_all_sum_reduce
from distdl_jax.functional.broadcast import plan_broadcast, plan_sum_reduce
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes, Unmoved
from distdl_jax.nn.base.matmul_plan import ProductPlan, products
from distdl_jax.nn.base.parameters import (
    ParamShapeDtypes,
)
from distdl_jax.nn.base.weight_partition import check_not_split, moves_features, weight_partition
from distdl_jax.nn.base.weighted_layer import WeightedLayer
from distdl_jax.partitions.partition import CartesianPartition, Partition, check_partitions
from distdl_jax.plans.decomposition import balanced_sizes, index_of
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.tracing.world import Workers
from distdl_jax.validation import checked_integer


@dataclass(frozen=True)
class LocalAffine:
    """The product of this worker's copy of x with its block of the weight.

    - `weight_shape`: the shape of the block.
    - `adds_bias`: whether the bias is added here; one worker of those whose products are summed adds it.
    """

    weight_shape: tuple[int, ...]
    adds_bias: bool

    def output(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the product, from the shape of the copy of x."""
        return *x[:-1], self.weight_shape[0]

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """Multiply x and weight, which have one dtype."""
        y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
        return y if bias is None else y + bias


@dataclass(frozen=True)
class DistributedLinear(WeightedLayer):
    r"""An affine map y = x W^T + b whose input, output and weight are split over workers.

    The blocks of x go down the columns of P_W, each worker multiplies with its block of W, and the products are
    summed along the rows of P_W into the blocks of y. Forward and gradients equal the sequential
    layer's block for block.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x ... x n_in | P_x: P_n x P_fi |
    | y | n_b x ... x n_out | P_y: P_n x P_fo |
    | W (`params["weight"]`) | n_out x n_in | P_W's first slice, P_fo x P_fi |
    | b (`params["bias"]`) | n_out | the 0th column of that slice |

    P_W has shape P_fo x P_fi, with P_n in front where the batch is split too: P_n x P_fo x P_fi. Then W and b are
    broadcast along P_n, and their gradients are summed along it. With `sharded` they are cut along n_out over P_n, too,
    and gathered: W over P_fo P_n x P_fi, b over P_fo P_n. Each worker has its share of them then, and of what an
    optimiser keeps for them.

    *Split along the sequence* (Megatron's pair of layers): P_x may have the shape P_n x ... x P_fo x P_fi, with the
    workers of P_W in their order. Then the dimension of x in front of the features is cut over P_fo, and gathered where
    it would be broadcast. P_y may have the shape P_n x ... x P_fi x P_fo, P_W's workers with those two dimensions
    exchanged; then sums are scattered along that dimension, and y is cut over P_fi. So a column parallel layer has P_W
    p x 1, P_x 1 x p x 1 and P_y 1 x 1 x p, and a row parallel one behind it P_W 1 x p, P_x 1 x 1 x p and P_y 1 x p x 1.
    With `replicated` the workers along P_fo hold copies of x in place of parts, from which nothing moves, and those
    along P_fi get copies of the sum. A gradient of copies is in shares, one on each worker, that add up.

    *Without P_W* one side of W is cut over the workers along the last dimension, that of x or y which is cut. Where
    both are, on the same workers, `split` says which: with "out_features" (P_W p x 1) x is gathered along its features,
    and each worker multiplies with its rows of W; with "in_features" (P_W 1 x p) each multiplies with its columns, and
    the sums are scattered along y's features. So one partition P serves for everything:
    `DistributedLinear(P, in_features=..., out_features=...)`.

    Blocks are balanced along the features, which need not divide. Along the batch they may be of any length, also 0,
    the same for all workers of P_x at one place along P_n; y's are like x's. P_x, P_y and P_W may be equal, overlap or
    be disjoint. Dimensions of x between the batch and the features, any number of them, are not split.

    `DistributedPointwise` maps features that are not split, with a copy of W on every worker, on one partition.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: partitions of the shapes above. In P_x and P_y every dimension between is 1. Default of P_y:
      P_x; of P_W: as above.
    - `in_features`, `out_features`: n_in and n_out.
    - `bias`: whether there is a b.
    - `replicated`: whether workers that P_x and P_y have in front of the features hold copies, not parts.
    - `sharded`: whether the parameters are cut over P_n, not on its first workers alone.
    - `split`: "in_features" or "out_features", the side of W that is cut where P_x and P_y both cut features and P_W is
      not given. Default: the one for which less moves, the output features where they are no fewer.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where the
    partitions don't fit each other.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = DistributedLinear(P, P, P, in_features=3, out_features=2)
    >>> params = layer.init(jax.random.key(0))
    >>> layer(params, jax.numpy.ones((5, 3))).shape
    (5, 2)

    Source: DistDL documentation, "linear"; Hewett and Grady (2020), affine layer; Korthikanti et al. (2022),
    arXiv:2205.05198, for what is split along the sequence; Rajbhandari et al. (2020), arXiv:1910.02054, for `sharded`.
    """

    P_x: Partition
    P_y: Any = None  # a partition, from __post_init__ on
    P_W: Any = None
    in_features: int = None  # type: ignore[assignment]  # which is refused
    out_features: int = None  # type: ignore[assignment]
    bias: bool = True
    replicated: bool = False
    sharded: bool = False
    split: InitVar[Literal["in_features", "out_features"] | None] = None

    def __post_init__(self, split: str | None) -> None:
        features = {name: checked_integer(name, getattr(self, name), 1) for name in ("in_features", "out_features")}
        vars(self).update(P_y=self.P_x if self.P_y is None else self.P_y)
        if self.P_W is None:
            check_partitions(P_x=self.P_x, P_y=self.P_y)
            self._check_no_others_are_cut()
            vars(self).update(P_W=weight_partition(self.P_x, self.P_y, -1, split, features))
        else:
            check_partitions(P_W=self.P_W, P_x=self.P_x, P_y=self.P_y)
            check_not_split(split)
        if self.P_W.dim not in (2, 3):
            raise InvalidArgumentError(
                f"`P_W` ({shape_text(self.P_W.shape)}) must have two dimensions, P_fo x P_fi: workers along the output "
                "features, and along the input features; or three, P_n x P_fo x P_fi, with those along the batch."
            )
        p_n, p_fo, p_fi = self._work.shape
        given = f"where `P_W` is {shape_text(self.P_W.shape)}, {'P_n x ' if self.P_W.dim == 3 else ''}P_fo x P_fi"
        for name, P, workers, along in (("P_x", self.P_x, p_fi, "P_fi"), ("P_y", self.P_y, p_fo, "P_fo")):
            if P.dim < 2 or not (
                P.shape == (p_n, *(1,) * (P.dim - 2), workers) or P.ranks == self._together(name) or self._moves(name)
            ):
                across = p_fo if name == "P_x" else p_fi
                raise InvalidArgumentError(
                    f"`{name}` ({shape_text(P.shape)}) must have shape {p_n} x {workers}, P_n x {along}, {given}; "
                    f"or {p_n} x {across} x {workers} on P_W's workers, to split the sequence. To split the batch, "
                    "give P_W three dimensions, P_n x P_fo x P_fi; with two, P_n is 1."
                )
        if self.replicated and not (self._together("P_x") or self._together("P_y")):
            raise InvalidArgumentError(
                f"`replicated` (=True) takes workers that hold copies: `P_x` of {p_n} x {p_fo} x {p_fi}, {given}, or "
                f"`P_y` of {p_n} x {p_fi} x {p_fo}."
            )

    def _check_no_others_are_cut(self) -> None:
        """Refuse partitions from which P_W does not follow: they cut more than the batch and the features."""
        if any(P.dim < 2 or set(P.shape[1:-1]) - {1} for P in (self.P_x, self.P_y)) or (
            self.P_x.shape[0] != self.P_y.shape[0]
        ):
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(self.P_x.shape)}) and `P_y` ({shape_text(self.P_y.shape)}) must be P_n x 1 x ... "
                "x P_f, with one number of workers along the batch, P_n, where `P_W` is not given. "
                "`DistributedPointwise` takes x that is cut in other dimensions."
            )

    def _moves(self, name: str) -> bool:
        """Say whether x is gathered, or y scattered, along its features, on the workers that multiply."""
        P, side = (self.P_x, 2) if name == "P_x" else (self.P_y, 1)
        is_cut = P.shape == (self._work.shape[0], *(1,) * (P.dim - 2), P.shape[-1])
        return is_cut and moves_features(P, -1, self._work, side)

    def _along_features(self, P: Partition, blocks: ShapeDtypes) -> CartesianPartition:
        """Return P with as many dimensions as the blocks have."""
        dims = len(blocks[P.ranks[0]].shape)
        return P.create_cartesian_topology_partition([P.shape[0], *(1,) * (dims - 2), P.shape[-1]])

    def _together(self, name: str) -> Workers:
        """Return the workers that P_x or P_y must have, in this order, if as many as multiply; else none."""
        p_n, p_fo, p_fi = self._work.shape
        P, across, along = (self.P_x, p_fo, p_fi) if name == "P_x" else (self.P_y, p_fi, p_fo)
        if across == 1 or P.dim < 3 or P.shape != (p_n, *(1,) * (P.dim - 3), across, along):
            return ()
        order = np.reshape(self._work.ranks, self._work.shape)
        return tuple((order if name == "P_x" else order.transpose(0, 2, 1)).ravel().tolist())

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.out_features, self.in_features)} | ({"bias": (self.out_features,)} if self.bias else {})

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> ProductPlan:
        self._check_blocks(x)
        work = self._work
        p_n, p_fo, p_fi = work.shape
        to_work: MovementPlan
        if self._moves("P_x"):
            P_x = self._along_features(self.P_x, x)
            to_work = plan_all_gather(x, P_x, P_x.dim - 1)
        elif not self._together("P_x"):
            to_work = plan_broadcast(x, self.P_x.create_cartesian_topology_partition([p_n, 1, p_fi]), work)
        elif self.replicated:
            to_work = Unmoved(x)
        else:
            to_work = plan_all_gather(x, self.P_x, self.P_x.dim - 2)
        of_params, local = self._parameters.plan(params, self.bias), self._local()
        parts_of_y = products(to_work.after(x), of_params, local)
        to_y: MovementPlan
        if self._moves("P_y"):
            P_y = self._along_features(self.P_y, parts_of_y)
            to_y = plan_reduce_scatter(parts_of_y, P_y, P_y.dim - 1)
        elif not self._together("P_y"):
            to_y = plan_sum_reduce(parts_of_y, work, self.P_y.create_cartesian_topology_partition([p_n, p_fo, 1]))
        elif self.replicated:
            to_y = plan_all_sum_reduce(parts_of_y, work, 2)
        else:
            to_y = plan_reduce_scatter(parts_of_y, self.P_y, self.P_y.dim - 2)
        return ProductPlan(to_work, of_params, parts_of_y, to_y, local)

    def _local(self) -> dict[int, LocalAffine]:
        """Return the product of each worker that multiplies."""
        _, p_fo, p_fi = self._work.shape
        rows, columns = balanced_sizes(self.out_features, p_fo), balanced_sizes(self.in_features, p_fi)
        indices = (index_of(rank, self._work.shape) for rank in range(self._work.size))
        return {
            worker: LocalAffine((rows[i], columns[j]), adds_bias=j == 0)
            for worker, (_, i, j) in zip(self._work.ranks, indices, strict=True)
        }

    def _check_blocks(self, x: ShapeDtypes) -> None:
        """Refuse blocks of x that don't have their share of the features."""
        shares = balanced_sizes(self.in_features, self.P_x.shape[-1])
        for rank, worker in enumerate(self.P_x.ranks):
            block, shape = rank % len(shares), x[worker].shape
            if len(shape) < 2 or shape[-1] != shares[block]:
                raise PlanError(
                    f"On worker {worker}: `x` has shape {shape}, but block {block} must be ... x {shares[block]}: "
                    f"{self.in_features} features, balanced over {len(shares)} workers."
                )

    def __repr__(self) -> str:
        flags = "".join(f", {name}" for name in ("replicated", "sharded") if getattr(self, name))
        return (
            f"DistributedLinear({self.in_features} -> {self.out_features}, bias={self.bias}{flags}, "
            f"P_x {shape_text(self.P_x.shape)}, P_y {shape_text(self.P_y.shape)}, P_W {shape_text(self.P_W.shape)})"
        )
