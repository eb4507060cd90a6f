"""Message passing on a graph, and graph convolutions, beside the same in plain JAX on the whole graph."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from blocks import block_of
from jax import lax
from matrix.partitions import On, on
from sequential import Beside, beside, check_beside

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.plans.shape_dtype import ShapeDtype


class Graph(NamedTuple):
    """A random graph with loops and edges that repeat, on some workers."""

    P_x: On
    nodes: int
    edges: int
    batch: tuple[int, ...] = ()
    hidden_layers: int = 1

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.random.default_rng(self.edges).integers(0, self.nodes, (2, self.edges)))

    def block(self, P: dj.Partition) -> nn.DistributedGraphNetBlock:
        return nn.DistributedGraphNetBlock(
            self.P_x.partition(P), 3, *self.ends, self.nodes, 2, self.hidden_layers, jnp.tanh
        )

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Nodes, edges, and weights of what they become."""
        rng = np.random.default_rng(self.nodes)
        return tuple(rng.normal(size=(*self.batch, n, 3)) for n in (self.nodes, self.edges) * 2)


def plain_mlp(params: Any, x: Any) -> Any:
    *linear, norm = [layer for layer in params if layer]
    for n, layer in enumerate(linear):
        x = (jnp.tanh(x) if n else x) @ layer["weight"].T + layer["bias"]
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * norm["weight"] + norm["bias"]


def plain_block(graph: Graph, params: Any, nodes: Any, edges: Any) -> tuple[Any, Any]:
    senders, receivers = graph.ends
    seen = jnp.concatenate([edges, nodes[..., senders, :], nodes[..., receivers, :]], -1)
    messages = plain_mlp(params["edge"], seen)
    sums = jnp.zeros_like(nodes).at[..., receivers, :].add(messages)
    return nodes + plain_mlp(params["node"], jnp.concatenate([nodes, sums], -1)), edges + messages


GRAPHS = (
    Graph(on(3, 1, ranks=(2, 0, 1)), 7, 2),  # uneven blocks of nodes, an empty one of edges
    Graph(on(2, 1, 1, ranks=(2, 0)), 3, 5, (3,), hidden_layers=0),  # the batch split, a worker outside
)


@pytest.mark.simulated(3)
def test_beside_plain_jax() -> None:
    """Two blocks in a loop: both outputs and all gradients, with uneven and empty blocks, and the batch split."""
    P = dj.Partition()

    def loss(apply: Any, params: Any, nodes: Any, edges: Any, w: Any, u: Any) -> Any:
        (nodes, edges), _ = lax.scan(lambda x, its: (apply(its, *x), None), (nodes, edges), params)
        return jnp.sum(w * nodes) + jnp.sum(u * edges), (nodes, edges)

    for graph in GRAPHS:
        block = graph.block(P)
        keys = jax.random.split(jax.random.key(1), 2)
        params = jax.vmap(lambda key, block=block: block.init(key, jnp.float64))(keys)
        specs = [dj.TensorSpec(x.shape, block.P_x) for x in graph.arrays()]
        own = [block_of(x, spec) for x, spec in zip(graph.arrays(), specs, strict=True)]
        of_each = [dj.gather(jax.tree.map(lambda leaf, n=n: leaf[n], params), block.param_specs()) for n in range(2)]
        stacked = P.broadcast_data(jax.tree.map(lambda *its: np.stack(its), *of_each))
        (value, y), dx = dj.jit(dj.value_and_grad(partial(loss, block), (0, 1, 2), has_aux=True))(params, *own)
        plain = jax.jit(jax.value_and_grad(partial(loss, partial(plain_block, graph)), (0, 1, 2), has_aux=True))
        (want, want_y), want_dx = plain(stacked, *graph.arrays())
        assert abs(value - want) < 1e-11
        for mine, whole, spec in zip((*y, *dx[1:]), (*want_y, *want_dx[1:]), specs, strict=True):
            np.testing.assert_allclose(mine, block_of(np.asarray(whole), spec).reshape(mine.shape), atol=1e-11)
        if block.P_x.active:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), dx[0], want_dx[0])


