"""The distributed linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, overload

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.functional.products import ProductPlan, RouteName, plan_product, routes_between
from distdl_jax.nn.base.parameters import ParamShapeDtypes
from distdl_jax.nn.base.weighted_layer import WeightedLayer, check_not_split, weight_partition
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.validation import checked_integer

Side = Literal["in_features", "out_features"]


def _check_features_alone(P_x: Partition, P_y: Partition) -> None:
    """Reject partitions from which P_W can't be derived: they cut more than the batch and the features."""
    if any(P.dim < 2 or set(P.shape[1:-1]) - {1} for P in (P_x, P_y)) or P_x.shape[0] != P_y.shape[0]:
        raise InvalidArgumentError(
            f"`P_x` ({shape_text(P_x.shape)}) and `P_y` ({shape_text(P_y.shape)}) must be P_n x 1 x ... x P_f, with "
            "the same number of workers along the batch, P_n, if `P_W` is not given. `DistributedPointwise` accepts x "
            "cut in other dimensions."
        )


@dataclass(frozen=True, init=False, repr=False)
class DistributedLinear(WeightedLayer):
    r"""An affine map y = x W^T + b whose input, output and weight are split over workers.

    The blocks of x are sent down the columns of P_W, each worker multiplies by its block of W, and the products are
    summed along the rows of P_W into the blocks of y. Results and gradients equal the sequential layer's, block for
    block.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x ... x n_in | P_x: P_n x P_fi |
    | y | n_b x ... x n_out | P_y: P_n x P_fo |
    | W (`params["weight"]`) | n_out x n_in | P_W's first slice, P_fo x P_fi |
    | b (`params["bias"]`) | n_out | the 0th column of that slice |

    P_W has shape P_fo x P_fi, or P_n x P_fo x P_fi if the batch is split too. Then W and b are broadcast along P_n, and
    their gradients are summed along it. With `sharded` they are also cut along n_out over P_n, and gathered: W over
    P_fo P_n x P_fi, b over P_fo P_n. Then each worker holds its share of them, and of their optimiser state.

    *Split along the sequence*: P_x may have the shape P_n x ... x P_fo x P_fi, with P_W's workers in order. Then the
    dimension of x before the features is cut over P_fo, and gathered instead of broadcast. P_y may have the shape P_n x
    ... x P_fi x P_fo, P_W's workers with those two dimensions exchanged; then sums are scattered along that dimension,
    and y is cut over P_fi. With `replicated` the workers along P_fo hold copies of x instead of parts, so nothing
    moves, and those along P_fi get copies of the sum. The gradient of a replicated tensor is the sum of the partial
    gradients on its workers. `ColumnParallelLinear` and `RowParallelLinear` derive these partitions.

    *Without P_W* one side of W is cut over the workers along the last dimension, the side of x or y that is cut. If
    both are, on the same workers, `split` chooses: with "out_features" (P_W p x 1) x is gathered along its features,
    and each worker multiplies by its rows of W; with "in_features" (P_W 1 x p) each multiplies by its columns, and the
    sums are scattered along y's features. So a single partition P suffices: `DistributedLinear(P, in_features=...,
    out_features=...)`.

    Blocks are balanced along the features, divisible or not. Along the batch they may have any length, including 0, the
    same for all workers of P_x at one index along P_n; y's follow x's. P_x, P_y and P_W may be equal, overlap or be
    disjoint. Other dimensions of x between the batch and the features are not split.

    `DistributedPointwise` maps unsplit features, with a copy of W on every worker, on one partition.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: partitions of the shapes above. In P_x and P_y all dimensions between batch and features
      are 1. Default of P_y: P_x; of P_W: as above.
    - `in_features`, `out_features`: n_in and n_out.
    - `bias`: whether to add b.
    - `replicated`: whether workers of P_x and P_y along the dimension before the features hold copies, not parts.
    - `sharded`: whether the parameters are cut over P_n, not on its first workers alone.
    - `split`: "in_features" or "out_features", the side of W to cut if P_x and P_y both cut features and P_W is not
      given. Default: the one that moves less, with ties resolved to the output features.

    **Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if the
    partitions are inconsistent.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = DistributedLinear(P, P, P, in_features=3, out_features=2)
    >>> params = layer.init(jax.random.key(0))
    >>> layer(params, jax.numpy.ones((5, 3))).shape
    (5, 2)

    Source: DistDL documentation, "linear"; Hewett and Grady (2020), affine layer; Korthikanti et al. (2022),
    arXiv:2205.05198, for the split sequence; Rajbhandari et al. (2020), arXiv:1910.02054, for `sharded`.
    """

    P_x: Partition
    P_y: Partition
    P_W: Partition
    in_features: int
    out_features: int
    bias: bool
    replicated: bool
    sharded: bool

    @overload
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
        *,
        in_features: int,
        out_features: int,
        bias: bool = True,
        replicated: bool = False,
        sharded: bool = False,
        split: Side | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None,
        P_W: Partition | None,
        in_features: int,
        out_features: int,
        bias: bool = True,
        replicated: bool = False,
        sharded: bool = False,
        split: Side | None = None,
    ) -> None: ...
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
        in_features: int | None = None,
        out_features: int | None = None,
        bias: bool = True,
        replicated: bool = False,
        sharded: bool = False,
        split: Side | None = None,
    ) -> None:
        n_in, n_out = checked_integer("in_features", in_features, 1), checked_integer("out_features", out_features, 1)
        P_y = P_x if P_y is None else P_y
        if P_W is None:
            check_partitions(P_x=P_x, P_y=P_y)
            _check_features_alone(P_x, P_y)
            P_W = weight_partition(P_x, P_y, -1, split, {"in_features": n_in, "out_features": n_out})
        else:
            check_partitions(P_W=P_W, P_x=P_x, P_y=P_y)
            check_not_split(split)
        if P_W.dim not in (2, 3):
            raise InvalidArgumentError(
                f"`P_W` ({shape_text(P_W.shape)}) must have two dimensions, P_fo x P_fi: workers along the output "
                "features, and along the input features; or three, P_n x P_fo x P_fi, with those along the batch."
            )
        self._store(P_x=P_x, P_y=P_y, P_W=P_W, in_features=n_in, out_features=n_out)
        self._store(bias=bias, replicated=replicated, sharded=sharded)
        self._check_routes()

    @cached_property
    def _routes(self) -> tuple[RouteName | None, RouteName | None]:
        return routes_between(self.P_x, self.P_y, self._work, self.replicated)

    def _check_routes(self) -> None:
        """Reject partitions without a route between them, and copies that no worker holds."""
        p_n, p_fo, p_fi = self._work.shape
        given = f"if `P_W` is {shape_text(self.P_W.shape)}, {'P_n x ' * (self.P_W.dim == 3)}P_fo x P_fi"
        ends = (("P_x", self.P_x, p_fo, p_fi, "P_fi"), ("P_y", self.P_y, p_fi, p_fo, "P_fo"))
        for way, (name, P, across, along, letter) in zip(self._routes, ends, strict=True):
            if way is None:
                raise InvalidArgumentError(
                    f"`{name}` ({shape_text(P.shape)}) must have shape {p_n} x {along}, P_n x {letter}, {given}; "
                    f"or {p_n} x {across} x {along} on P_W's workers, to split the sequence. To split the batch, "
                    "give P_W three dimensions, P_n x P_fo x P_fi; with two, P_n is 1."
                )
        if self.replicated and "replicated" not in self._routes:
            raise InvalidArgumentError(
                f"`replicated` (=True) requires workers that hold copies: `P_x` of {p_n} x {p_fo} x {p_fi}, {given}, "
                f"or `P_y` of {p_n} x {p_fi} x {p_fo}."
            )

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.out_features, self.in_features)} | ({"bias": (self.out_features,)} if self.bias else {})

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> ProductPlan:
        from_x, to_y = self._routes
        assert from_x and to_y  # checked at construction
        weights, widths = self._plan_weights(params), (self.in_features, self.out_features)
        return plan_product(x, weights, self.P_x, self.P_y, self._work, (from_x, to_y), *widths)

    def __repr__(self) -> str:
        flags = "".join(f", {name}" for name in ("replicated", "sharded") if getattr(self, name))
        return (
            f"DistributedLinear({self.in_features} -> {self.out_features}, bias={self.bias}{flags}, "
            f"P_x {shape_text(self.P_x.shape)}, P_y {shape_text(self.P_y.shape)}, P_W {shape_text(self.P_W.shape)})"
        )
