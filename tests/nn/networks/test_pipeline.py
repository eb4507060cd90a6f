"""Pipelines: both schedules beside plain JAX, the order of the 1F1B schedule, what it keeps, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from matrix.partitions import on
from sequential import Beside, check_beside

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.plans.pipeline_schedule import OneForwardOneBackward

SIZES = (3, 5, 4, 2)


def pipeline(P: dj.Partition, microbatches: int, batch: int = 1, stages: int = 3) -> nn.Pipeline:
    """Linear stages on a team of `batch` workers each, the first ones of `P`."""

    def stage(s: int) -> nn.Sequential:
        ranks = range(s * batch, (s + 1) * batch)
        P_x, P_W = P.grid([batch, 1], ranks), P.grid([batch, 1, 1], ranks)
        return nn.Sequential(nn.DistributedLinear(P_x, P_x, P_W, SIZES[s], SIZES[s + 1]), jnp.tanh)

    return nn.Pipeline([stage(s) for s in range(stages)], microbatches)


def plain(params: Any, x: Any) -> Any:
    for linear, _ in params:
        x = jnp.tanh(x @ linear["weight"].T + linear["bias"])
    return x


CASES = (
    Beside("three teams", (6, 3), lambda P: pipeline(P, 3), plain, on(1, 1), on(1, 1, ranks=(2,))),
    Beside("the batch split", (8, 3), lambda P: pipeline(P, 2, 2, 2), plain, on(2, 1), on(2, 1, ranks=(2, 3))),
)


@pytest.mark.simulated(4)
def test_beside_plain_jax() -> None:
    """Output and gradients as of any network: all microbatches forward, then all back."""
    check_beside(CASES)


@pytest.mark.world(4)
@pytest.mark.parametrize(("microbatches", "batch", "stages"), [(4, 1, 3), (2, 2, 2)])
def test_one_forward_one_backward(microbatches: int, batch: int, stages: int) -> None:
    """Value and gradient beside plain JAX, on teams of their own, in one program that dj.jit has compared."""
    P = dj.Partition()
    net = pipeline(P, microbatches, batch, stages)
    draw = np.random.default_rng(3).standard_normal
    shapes = (8, SIZES[0]), (8, SIZES[stages])
    whole, target = (jnp.asarray(draw(shape)) for shape in shapes)
    ends = net.input_partition, net.output_partition
    specs = [dj.TensorSpec(shape, end) for shape, end in zip(shapes, ends, strict=True)]
    mine = [t if P.rank == 0 else dj.zero_volume_tensor(dtype=float) for t in (whole, target)]
    params, (x, y) = net.init(jax.random.key(0), float), dj.scatter(mine, specs)
    loss = nn.DistributedMSELoss(net.output_partition)
    value, gradient = dj.jit(net.value_and_grad(loss))(params, x, y)
    all_params, all_gradients = (dj.gather(tree, net.param_specs()) for tree in (params, gradient))
    if P.rank == 0:
        expected = jax.value_and_grad(lambda p: jnp.mean((plain(p, whole) - target) ** 2))(all_params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), (value, all_gradients), expected)


def test_order_of_the_schedule() -> None:
    """Each step comes after those that it needs, and all are done; no more are under way than the schedule says."""
    for stages in (1, 2, 3, 5):
        for microbatches in (1, 2, 4, 9):
            schedule, done, most = OneForwardOneBackward(stages, microbatches), set(), [0] * stages
            for tick in range(2 * schedule.rounds):
                steps = {
                    (s, m, schedule.is_backward(s, tick % 2))
                    for s in range(stages)
                    if 0 <= (m := schedule.microbatch(s, tick % 2) + tick // 2) < microbatches
                }
                for s, m, backward in steps:
                    forward_before = (s, m, False) if backward else (s - 1, m, False)
                    assert forward_before in done or (s == 0 and not backward)
                    assert not backward or s == schedule.last or (s + 1, m, True) in done
                assert not steps & done
                done |= steps
                for s in range(stages):
                    under_way = sum((s, m, False) in done and (s, m, True) not in done for m in range(microbatches))
                    most[s] = max(most[s], under_way)
            assert len(done) == 2 * stages * microbatches
            assert most == [min(schedule.under_way(s), microbatches) for s in range(stages)]


@pytest.mark.simulated(2)
def test_state_and_random_keys_go_through_the_microbatches() -> None:
    """Running statistics are those after m batches; a microbatch has a key of its own. 1F1B refuses both."""
    P = dj.Partition()
    first, second = P.grid([1, 1]), P.grid([1, 1], [1])
    norm, drop = nn.DistributedBatchNorm(first, 3), nn.Dropout(second, 0.5)
    net = nn.Pipeline([norm, drop], 2)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 3))) if P.rank == 0 else dj.zero_volume_tensor(6)
    params, state, key = net.init(jax.random.key(0), float), net.init_state(float), jax.random.key(1)
    y, after = jax.jit(lambda x: net(params, x, state=state, key=key))(x)
    expected = state[0]
    for half in (x[:3], x[3:]):
        _, expected = norm(params[0], half, state=expected, training=True)
    jax.tree.map(np.testing.assert_allclose, after[0], expected)
    if P.rank == 1:
        assert 0 < (y == 0).sum() < y.size and ((y[:3] == 0) != (y[3:] == 0)).any()
    with pytest.raises(dj.InvalidArgumentError, match="have a state or draw random numbers"):
        net.value_and_grad(jnp.sum)


@pytest.mark.simulated(2)
def test_1f1b_keeps_less() -> None:
    """The first of two stages keeps the inputs of two microbatches, not the activations of all eight."""
    P = dj.Partition()
    grids, n = [P.grid([1, 1], [s]) for s in range(2)], 64
    net = nn.Pipeline([nn.Sequential(*[nn.DistributedLinear(G, G, G, n, n), jnp.tanh] * 4) for G in grids], 8)
    x, y = (jnp.ones((4096, n)) if G.active else dj.zero_volume_tensor(4096) for G in grids)
    params, loss = net.init(jax.random.key(0), float), nn.DistributedMSELoss(grids[1])
    both = net.value_and_grad(loss), dj.grad(lambda p, x, y: loss(net(p, x), y))
    compiled = [jax.jit(f).lower(params, x, y).compile() for f in both]
    used = [its.memory_analysis().temp_size_in_bytes for its in compiled]
    assert used[0] < 0.5 * used[1]


def test_what_is_refused() -> None:
    def norm(P: dj.Partition) -> Any:
        return nn.DistributedLayerNorm(P.grid([2, 1]), 3)

    for sentence, kind, make in (
        ("`stages` (=()) must be one layer or more", dj.InvalidArgumentError, lambda P: nn.Pipeline([], 2)),
        ("`microbatches` (=0) must be", dj.InvalidArgumentError, lambda P: nn.Pipeline([norm(P)], 0)),
        ("`stages[1]`", dj.InvalidTypeError, lambda P: nn.Pipeline([norm(P), jnp.tanh], 1)),
        ("must have an `input_partition`", dj.InvalidArgumentError,
         lambda P: nn.Pipeline([nn.Sequential(jnp.tanh)], 1)),
        ("take the batch split over 2 workers, but leave it split over 1", dj.InvalidArgumentError,
         lambda P: nn.Pipeline([norm(P), nn.Repartition(P.grid([2, 1]), P.grid([1, 1]))], 1)),
        ("6 samples on worker 0: all workers must have the same number, a multiple of `microbatches`", dj.PlanError,
         lambda P: pipeline(P, 4).output_spec(dj.TensorSpec((6, 3), P.grid([1, 1])))),
    ):  # fmt: skip
        assert sentence in refusal(3, make, kind)
