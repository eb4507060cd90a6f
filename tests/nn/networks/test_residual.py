"""A way round layers beside plain JAX: partitions, states and keys of both ways."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from blocks import block_of
from matrix.partitions import On, on
from sequential import Beside, check_beside, cut

import distdl_jax as dj
from distdl_jax import nn

ROWS, PAIR = on(3, 1, ranks=(3, 1, 2)), on(1, 2, ranks=(2, 1))


def linear(P: dj.Partition, P_x: On, P_y: On, P_W: On, *sizes: int) -> nn.DistributedLinear:
    return nn.DistributedLinear(*(its.partition(P) for its in (P_x, P_y, P_W)), *sizes)


def normalised(p: Any, x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5) * p["weight"] + p["bias"]


CASES = (
    Beside(
        "on uneven rows",
        ([0, 4, 1], 3),
        lambda P: nn.Residual(nn.Sequential(nn.DistributedBatchNorm(ROWS.partition(P), 3), jnp.sin)),
        lambda p, x: x + jnp.sin(normalised(p["body"][0], x)),
        ROWS,
        y_sizes=([0, 4, 1], 3),
    ),
    Beside(
        "to other workers",
        (2, 5),
        lambda P: nn.Residual(
            nn.Sequential(linear(P, PAIR, on(1, 2), on(2, 2), 5, 3), jnp.sin),
            linear(P, PAIR, on(1, 2), on(2, 2, ranks=(3, 0, 1, 2)), 5, 3),
        ),
        lambda p, x: (
            jnp.sin(x @ p["body"][0]["weight"].T + p["body"][0]["bias"])
            + x @ p["shortcut"]["weight"].T
            + p["shortcut"]["bias"]
        ),
        PAIR,
        on(1, 2),
    ),
)


@pytest.mark.simulated(4)
def test_beside_plain_jax() -> None:
    """Output and gradients, on uneven blocks and from one team to another."""
    check_beside(CASES)


@pytest.mark.simulated(4)
def test_jaxs_own_gradient() -> None:
    """From one team to another: it knows of each worker's program alone, and yet all of them do the same."""
    P, case = dj.Partition(), CASES[1]
    layer = case.layer(P)
    specs, mine = layer.param_specs(), cut(case.x, PAIR, P.rank)
    wholes = case.params(specs)
    params, x = jax.tree.map(block_of, wholes, specs), np.zeros((2, 0)) if mine is None else mine
    got = jax.jit(jax.grad(lambda params, x: jnp.sum(jnp.sin(layer(params, x))), 1))(params, x)
    first, second = wholes["body"][0], wholes["shortcut"]
    z = case.x @ first["weight"].T + first["bias"]
    dy = np.cos(np.sin(z) + case.x @ second["weight"].T + second["bias"])
    want = cut((dy * np.cos(z)) @ first["weight"] + dy @ second["weight"], PAIR, P.rank)
    np.testing.assert_allclose(got, x if want is None else want, rtol=0, atol=1e-13)


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
    with pytest.raises(dj.PlanError, match="must have the same shape, to be added"):
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

    def moved(P: dj.Partition, *ranks: int) -> Any:
        return nn.Repartition(on(2, 1).partition(P), on(1, 2, ranks=ranks or None).partition(P))

    for sentence, kind, make in (
        ("`body` (=3) must be a layer; functions go", dj.InvalidTypeError, lambda P: nn.Residual(3)),
        ("must be a layer, or None; functions go into an nn.Sequential.", dj.InvalidTypeError,
         lambda P: nn.Residual(moved(P), jnp.sin)),
        *(("`body` leaves its output on 1 x 2 (0, 1), but `shortcut`", dj.InvalidArgumentError,
           lambda P, shortcut=shortcut: nn.Residual(moved(P), shortcut(P)))
          for shortcut in (lambda P: None, lambda P: nn.Dropout(on(2, 1).partition(P)), lambda P: moved(P, 1, 0))),
    ):  # fmt: skip
        assert sentence in refusal(2, make, kind)
