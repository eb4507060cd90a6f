"""Ways round layers, which are added or joined, beside plain JAX: partitions, states, keys, plans and refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from matrix.partitions import On, on
from sequential import Beside, check_beside, cut

import distdl_jax as dj
from distdl_jax import nn

ROWS, PAIR = on(3, 1, ranks=(3, 1, 2)), on(1, 2, ranks=(2, 1))
LINES, CHANNELS = on(1, 1, 3, ranks=(3, 1, 2)), on(1, 2, 2, ranks=(2, 1, 0, 3))


def linear(P: dj.Partition, P_x: On, P_y: On, P_W: On, *sizes: int) -> nn.DistributedLinear:
    return nn.DistributedLinear(*(its.partition(P) for its in (P_x, P_y, P_W)), *sizes)


def moved(P: dj.Partition, *ranks: int) -> Any:
    return nn.Repartition(on(2, 1).partition(P), on(1, 2, ranks=ranks or None).partition(P))


def normalised(p: Any, x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5) * p["weight"] + p["bias"]


def affine(p: Any, x: Any) -> Any:
    return x @ p["weight"].T + p["bias"]


CASES = (
    Beside(
        "on uneven rows", ([0, 4, 1], 3),
        lambda P: nn.Residual(nn.Sequential(nn.DistributedBatchNorm(ROWS.partition(P), 3), jnp.sin)),
        lambda p, x: x + jnp.sin(normalised(p["body"][0], x)),
        ROWS, y_sizes=([0, 4, 1], 3),
    ),
    Beside(
        "to other workers", (2, 5),
        lambda P: nn.Residual(
            nn.Sequential(linear(P, PAIR, on(1, 2), on(2, 2), 5, 3), jnp.sin),
            linear(P, PAIR, on(1, 2), on(2, 2, ranks=(3, 0, 1, 2)), 5, 3),
        ),
        lambda p, x: jnp.sin(affine(p["body"][0], x)) + affine(p["shortcut"], x),
        PAIR, on(1, 2),
    ),
)  # fmt: skip


def conv(P: dj.Partition, its: On, into: int, out: int) -> Any:
    return nn.DistributedConv1d(its.partition(P), in_channels=into, out_channels=out, kernel_size=3, padding=1)


def plain(p: Any, x: Any) -> Any:
    y = jax.lax.conv_general_dilated(x, p["weight"], (1,), [(1, 1)], dimension_numbers=("NCH", "OIH", "NCH"))
    return y + p["bias"].reshape(-1, 1)


def along_features(x: Any) -> Any:
    return (x - x.mean(2, keepdims=True)) / jnp.sqrt(x.var(2, keepdims=True) + 1e-5)


def norm(P: dj.Partition, its: On, channels: int) -> Any:
    return nn.DistributedInstanceNorm(its.partition(P), channels, affine=False)


def _inner(p: Any, x: Any) -> Any:
    y = plain(p[0], x)
    return jnp.concatenate([y, plain(p[1]["body"], y)], 1)


def skip(name: str, P_x: On, n: int, make: Any, whole: Any) -> Beside:
    return Beside(name, (2, 3, n), make, whole, P_x)


SKIPS = (
    skip("channels of a convolution, rows split", LINES, 7,
         lambda P: nn.Sequential(nn.Skip(nn.Sequential(conv(P, LINES, 3, 5), jnp.sin)), jnp.tanh),
         lambda p, x: jnp.tanh(jnp.concatenate([x, jnp.sin(plain(p[0]["body"][0], x))], 1))),
    skip("within a skip", LINES, 7,
         lambda P: nn.Skip(nn.Sequential(conv(P, LINES, 3, 2), nn.Skip(conv(P, LINES, 2, 1)), jnp.sin)),
         lambda p, x: jnp.concatenate([x, jnp.sin(_inner(p["body"], x))], 1)),
    skip("split channels, which move", CHANNELS, 6,
         lambda P: nn.Sequential(nn.Skip(nn.Sequential(norm(P, CHANNELS, 3), jnp.sin))),
         lambda p, x: jnp.concatenate([x, jnp.sin(along_features(x))], 1)),
    skip("along rows that are split", LINES, 6,
         lambda P: nn.Skip(nn.Sequential(norm(P, LINES, 3), jnp.sin), axis=2),
         lambda p, x: jnp.concatenate([x, jnp.sin(along_features(x))], 2)),
    skip("added", LINES, 7, lambda P: nn.Skip(nn.Sequential(conv(P, LINES, 3, 3), jnp.sin), "add"),
         lambda p, x: x + jnp.sin(plain(p["body"][0], x))),
)  # fmt: skip


@pytest.mark.simulated(4)
def test_beside_plain_jax() -> None:
    """Output and gradients, on uneven blocks, from one team to another, with split channels."""
    check_beside(CASES + SKIPS)


@pytest.mark.simulated(4)
@pytest.mark.parametrize("argnums", [1, (0, 1)])
def test_jaxs_own_gradient(argnums: Any) -> None:
    """From one team to another: it knows of each worker's program alone, and yet all of them do the same."""
    P, case = dj.Partition(), CASES[1]
    layer, mine = case.layer(P), cut(case.x, PAIR, P.rank)
    given = layer.init(jax.random.key(0), float), jnp.zeros((2, 0)) if mine is None else jnp.asarray(mine)
    got, want = (
        jax.jit(grad(lambda params, x: jnp.sum(jnp.sin(layer(params, x))), argnums))(*given)
        for grad in (jax.grad, dj.grad)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-13), got, want)


