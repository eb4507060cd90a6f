"""Graph convolution: each node combines its own features with the aggregate of its neighbours'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, is_differentiable, owned_grid
from distdl_jax.functional.plan import BlocksPlan, Plan, ShapeDtypes
from distdl_jax.functional.rows import Rows
from distdl_jax.functional.segments import plan_grouped
from distdl_jax.functional.take import TakePlan, checked_segments, plan_segment_sum, plan_take
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes
from distdl_jax.nn.base.weighted_layer import AffineLayer
from distdl_jax.nn.dense.pointwise import DistributedPointwise, PointwisePlan
from distdl_jax.partitions.initialization import Initializer, UniformFanIn, initialize_params
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import balanced_range, balanced_ranges, index_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.validation import checked_boolean, checked_integer

Aggregation = Literal["sum", "mean", "symmetric", "max"]


@dataclass(frozen=True)
class GraphConvPlan(BlocksPlan):
    """The plans of the parts: nodes to edges, edges to their receivers, and the two linear maps, which sum to y."""

    to_edges: TakePlan
    to_nodes: Plan
    linear: Mapping[str, PointwisePlan]


@dataclass(frozen=True, init=False)
class DistributedGraphConv(AffineLayer):
    r"""A graph convolution: a linear map of each node's aggregated neighbours, plus one of the node itself.

    y_i = W_neighbours a_i + b + W_root x_i, where a_i is the sum over the edges from s_k to r_k = i of x_{s_k}, or

    | `aggregation` | a_i | a layer of PyTorch Geometric |
    |---|---|---|
    | "sum" | the sum | `GraphConv` |
    | "mean" | the sum, divided by the number of edges to i; 0 where there is none | `SAGEConv` |
    | "symmetric" | the sum of x_{s_k} / sqrt(d_{s_k} d_i), with d_i edges to i | `GCNConv`, where `root=False` |
    | "max" | the largest of each feature; 0 where there is none | `SAGEConv(aggr="max")` |

    | tensor | global shape | partition |
    |---|---|---|
    | x | ... x num_nodes x in_features | P_x |
    | y | ... x num_nodes x out_features | P_x |
    | W_neighbours (`params["weight"]`), W_root (`params["root"]`) | out_features x in_features | P_x, with copies |
    | b (`params["bias"]`) | out_features | P_x, with copies |

    All dimensions may be split; the blocks of nodes are balanced. Parameters are stored as in `DistributedPointwise`.
    `functional.take` fetches the neighbours' rows, and sums for other workers' rows are sent to them, as in
    `functional.segment_sum`. The work is divided by edges, in balanced blocks of their given order.

    **Arguments:**

    - `P_x`: the partition of input and output, of two dimensions or more; those before the nodes are batch dimensions.
    - `in_features`, `out_features`: per node.
    - `senders`, `receivers`: for each edge of the whole graph, the numbers of its nodes, the same on every worker.
      For the result of GCNConv, they must include the edge from each node to itself that it adds.
    - `num_nodes`: the number of nodes.
    - `aggregation`: one of the four. - `root`: whether to add W_root x. - `bias`: whether to add b.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax, jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = DistributedGraphConv(P, 2, 5, senders=[0, 1, 2, 0], receivers=[1, 0, 0, 2], num_nodes=3)
    >>> layer(layer.init(jax.random.key(0)), jnp.ones((3, 2))).shape
    (3, 5)

    Source: Morris et al. (2018), arXiv:1810.02244; Hamilton et al. (2017), arXiv:1706.02216; Kipf and Welling (2016),
    arXiv:1609.02907.
    """

    P_x: Partition
    in_features: int
    out_features: int
    senders: Rows
    receivers: Rows
    num_nodes: int
    aggregation: Aggregation
    root: bool
    bias: bool

    def __init__(
        self,
        P_x: Partition,
        in_features: int,
        out_features: int,
        senders: Any,
        receivers: Any,
        num_nodes: int,
        aggregation: Aggregation = "sum",
        root: bool = True,
        bias: bool = True,
    ) -> None:
        check_partitions(P_x=P_x)
        if P_x.dim < 2:
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(P_x.shape)}) must have two dimensions or more, the last two for nodes and "
                "features."
            )
        if aggregation not in get_args(Aggregation):
            raise InvalidArgumentError(f"`aggregation` (={aggregation!r}) must be one of {get_args(Aggregation)}.")
        checked_integer("in_features", in_features, 1)
        checked_integer("out_features", out_features, 1)
        senders, receivers, n = checked_edges(senders, receivers, num_nodes)
        self._store(P_x=P_x, in_features=in_features, out_features=out_features, num_nodes=n)
        self._store(senders=senders, receivers=receivers, aggregation=aggregation)
        self._store(root=checked_boolean("root", root), bias=checked_boolean("bias", bias))

    @property
    def _nodes_dim(self) -> int:
        return self.P_x.dim - 2

    @cached_property
    def _linear(self) -> dict[str, DistributedPointwise]:
        """The linear maps, by the name of the weight."""
        sizes = self.in_features, self.out_features
        maps = {"weight": DistributedPointwise(self.P_x, *sizes, dim=-1, bias=self.bias)}
        return maps | ({"root": DistributedPointwise(self.P_x, *sizes, dim=-1, bias=False)} if self.root else {})

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: spec.global_shape for name, spec in self.param_specs().items()}

    @cached_property
    def _degrees(self) -> np.ndarray:
        """The number of edges to each of this worker's nodes."""
        start, stop = balanced_range(self.num_nodes, *self._place)
        return np.bincount(self.receivers.array, minlength=self.num_nodes)[start:stop, None]

    @property
    def _place(self) -> tuple[int, int]:
        """The number of workers along the nodes, and this worker's index along them."""
        assert self.P_x.rank is not None
        return self.P_x.shape[self._nodes_dim], index_of(self.P_x.rank, self.P_x.shape)[self._nodes_dim]

    def init(  # type: ignore[override]
        self, key: Array, dtype: DTypeLike = jnp.float32, *, weight_init: Initializer | None = None
    ) -> Params:
        """Return this worker's copies of the initial parameters, uniform in ±1/sqrt(in_features) as in PyTorch.

        `weight_init`: a function of (key, shape, dtype) like the `jax.nn.initializers`, for the two weights.
        """
        default = UniformFanIn(self.in_features)
        of: dict[str, Initializer] = {name: weight_init or default for name in ("weight", "root")} | {"bias": default}
        return initialize_params(self.param_specs(), key, dtype, of, ("weight", "bias", "root"), "weight_init")

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each parameter, which is replicated."""
        specs = {name: layer.param_specs() for name, layer in self._linear.items()}
        return specs["weight"] | ({"root": specs["root"]["weight"]} if self.root else {})

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> GraphConvPlan:
        dim, grid = self._nodes_dim, owned_grid("x", self.P_x, x)
        if not is_differentiable(dtype := common_dtype("x", x, self.P_x.ranks)):
            raise PlanError(f"`x` must hold floating or complex numbers, but is {dtype}.")
        if grid.ranges[dim] != balanced_ranges(self.num_nodes, self.P_x.shape[dim]):
            raise PlanError(
                f"`x` ({shape_text(grid.extent)}) must have {self.num_nodes} nodes, `num_nodes`, in balanced blocks in "
                f"dimension {dim}, but has the ranges {grid.ranges[dim]}."
            )
        to_edges = plan_take(x, self.P_x, self.senders, dim)
        to_receivers = plan_grouped if self.aggregation == "max" else plan_segment_sum
        to_nodes: Plan = to_receivers(to_edges.after(x), self.P_x, self.receivers, self.num_nodes, dim)
        inputs = {"weight": to_nodes.after(x), "root": x}
        linear: Any = {
            name: layer.plan(inputs[name], {worker: _of_map(name, own) for worker, own in params.items()})
            for name, layer in self._linear.items()
        }
        blocks = {}
        for worker in self.P_x.ranks:
            of_worker = [plan.output(worker) for plan in linear.values()]
            blocks[worker] = ShapeDtype(of_worker[0].shape, np.dtype(jnp.result_type(*(y.dtype for y in of_worker))))
        return GraphConvPlan(blocks, to_edges, to_nodes, linear)

    def _run(self, plan: GraphConvPlan, params: Params, x: Array) -> Array:
        world = self.P_x.world
        scale = np.sqrt(1 / np.maximum(self._degrees, 1)).astype(jnp.finfo(x.dtype).dtype)
        seen = x * scale if self.aggregation == "symmetric" else x
        at_nodes: Any = plan.to_nodes
        together = at_nodes.run(world, plan.to_edges.run(world, seen))
        if self.aggregation == "symmetric":
            together = together * scale
        elif self.aggregation == "mean":
            together = together / np.maximum(self._degrees, 1).astype(scale.dtype)
        elif self.aggregation == "max":
            together = jnp.where(self._degrees > 0, together, 0)
        y = plan.linear["weight"].run(world, _of_map("weight", params), together)
        return y + plan.linear["root"].run(world, _of_map("root", params), x) if self.root else y


def _of_map(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of one linear map, taken from those of the layer."""
    biases = {"bias": params["bias"]} if name == "weight" and "bias" in params else {}
    return {"weight": params[name]} | biases


def checked_edges(senders: Any, receivers: Any, num_nodes: int) -> tuple[Rows, Rows, int]:
    """Return the arguments `senders` and `receivers` as values, and `num_nodes` checked."""
    (senders, n), (receivers, _) = (
        checked_segments(rows, num_nodes, name, "num_nodes")
        for name, rows in (("senders", senders), ("receivers", receivers))
    )
    if len(senders.shape) != 1 or senders.shape != receivers.shape:
        raise InvalidArgumentError(
            f"`senders` (of shape {shape_text(senders.shape)}) and `receivers` (of shape "
            f"{shape_text(receivers.shape)}) must have one number for each edge."
        )
    return senders, receivers, n
