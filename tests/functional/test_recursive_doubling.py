"""All-gather and reduce-scatter along many workers: ceil(log2 p) messages each, and no more bytes than direct ones."""

import numpy as np
import pytest
from playing import play, play_adjoint

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.all_gather import plan_all_gather
from distdl_jax.plans.shape_dtype import ShapeDtype


@pytest.mark.parametrize("p", [9, 12, 16, 17, 33])
def test_a_long_line_gathers_by_doubling(p: int) -> None:
    """On 2 x p workers with blocks of 0 to 3 rows: the whole, everywhere; back the sums; messages and elements sent."""
    rng = np.random.default_rng(p)
    lengths = [int(n) for n in rng.integers(0, 4, p)]
    xs = {w: rng.integers(-9, 10, (lengths[w % p], 2)).astype(float) for w in range(2 * p)}
    P = dj.planning_world(2 * p).grid([p, 2], [w + p * c for w in range(p) for c in range(2)])
    plan = plan_all_gather({w: ShapeDtype(x.shape, x.dtype) for w, x in xs.items()}, P, 0)
    wholes = [np.concatenate([xs[w + p * c] for w in range(p)]) for c in range(2)]
    ys = play(plan, xs)
    for worker, y in ys.items():
        np.testing.assert_array_equal(y, wholes[worker // p])
    for worker, dx in play_adjoint(plan, ys).items():
        np.testing.assert_array_equal(dx, p * xs[worker])
    for adjoint in (False, True):
        of_workers = [plan.operations(worker, adjoint=adjoint) for worker in range(2 * p)]
        assert max(map(len, of_workers)) == (p - 1).bit_length()
        received = sum(op.count if op.kind == "recv" else op.received for ops in of_workers for op in ops)
        assert received == 2 * 2 * (p - 1) * sum(lengths)


def test_a_sharded_weight_is_gathered_by_doubling() -> None:
    """Cut over 16 workers of a data-parallel convolution: 4 messages for the weight, 4 for the bias."""
    P = dj.planning_world(16).grid([16, 1, 1])
    layer = nn.DistributedConv1d(P, in_channels=3, out_channels=20, kernel_size=3, sharded=True)
    plan = layer.plan({w: ShapeDtype((2, 3, 8), np.dtype("float32")) for w in range(16)})
    assert [len(gather.operations(5)) for gather in plan.of_params.gathered.values()] == [4, 4]
