"""The message-passing block of networks on meshes and graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, outside, owned_grid
from distdl_jax.functional.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.functional.rows import Rows
from distdl_jax.functional.take import TakePlan, plan_segment_sum, plan_take, segment_sum, take
from distdl_jax.nn.base.layer import describe
from distdl_jax.nn.dense.pointwise import DistributedPointwise
from distdl_jax.nn.graph.graph_conv import checked_edges
from distdl_jax.nn.networks.network import params_of_part
from distdl_jax.nn.networks.sequential import Sequential
from distdl_jax.nn.norm.per_sample import DistributedLayerNorm
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.static import Static
from distdl_jax.plans.decomposition import balanced_ranges
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.transports.agreement import exchange_named_shapes
from distdl_jax.validation import check_function, check_key, checked_integer

Params = dict[str, Any]


@dataclass(frozen=True)
class GraphNetBlockPlan:
    """The plans of a block's parts: nodes to the edges' ends, the edges' MLP, sums at nodes, and the nodes' MLP."""

    ends: TakePlan
    edge: Plan
    received: TakePlan
    node: Plan


@dataclass(frozen=True, init=False)
class DistributedGraphNetBlock(Static):
    """Message passing on a mesh or a graph: edges read their two nodes, and nodes the sum of their incoming messages.

    With e_k the features of the edge from node s_k to node r_k, and v_i those of node i,

        e'_k = norm(mlp_edge(e_k, v_{s_k}, v_{r_k})),        v'_i = norm(mlp_node(v_i, sum of e'_k over r_k = i))

    and the block returns v + v' and e + e'. The MLPs have `hidden_layers` layers of `hidden_features` between input and
    output, followed by a layer norm.

    | tensor | global shape | partition |
    |---|---|---|
    | nodes v | ... x num_nodes x features | P_x, one worker along the features |
    | edges e | ... x num_edges x features | P_x, too |
    | parameters | `{"edge": a Sequential's, "node": a Sequential's}` | copies on all workers of P_x |

    Nodes and edges are in balanced blocks, which may be uneven or empty. A worker receives, once each, the rows of
    other workers' nodes that its edges touch, and sends one sum back for each such row; in the backward pass the
    directions are reversed, and the gradients of the parameters are summed. In the order of `dj.graphs.order_nodes` and
    `dj.graphs.edges_of_cells` these are the nodes along the block boundaries. Any graph is accepted: edges may be
    directed or go both ways, repeat, and form loops.

    **Arguments:**

    - `P_x`: the partition of nodes and edges, of two dimensions or more; those before the nodes are batch dimensions.
    - `features`: per node, and per edge.
    - `senders`, `receivers`: for each edge of the whole graph, the numbers of its nodes, the same on every worker.
    - `num_nodes`: the number of nodes.
    - `hidden_features`: default: `features`.
    - `hidden_layers`: 0 or more.
    - `activation`: a function of an array.

    A worker outside P_x gets its nodes and edges back.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; when applied,
    `PlanError`.

    >>> import jax, jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> block = DistributedGraphNetBlock(P, 8, senders=[0, 1, 2, 0], receivers=[1, 0, 0, 2], num_nodes=3)
    >>> nodes, edges = block(block.init(jax.random.key(0)), jnp.ones((3, 8)), jnp.ones((4, 8)))
    >>> nodes.shape, edges.shape
    ((3, 8), (4, 8))

    Source: Pfaff et al. (2020), arXiv:2010.03409, the processor's block; Battaglia et al. (2018), arXiv:1806.01261.
    """

    P_x: Partition
    features: int
    senders: Rows
    receivers: Rows
    num_nodes: int
    hidden_features: int
    hidden_layers: int
    activation: Callable[[Array], Array]

    def __init__(
        self,
        P_x: Partition,
        features: int,
        senders: Any,
        receivers: Any,
        num_nodes: int,
        hidden_features: int | None = None,
        hidden_layers: int = 2,
        activation: Callable[[Array], Array] = jax.nn.relu,
    ) -> None:
        check_partitions(P_x=P_x)
        if P_x.dim < 2 or P_x.shape[-1] != 1:
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(P_x.shape)}) must have two dimensions or more, the last two for nodes and "
                "features, and one worker along the features."
            )
        checked_integer("features", features, 1)
        hidden = features if hidden_features is None else checked_integer("hidden_features", hidden_features, 1)
        checked_integer("hidden_layers", hidden_layers, 0)
        check_function("activation", activation)
        self._store(P_x=P_x, features=features, hidden_features=hidden, hidden_layers=hidden_layers)
        senders, receivers, n = checked_edges(senders, receivers, num_nodes)
        self._store(activation=activation, senders=senders, receivers=receivers, num_nodes=n)

    @property
    def input_partition(self) -> Partition:
        """The partition of nodes and edges, P_x."""
        return self.P_x

    output_partition = input_partition

    @cached_property
    def _ends(self) -> Rows:
        """The numbers of each edge's nodes, sender and receiver."""
        return Rows(np.stack([self.senders.array, self.receivers.array], 1))

    @property
    def _nodes_dim(self) -> int:
        return self.P_x.dim - 2

    @cached_property
    def _mlps(self) -> dict[str, Sequential]:
        return {"edge": self._mlp(3 * self.features), "node": self._mlp(2 * self.features)}

    def _mlp(self, features: int) -> Sequential:
        widths = [features, *[self.hidden_features] * self.hidden_layers, self.features]
        layers: list[Any] = []
        for n, m in pairwise(widths):
            layers += [DistributedPointwise(self.P_x, n, m, dim=-1), self.activation]
        return Sequential(*layers[:-1], DistributedLayerNorm(self.P_x, self.features))

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """Return this worker's copies of the initial parameters; each MLP has a separate key, split off `key`."""
        check_key("key", key)
        keys = zip(self._mlps.items(), jax.random.split(key), strict=True)
        return {name: mlp.init(k, dtype) for (name, mlp), k in keys}

    def param_specs(self) -> dict[str, Any]:
        """Return the global shape and the partition of each parameter."""
        return {name: mlp.param_specs() for name, mlp in self._mlps.items()}

    def plan(
        self, nodes: ShapeDtypes, edges: ShapeDtypes, params: Mapping[int, Params] | None = None
    ) -> GraphNetBlockPlan:
        """Plan from the shapes and dtypes of all workers' blocks: without communication, equal on every worker.

        **Raises:** `PlanError` if an input or a parameter does not fit.
        """
        nodes, edges = (taking_part(x, self.P_x.ranks) for x in (nodes, edges))
        self._check_blocks(nodes, edges)
        ends = plan_take(nodes, self.P_x, self._ends, self._nodes_dim)
        seen = {worker: _with_more(edges[worker], nodes[worker], 2 * self.features) for worker in edges}
        edge = self._mlps["edge"].plan(seen, params_of_part(params, "edge"))
        of_edges = edge.after(seen)
        received = plan_segment_sum(of_edges, self.P_x, self.receivers, self.num_nodes, self._nodes_dim)
        seen = {worker: _with_more(nodes[worker], received.output(worker), self.features) for worker in nodes}
        node = self._mlps["node"].plan(seen, params_of_part(params, "node"))
        return GraphNetBlockPlan(ends, edge, received, node)

    def _check_blocks(self, nodes: ShapeDtypes, edges: ShapeDtypes) -> None:
        """Reject blocks that are not balanced, or don't match this graph."""
        batches = []
        for name, blocks, n in (("nodes", nodes, self.num_nodes), ("edges", edges, len(self.senders.array))):
            common_dtype(name, blocks, self.P_x.ranks)
            grid = owned_grid(name, self.P_x, blocks)
            if grid.ranges[-2:] != (balanced_ranges(n, self.P_x.shape[-2]), ((0, self.features),)):
                raise PlanError(
                    f"`{name}` ({shape_text(grid.extent)}) must be ... x {n} x {self.features} in balanced blocks, but "
                    f"has the ranges {grid.ranges[-2:]} in its last two dimensions."
                )
            batches.append(grid.ranges[:-2])
        if batches[0] != batches[1]:
            raise PlanError(f"`nodes` and `edges` must have equal batches, but have the ranges {batches}.")

    def __call__(self, params: Params, nodes: Array, edges: Array) -> tuple[Array, Array]:
        """Apply the block.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `nodes`, `edges`: this worker's blocks on P_x; elsewhere zero-volume arrays.

        **Returns:** this worker's blocks of the new nodes and edges; outside P_x, `nodes` and `edges`.

        **Raises:** `PlanError`, on every worker of P_x, if an input or a parameter does not fit.
        """
        if not self.P_x.active:
            return outside(self.P_x.world, nodes, "nodes"), outside(self.P_x.world, edges, "edges")
        with jax.named_scope("DistributedGraphNetBlock"):
            team, arrays = tuple(sorted(self.P_x.ranks)), {"nodes": nodes, "edges": edges}
            shapes = exchange_named_shapes(self.P_x.world, team, describe(self), arrays)
            self._check_blocks(*({worker: of_worker[name] for worker, of_worker in shapes.items()} for name in arrays))
            ends = take(nodes, self.P_x, self._ends, self._nodes_dim)
            seen = jnp.concatenate([edges, ends.reshape(*edges.shape[:-1], 2 * self.features)], -1)
            messages = self._mlps["edge"](params["edge"], seen)
            received = segment_sum(messages, self.P_x, self.receivers, self.num_nodes, self._nodes_dim)
            seen = jnp.concatenate([nodes, received], -1)
            return nodes + self._mlps["node"](params["node"], seen), edges + messages

    apply = __call__


def _with_more(x: ShapeDtype, other: ShapeDtype, features: int) -> ShapeDtype:
    """Return the shape and dtype of a block concatenated with another one that has `features`."""
    return ShapeDtype((*x.shape[:-1], x.shape[-1] + features), np.dtype(jnp.promote_types(x.dtype, other.dtype)))
