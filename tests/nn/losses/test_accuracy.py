"""The largest class and the accuracy, over classes that are split, and labels of every integer dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.partitions import on
from sequential import cut, shape_of

import distdl_jax as dj
from distdl_jax import nn


@pytest.mark.simulated(4)
def test_argmax_and_accuracy() -> None:
    """Over classes that are split, with ties, NaN, and blocks without a class."""
    P, draw = dj.Partition(), np.random.default_rng(2)
    for P_x, sizes in ((on(2, 2, ranks=(3, 1, 2, 0)), (5, 7)), (on(1, 4), (4, 3)), (on(1, 3), (3, (0, 2, 3)))):
        x = draw.integers(0, 3, shape_of(sizes)).astype(float)
        x[1, -1] = np.nan
        own, grid, best = cut(x, P_x, P.rank, sizes), P_x.partition(P), np.argmax(x, 1)
        labels = np.concatenate([best[:2], draw.integers(0, x.shape[1], len(x) - 2)])
        if own is None:
            continue
        rows = np.array_split(np.arange(len(x)), P_x.shape[0])[grid.index[0]]
        accuracy = nn.DistributedAccuracy(grid)
        both = jax.jit(lambda x, t, P=grid, accuracy=accuracy: (dj.functional.argmax(x, P), accuracy(x, t)))
        largest, part = both(own, labels[rows])
        np.testing.assert_array_equal(largest, best[rows])
        np.testing.assert_allclose(sum(grid.allgather_data(float(part))), np.mean(best == labels), rtol=1e-12)


@pytest.mark.simulated(2)
def test_argmax_of_bools() -> None:
    """The first that is true, and the first of all where none is."""
    P = dj.Partition().grid([1, 2])
    x = np.array([[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 0]], bool)
    np.testing.assert_array_equal(dj.functional.argmax(jnp.asarray(x[:, 2 * P.rank : 2 * P.rank + 2]), P), [0, 3, 1])


@pytest.mark.simulated(2)
def test_labels_of_every_integer_dtype() -> None:
    """More classes than bytes have, and labels that a byte would take for the one that is ignored."""
    P, draw = dj.Partition(), np.random.default_rng(3)
    grid = P.grid([1, 2])
    both = nn.DistributedCrossEntropyLoss(grid), nn.DistributedAccuracy(grid)
    for dtype, labels, classes in ((np.uint8, [5, 156, 200], 300), (np.int8, [5, 100, 7], 300), (bool, [1, 0, 1], 4)):
        x = draw.standard_normal((3, classes))
        own = x[:, : classes // 2] if P.rank == 0 else x[:, classes // 2 :]
        want = -np.mean(np.asarray(jax.nn.log_softmax(x))[np.arange(3), labels])
        best = jnp.asarray((np.argmax(x, 1) + np.array([0, 1, 0])) % classes, np.uint16)
        parts = jax.jit(lambda x, *targets: [its(x, t) for its, t in zip(both, targets, strict=True)])(
            own, jnp.asarray(labels, dtype), best
        )
        np.testing.assert_allclose(np.sum(P.allgather_data(np.asarray(parts)), 0), [want, 2 / 3], rtol=1e-12)