def test_a_plan_knows_what_moves() -> None:
    """On a ring of 30 nodes on 10 workers each gets one row from either side, without a message."""
    P = dj.planning_world(1000, 500).grid([10, 1])
    here, after = np.arange(30), (np.arange(30) + 1) % 30
    block = nn.DistributedGraphNetBlock(P, 4, here, after, 30)
    assert hash(block) == hash(nn.DistributedGraphNetBlock(P, 4, here.tolist(), after, np.int64(30)))
    rows = {worker: ShapeDtype((3, 4), np.dtype("float32")) for worker in range(10)}
    plan = block.plan(rows, rows)
    assert plan.node.outputs == rows and plan.edge.outputs == rows
    sent = [(message.partner, message.size) for message in plan.ends.part(3).steps[0].sends]
    assert sent == [(2, 4)]
    assert [(message.partner, message.size) for message in plan.received.part(3).steps[1].sends] == [(4, 4)]


def test_what_does_not_fit_is_refused() -> None:
    def planned(sizes: Any, batches: Any = ((), ())) -> str:
        def plan(P: dj.Partition) -> Any:
            block = nn.DistributedGraphNetBlock(P.grid([*(1,) * len(batches[0]), 2, 1]), 2, [0, 1], [1, 2], 3)
            return block.plan(
                *({w: ShapeDtype((*batch, of[w], 2), np.dtype(float)) for w in (0, 1)}
                  for batch, of in zip(batches, sizes, strict=True))
            )  # fmt: skip

        return refusal(2, plan, dj.PlanError)

    def planned_conv(nodes: tuple[int, int], dtype: str = "float32") -> str:
        held = {worker: ShapeDtype((nodes[worker], 2), np.dtype(dtype)) for worker in (0, 1)}
        return refusal(2, lambda P: nn.DistributedGraphConv(P.grid([2, 1]), 2, 3, [0], [1], 3).plan(held), dj.PlanError)

    assert planned(((1, 2), (1, 1))).startswith("`nodes` (3 x 2) must be ... x 3 x 2 in balanced blocks, but")
    assert "`edges` (4 x 2) must be ... x 2 x 2" in planned(((2, 1), (2, 2)))
    assert "equal batches" in planned(((2, 1), (1, 1)), ((3,), (4,)))
    assert "must have 3 nodes, `num_nodes`, in balanced blocks" in planned_conv((1, 2))
    assert "must hold floating or complex numbers" in planned_conv((2, 1), "int32")


def conv(aggregation: str, P_x: On, *sizes: int, edges: int, **options: Any) -> Beside:
    """A layer to four features, on random edges that repeat, beside the plain one."""
    nodes, features = sizes[-2:]
    ends = np.random.default_rng(edges).integers(0, nodes, (2, edges))
    matrix = np.zeros((nodes, nodes))
    np.add.at(matrix, (ends[1], ends[0]), 1.0)
    degrees = np.bincount(ends[1], minlength=nodes)

    def together(x: Any) -> Any:
        if aggregation == "max":
            rows = jnp.where((matrix > 0)[:, :, None], x[..., None, :, :], -jnp.inf).max(-2)
            return jnp.where((degrees > 0)[:, None], rows, 0)
        scaled = {
            "sum": matrix,
            "mean": matrix / np.maximum(degrees, 1)[:, None],
            "symmetric": matrix / np.sqrt(np.maximum(np.outer(degrees, degrees), 1)),
        }
        return scaled[aggregation] @ x

    def whole(params: Any, x: Any) -> Any:
        y = together(x) @ params["weight"].T + params.get("bias", 0.0)
        return y + x @ params["root"].T if "root" in params else y

    args = features, 4, *(its.tolist() for its in ends), nodes, aggregation
    return beside("GraphConv", sizes, whole, P_x, *args, y_sizes=(*sizes[:-1], 4), **options)


@pytest.mark.simulated(4)
def test_convolutions_beside_the_plain_ones() -> None:
    """Output and all gradients, for every aggregation: batch, nodes and features split, evenly or not, or empty."""
    check_beside(
        (
            conv("sum", on(3, 1, ranks=(3, 0, 2)), 7, 2, edges=12),
            conv("mean", on(2, 2), 3, 3, edges=5, bias=False),
            conv("symmetric", on(2, 2, 1, ranks=(2, 0, 3, 1)), 2, 5, 2, edges=11, root=False),
            conv("max", on(4, 1), 3, 2, edges=7),
        )
    )
