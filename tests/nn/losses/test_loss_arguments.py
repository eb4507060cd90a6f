"""What losses are told: weights, labels and other arguments that don't fit are refused, in words."""

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.partitions import on

import distdl_jax as dj
from distdl_jax import nn

# Of no classes, and whether of no elements either.
WRONG_WEIGHTS: dict[str, tuple[Any, bool]] = {
    "2-d": (np.ones((2, 2)), True),
    "ragged": ([[1.0], [1.0, 2.0]], True),
    "texts": (["1", "2"], True),
    "a text that is a number": ("2", True),
    "NaN": ([1.0, np.nan], True),
    "complex": ([1j, 2.0], True),
    "truth values": (np.ones(2, bool), True),
    "an object": (object(), True),
    "a number": (2.0, False),
    "a scalar array": (np.asarray(2.0), False),
}
P = on(1, 1).partition(dj.planning_world(1))


@pytest.mark.parametrize("kind", WRONG_WEIGHTS)
def test_weights_that_are_none(kind: str) -> None:
    value, for_both = WRONG_WEIGHTS[kind]
    sentence = "must be a sequence of real numbers, one for each class"
    with pytest.raises(dj.InvalidTypeError, match=rf"`weight` \(=(.|\n)*\) {sentence}\."):
        nn.DistributedCrossEntropyLoss(P, weight=value)
    sentence = r"`pos_weight` \(=(.|\n)*\) must be a real number, or a sequence"
    with pytest.raises(dj.InvalidTypeError, match=sentence) if for_both else nullcontext():
        nn.DistributedBCEWithLogitsLoss(P, pos_weight=value)


def test_weights_that_are_traced() -> None:
    for name, make in (("weight", nn.DistributedCrossEntropyLoss), ("pos_weight", nn.DistributedBCEWithLogitsLoss)):
        for given in (lambda w: w, lambda w: [1.0, w[0]]):
            with pytest.raises(dj.InvalidTypeError, match=rf"`{name}` .* must be concrete numbers, but is traced"):
                jax.eval_shape(lambda w, name=name, make=make, given=given: make(P, **{name: given(w)}), jnp.ones(2))


def test_equal_weights_make_equal_losses() -> None:
    for numbers in ([1, 2], (1.0, 2.0), np.array([1, 2]), jnp.array([1.0, 2.0])):
        made = nn.DistributedCrossEntropyLoss(P, weight=numbers)
        assert made == nn.DistributedCrossEntropyLoss(P, weight=[1, 2]) and hash(made)
    for number in (2, np.asarray(2.0), jnp.asarray(2)):
        of_number = nn.DistributedBCEWithLogitsLoss(P, pos_weight=number)
        assert of_number == nn.DistributedBCEWithLogitsLoss(P, pos_weight=2.0) and hash(of_number)


def test_a_loss_of_ones_own_is_a_value() -> None:
    """Equal for one function, so that a jitted step that takes it is traced once; refused where it is no function."""
    loss = nn.DistributedLoss(P, jnp.subtract, "sum")
    assert loss == nn.DistributedLoss(P, jnp.subtract, reduction="sum") and hash(loss)
    assert loss != nn.DistributedLoss(P, jnp.add, "sum")
    with pytest.raises(dj.InvalidTypeError, match=r"`elementwise` \(='mean'\) must be a function\."):
        nn.DistributedLoss(P, "mean")  # type: ignore[arg-type]
    with pytest.raises(dj.InvalidArgumentError, match=r"`reduction` .* must be one of 'mean', 'sum', 'none'"):
        nn.DistributedLoss(P, jnp.subtract, "batchmean")


@pytest.mark.simulated(1)
def test_no_classes() -> None:
    P = dj.Partition().grid([1, 1])
    for options in ({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "weight": ()}):
        for labels in (jnp.zeros(0, int), jnp.full(3, -100)):
            loss = nn.DistributedCrossEntropyLoss(P, **options)  # type: ignore[arg-type]
            assert float(loss(jnp.ones((len(labels), 0)), labels)) == 0


@pytest.mark.simulated(2)
def test_refusals_when_it_is_called() -> None:
    world = dj.Partition()
    P, x, rank = world.grid([1, 2]), jnp.ones((3, 2)), world.rank
    mse, labels = nn.DistributedMSELoss(P), jnp.ones(3, int)
    for sentence, loss, *given in (
        ("On worker 1: `target` has shape 3 x 3, but must have the shape of", mse, x, jnp.ones((3, 2 + rank))),
        ("On worker 0: `target` has shape 4, but integer labels must be 3, one for",
         nn.DistributedCrossEntropyLoss(P), x, jnp.ones(4 - rank, int)),
        ("`weight` has 3 entries, but `prediction` has 4 classes",
         nn.DistributedCrossEntropyLoss(P, weight=[1, 2, 3]), x, labels),
        ("`prediction` must hold real floating-point numbers, but is int32", mse, x.astype("int32"), x),
        (r"`include_background` \(=False\) leaves no classes: `prediction` has 1 in",
         nn.DistributedDiceLoss(P, include_background=False), x[:, rank:1], x[:, rank:1]),
        ("`alpha` has 3 entries, but `prediction` has 4 classes",
         nn.DistributedFocalLoss(P, alpha=[1, 2, 3], use_softmax=True), x, labels),
        ("On worker 0: `target` has shape 4, but integer labels must be 3", nn.DistributedDiceLoss(P), x,
         jnp.ones(4, int)),
        ("must have an element along dimension 1", dj.functional.argmax, jnp.ones((3, 0)), P),
    ):  # fmt: skip
        with pytest.raises(dj.PlanError, match=sentence):
            loss(*given)
    with pytest.raises(
        dj.InvalidArgumentError, match=r"`elementwise` .* of shape \(3, 2\), but its result has shape \(3,\)"
    ):
        nn.DistributedLoss(P, lambda x, t: jnp.sum(x - t, 1))(x, x)


@pytest.mark.simulated(4)
@pytest.mark.parametrize("grid", [(1, 4, 1), (2, 1, 2), (1, 2, 2)])
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
        with pytest.raises(dj.InvalidArgumentError, match=r"`logits_spec` .* must be the spec of blocks on P_x, 2 x 2"):
            loss.label_spec(spec)
    with pytest.raises(dj.InvalidTypeError, match="`logits_spec`"):
        loss.label_spec(P)  # type: ignore[arg-type]
    focal = nn.DistributedFocalLoss(P)
    assert focal.label_spec(dj.TensorSpec((5, 6), P)) == dj.TensorSpec((5, 6), P)
