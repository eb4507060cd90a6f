"""Graph convolutions beside the same with a dense matrix of the edges."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from matrix.partitions import On, on
from sequential import Beside, check_beside

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.plans.shape_dtype import ShapeDtype


def conv(aggregation: str, P_x: On, *sizes: int, edges: int, **options: Any) -> Beside:
    """A layer to four features, on random edges that repeat, beside the plain one."""
    nodes, features = sizes[-2:]
    senders, receivers = np.random.default_rng(edges).integers(0, nodes, (2, edges))
    matrix = np.zeros((nodes, nodes))
    np.add.at(matrix, (receivers, senders), 1.0)
    degrees = np.bincount(receivers, minlength=nodes)

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

    return Beside(
        f"graph conv {aggregation} {sizes} {P_x} {options}",
        sizes,
        lambda P: nn.DistributedGraphConv(
            P_x.partition(P), features, 4, senders, receivers, nodes, aggregation, **options
        ),
        whole,
        P_x,
        y_sizes=(*sizes[:-1], 4),
    )


@pytest.mark.simulated(4)
def test_beside_the_plain_ones() -> None:
    """Output and all gradients, for every aggregation: batch, nodes and features split, evenly or not, or empty."""
    check_beside(
        (
            conv("sum", on(3, 1, ranks=(3, 0, 2)), 7, 2, edges=12),
            conv("mean", on(2, 2), 3, 3, edges=5, bias=False),
            conv("symmetric", on(2, 2, 1, ranks=(2, 0, 3, 1)), 2, 5, 2, edges=11, root=False),
            conv("max", on(4, 1), 3, 2, edges=7),
        )
    )


def test_what_does_not_fit_is_refused() -> None:
    def planned(nodes: tuple[int, int], dtype: str = "float32") -> Any:
        blocks = {worker: ShapeDtype((nodes[worker], 2), np.dtype(dtype)) for worker in (0, 1)}
        return lambda P: nn.DistributedGraphConv(P.grid([2, 1]), 2, 3, [0], [1], 3).plan(blocks)

    assert "must have 3 nodes, `num_nodes`, in balanced blocks" in refusal(2, planned((1, 2)), dj.PlanError)
    assert "must hold floating or complex numbers" in refusal(2, planned((2, 1), "int32"), dj.PlanError)
