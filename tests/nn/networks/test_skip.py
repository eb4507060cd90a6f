"""A U-Net's skip beside plain JAX: uneven blocks, split channels, states, plans and refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from matrix.partitions import On, on
from sequential import Beside, check_beside

import distdl_jax as dj
from distdl_jax import nn

ROWS, CHANNELS = on(1, 1, 3, ranks=(3, 1, 2)), on(1, 2, 2, ranks=(2, 1, 0, 3))


def conv(P: dj.Partition, its: On, into: int, out: int) -> Any:
    return nn.DistributedConv1d(its.partition(P), in_channels=into, out_channels=out, kernel_size=3, padding=1)


def plain(p: Any, x: Any) -> Any:
    y = jax.lax.conv_general_dilated(x, p["weight"], (1,), [(1, 1)], dimension_numbers=("NCH", "OIH", "NCH"))
    return y + p["bias"].reshape(-1, 1)


def normalised(x: Any) -> Any:
    return (x - x.mean(2, keepdims=True)) / jnp.sqrt(x.var(2, keepdims=True) + 1e-5)


def norm(P: dj.Partition, its: On, channels: int) -> Any:
    return nn.DistributedInstanceNorm(its.partition(P), channels, affine=False)


def _inner(p: Any, x: Any) -> Any:
    y = plain(p[0], x)
    return jnp.concatenate([y, plain(p[1]["body"], y)], 1)


def skip(name: str, P_x: On, n: int, make: Any, whole: Any) -> Beside:
    return Beside(name, (2, 3, n), make, whole, P_x)


CASES = (
    skip("channels of a convolution, rows split", ROWS, 7,
         lambda P: nn.Sequential(nn.Skip(nn.Sequential(conv(P, ROWS, 3, 5), jnp.sin)), jnp.tanh),
         lambda p, x: jnp.tanh(jnp.concatenate([x, jnp.sin(plain(p[0]["body"][0], x))], 1))),
    skip("within a skip", ROWS, 7,
         lambda P: nn.Skip(nn.Sequential(conv(P, ROWS, 3, 2), nn.Skip(conv(P, ROWS, 2, 1)), jnp.sin)),
         lambda p, x: jnp.concatenate([x, jnp.sin(_inner(p["body"], x))], 1)),
    skip("split channels, which move", CHANNELS, 6,
         lambda P: nn.Sequential(nn.Skip(nn.Sequential(norm(P, CHANNELS, 3), jnp.sin))),
         lambda p, x: jnp.concatenate([x, jnp.sin(normalised(x))], 1)),
    skip("along rows that are split", ROWS, 6,
         lambda P: nn.Skip(nn.Sequential(norm(P, ROWS, 3), jnp.sin), axis=2),
         lambda p, x: jnp.concatenate([x, jnp.sin(normalised(x))], 2)),
    skip("added", ROWS, 7, lambda P: nn.Skip(nn.Sequential(conv(P, ROWS, 3, 3), jnp.sin), "add"),
         lambda p, x: x + jnp.sin(plain(p["body"][0], x))),
)  # fmt: skip


@pytest.mark.simulated(4)
def test_beside_plain_jax() -> None:
    """Output and gradients."""
    check_beside(CASES)


@pytest.mark.simulated(2)
def test_states_keys_and_plans() -> None:
    """The body's, under its name; the planned blocks are those that it leaves; the table lists the body."""
    P = dj.Partition()
    rows = on(2, 1).partition(P)
    body = nn.Sequential(nn.DistributedBatchNorm(rows, 3), nn.Dropout(rows, 0.5))
    for join, features in (("concatenate", 6), ("add", 3)):
        skip = nn.Skip(body, join)
        params, state, key = skip.init(jax.random.key(0)), skip.init_state(), jax.random.key(1)
        assert params.keys() == state.keys() == skip.state_specs().keys() == {"body"} and skip.draws
        x = jnp.asarray(np.random.default_rng(P.rank).normal(size=(4, 3)), "float32")
        y, new = dj.jit(lambda *args, skip=skip, key=key: skip(*args[:2], state=args[2], key=key))(params, x, state)
        inner, its = body(params["body"], x, state=state["body"], key=jax.random.split(key, 1)[0])
        want = x + inner if join == "add" else jnp.concatenate([x, inner], 1)
        np.testing.assert_allclose(y, want, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), new, {"body": its})
        held = {rank: dj.ShapeDtype((4, 3), np.dtype("float32")) for rank in range(2)}
        assert {block.shape for block in skip.plan(held).outputs.values()} == {(4, features)}
        assert skip.output_spec(dj.TensorSpec((8, 3), rows)) == dj.TensorSpec((8, features), rows)
    table = nn.Sequential(nn.Skip(body), jax.nn.relu).table().splitlines()
    assert [line.split()[:2] for line in table[1:3]] == [["0.0.0", "DistributedBatchNorm"], ["0.0.1", "Dropout"]]


def test_plans_on_other_workers() -> None:
    """Workers outside of the partition keep their placeholders, in a plan as in a run."""
    P = dj.planning_world(4)
    spec = dj.TensorSpec((2, 3, 7), ROWS.partition(P))
    blocks = {rank: dj.ShapeDtype(spec.shape_on(rank) if rank else (2, 0), np.dtype("float32")) for rank in range(4)}
    outputs = nn.Skip(conv(P, ROWS, 3, 5)).plan(blocks).outputs
    assert [outputs[rank].shape for rank in range(4)] == [(2, 0), (2, 8, 2), (2, 8, 2), (2, 8, 3)]


def test_refusals() -> None:
    """When the skip is made, in one sentence on every worker; and when the blocks don't fit."""

    def to_columns(P: dj.Partition) -> Any:
        return nn.Repartition(on(2, 1).partition(P), on(1, 2).partition(P))

    assert "`body` (=3) must be a layer; functions go" in refusal(2, lambda P: nn.Skip(3), dj.InvalidTypeError)
    for sentence, make in (
        ("`join` (='sum') must be one of 'concatenate', 'add'.", lambda P: nn.Skip(norm(P, on(1, 1, 2), 3), "sum")),
        ("`axis` (=(3,)) names dimension 3", lambda P: nn.Skip(norm(P, on(1, 1, 2), 3), axis=3)),
        ("`body` must have a layer with a partition", lambda P: nn.Skip(nn.Sequential(jnp.sin))),
        ("`body` takes its input from 2 x 1 (0, 1), but leaves its output on 1 x 2 (0, 1)",
         lambda P: nn.Skip(to_columns(P))),
    ):  # fmt: skip
        assert sentence in refusal(2, make, dj.InvalidArgumentError)
    pool = nn.Skip(nn.DistributedMaxPool1d(on(1, 1, 1).partition(dj.planning_world(1)), 2))
    with pytest.raises(dj.PlanError, match=r"`xs\[1\]` \(of shape \(1, 2, 2\)\) must have the blocks of `xs\[0\]`"):
        pool.plan({0: dj.ShapeDtype((1, 2, 5), np.dtype("float32"))})