@pytest.mark.simulated(2)
def test_states_and_keys_of_both_ways() -> None:
    """Each way has its own; the same values as from the layers one by one, in training and in evaluation."""
    P = dj.Partition()
    rows = on(2, 1).partition(P)
    body = nn.Sequential(nn.DistributedBatchNorm(rows, 3), nn.Dropout(rows, 0.5))
    block = nn.Residual(body, nn.DistributedBatchNorm(rows, 3, momentum=None))
    params, state, key = block.init(jax.random.key(0), float), block.init_state(float), jax.random.key(1)
    assert jax.tree.structure(state) == jax.tree.structure(block.state_specs()) and block.draws
    assert nn.Residual(block.shortcut, body[1]).draws and not nn.Residual(block.shortcut).draws
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {np.dtype(float)}
    x = jnp.asarray(np.random.default_rng(P.rank).normal(size=(4, 3)))
    y, new = dj.jit(lambda *args: block(*args[:2], state=args[2], key=key))(params, x, state)
    first, its = body(params["body"], x, state=state["body"], key=jax.random.split(key)[0])
    second, others = block.shortcut(params["shortcut"], x, state=state["shortcut"])
    np.testing.assert_allclose(y, first + second, rtol=0, atol=1e-14)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), new, {"body": its, "shortcut": others})
    y, same = block(params, x, state=new, training=False)
    want = sum((x - s["running_mean"]) / jnp.sqrt(s["running_var"] + 1e-5) for s in (its[0], others))
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-14)
    jax.tree.map(np.testing.assert_array_equal, same, new)
    held = {rank: dj.ShapeDtype((4, 3), np.dtype(float)) for rank in range(2)}
    assert block.plan(held).outputs == held
    table = nn.Sequential(block, jax.nn.relu).table().splitlines()
    assert [line.split()[0] for line in table[1:4]] == ["0.0.0", "0.0.1", "0.1"]
    narrow = nn.Residual(nn.Precision(nn.DistributedLayerNorm(rows, 3), output="float32"))
    assert narrow.plan(held).outputs == held


def test_what_will_be_where() -> None:
    """From one team to another, on all workers without a message; and a way without a state has none."""
    P = dj.planning_world(4, 3)
    layer = CASES[1].layer(P)
    x_spec = dj.TensorSpec((2, 5), PAIR.partition(P))
    assert layer.output_spec(x_spec) == dj.TensorSpec((2, 3), on(1, 2).partition(P))
    held = {rank: dj.ShapeDtype((2, features), np.dtype(float)) for rank, features in enumerate((0, 2, 3, 0))}
    assert [its.shape for _, its in sorted(layer.plan(held).outputs.items())] == [(2, 2), (2, 1), (2, 0), (2, 0)]
    rows = on(2, 1).partition(P)
    block = nn.Residual(nn.DistributedBatchNorm(rows, 3), nn.DistributedLayerNorm(rows, 3))
    assert block.state_specs()["shortcut"] == block.init_state()["shortcut"] == {} != block.state_specs()["body"]


def test_initial_weights_of_both_ways() -> None:
    """Two layers alike get different ones, those of the keys that `key` is split into."""
    P, key = on(1, 1).partition(dj.planning_world(1)), jax.random.key(2)
    layer = nn.DistributedLinear(P, P, P, 3, 3)
    params = nn.Residual(layer, layer).init(key)
    for (_, got), its_key in zip(sorted(params.items()), jax.random.split(key), strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, layer.init(its_key))
    assert not np.array_equal(params["body"]["weight"], params["shortcut"]["weight"])


@pytest.mark.simulated(2)
def test_outputs_that_differ_are_refused_on_every_worker() -> None:
    P = dj.Partition()
    rows = on(2, 1).partition(P)
    narrow = nn.Residual(nn.Sequential(nn.DistributedLinear(rows, rows, on(2, 1, 1).partition(P), 3, 2)))
    params = narrow.init(jax.random.key(0))
    for apply in (narrow, dj.jit(narrow)):
        with pytest.raises(
            dj.PlanError, match=r"On worker 0: the outputs of `body` \(2 x 2\) and `shortcut` \(2 x 3\)"
        ):
            apply(params, jnp.ones((2, 3)))
    with pytest.raises(dj.PlanError, match="must have the same shape for a sum"):
        narrow.plan({rank: dj.ShapeDtype((2, 3), np.dtype(float)) for rank in range(2)})


