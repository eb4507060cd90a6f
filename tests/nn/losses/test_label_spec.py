"""Labels cut by the spec that a loss gives are those that it takes: the loss of the whole."""

import jax
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn


@pytest.mark.simulated(4)
@pytest.mark.parametrize("grid", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1)])
def test_blocks_of_labels(grid: tuple[int, ...]) -> None:
    """With samples, classes and features split."""
    P = dj.Partition().grid(grid)
    spec = dj.TensorSpec((5, 6, 3), P)
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=spec.global_shape), draw.integers(0, 6, (5, 3))
    loss, accuracy = nn.DistributedCrossEntropyLoss(P), nn.DistributedAccuracy(P)
    assert loss.label_spec(spec) == accuracy.label_spec(spec) == dj.TensorSpec((5, 3), P, replicated=1)
    own = loss.label_spec(spec).block(labels)
    want = -np.mean(np.take_along_axis(np.asarray(jax.nn.log_softmax(logits, 1)), labels[:, None], 1))
    total = sum(P.allgather_data(float(loss(spec.block(logits), own))))
    np.testing.assert_allclose(total, want, rtol=1e-12)
    right = sum(P.allgather_data(float(accuracy(spec.block(logits), own))))
    np.testing.assert_allclose(right, np.mean(logits.argmax(1) == labels), rtol=1e-12)


def test_specs_that_do_not_fit() -> None:
    world = dj.planning_world(4)
    P, other = world.grid([2, 2]), world.grid([4, 1])
    loss = nn.DistributedCrossEntropyLoss(P)
    for spec in (dj.TensorSpec((5, 6), other), dj.TensorSpec((6,), P, replicated=0)):
        with pytest.raises(dj.InvalidArgumentError, match=r"`logits_spec` .* must be of blocks on P_x, 2 x 2"):
            loss.label_spec(spec)
    with pytest.raises(dj.InvalidTypeError, match="`logits_spec`"):
        loss.label_spec(P)  # type: ignore[arg-type]
    focal = nn.DistributedFocalLoss(P)
    assert focal.label_spec(dj.TensorSpec((5, 6), P)) == dj.TensorSpec((5, 6), P)