def test_pytorchs_parameters() -> None:
    """The body's modules, and then the shortcut's, whatever they are called."""
    P = on(1, 1).partition(dj.planning_world(1))
    body = nn.Sequential(nn.DistributedLinear(P, P, P, 3, 2), nn.DistributedBatchNorm(P, 2))
    block = nn.Residual(body, nn.DistributedLinear(P, P, P, 3, 2, bias=False))
    draw = np.random.default_rng(0).normal
    state_dict = {"conv.weight": draw(size=(2, 3)), "conv.bias": draw(size=2)}
    state_dict |= {f"bn.{name}": draw(size=2) for name in ("weight", "bias", "running_mean", "running_var")}
    state_dict |= {"bn.num_batches_tracked": np.int32(7), "downsample.0.weight": draw(size=(2, 3))}
    params, state = dj.from_torch(state_dict, nn.Sequential(jax.nn.relu, block), state=True)
    assert jax.tree.structure(params[1]) == jax.tree.structure(block.param_specs())
    np.testing.assert_allclose(params[1]["shortcut"]["weight"], state_dict["downsample.0.weight"], rtol=1e-6)
    np.testing.assert_allclose(params[1]["body"][1]["bias"], state_dict["bn.bias"], rtol=1e-6)
    assert int(state[1]["body"][1]["num_batches_tracked"]) == 7 and state[1]["shortcut"] == {}


def test_refusals() -> None:
    """When the block is made, in one sentence on every worker."""
    for sentence, kind, make in (
        ("`body` (=3) must be a layer; functions go", dj.InvalidTypeError, lambda P: nn.Residual(3)),
        ("must be a layer, or None; functions go into an nn.Sequential.", dj.InvalidTypeError,
         lambda P: nn.Residual(moved(P), jnp.sin)),
        *(("`body` leaves its output on 1 x 2 (0, 1), but `shortcut`", dj.InvalidArgumentError,
           lambda P, shortcut=shortcut: nn.Residual(moved(P), shortcut(P)))
          for shortcut in (lambda P: None, lambda P: nn.Dropout(on(2, 1).partition(P)), lambda P: moved(P, 1, 0))),
    ):  # fmt: skip
        assert sentence in refusal(2, make, kind)


@pytest.mark.simulated(2)
def test_states_keys_and_plans_of_a_skip() -> None:
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


def test_plans_of_a_skip_on_other_workers() -> None:
    """Workers outside of the partition keep their placeholders, in a plan as in a run."""
    P = dj.planning_world(4)
    spec = dj.TensorSpec((2, 3, 7), LINES.partition(P))
    blocks = {rank: dj.ShapeDtype(spec.shape_on(rank) if rank else (2, 0), np.dtype("float32")) for rank in range(4)}
    outputs = nn.Skip(conv(P, LINES, 3, 5)).plan(blocks).outputs
    assert [outputs[rank].shape for rank in range(4)] == [(2, 0), (2, 8, 2), (2, 8, 2), (2, 8, 3)]


def test_refusals_of_a_skip() -> None:
    """When it is made, in one sentence on every worker; and when the blocks don't fit."""
    assert "`body` (=3) must be a layer; functions go" in refusal(2, lambda P: nn.Skip(3), dj.InvalidTypeError)
    for sentence, make in (
        ("`join` (='sum') must be one of 'concatenate', 'add'.", lambda P: nn.Skip(norm(P, on(1, 1, 2), 3), "sum")),
        ("`axis` (=(3,)) names dimension 3", lambda P: nn.Skip(norm(P, on(1, 1, 2), 3), axis=3)),
        ("`body` must have a layer with a partition", lambda P: nn.Skip(nn.Sequential(jnp.sin))),
        ("`body` takes its input from 2 x 1 (0, 1), but leaves its output on 1 x 2 (0, 1)",
         lambda P: nn.Skip(moved(P))),
    ):  # fmt: skip
        assert sentence in refusal(2, make, dj.InvalidArgumentError)
    pool = nn.Skip(nn.DistributedMaxPool1d(on(1, 1, 1).partition(dj.planning_world(1)), 2))
    with pytest.raises(dj.PlanError, match=r"`xs\[1\]` \(of shape \(1, 2, 2\)\) must have the blocks of `xs\[0\]`"):
        pool.plan({0: dj.ShapeDtype((1, 2, 5), np.dtype("float32"))})
