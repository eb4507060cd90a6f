"""The Dice and the focal loss beside MONAI's and torchvision's formulas on whole tensors."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.examples import LONG
from loss_cases import LossCase, check, shape_of
from matrix.partitions import On, on
from sequential import cut

import distdl_jax as dj
from distdl_jax import nn

draw = np.random.default_rng(4)


def one_hot(labels: Any, classes: int) -> Any:
    return jnp.moveaxis(jax.nn.one_hot(labels, classes), -1, 1)


def case(
    kind: str, terms: Any, P_x: On, sizes: Any, x: Any, target: Any, options: Any, of_nothing: bool = False
) -> LossCase:
    loss, reduction = partial(getattr(nn, f"Distributed{kind}Loss"), **options), options.get("reduction", "mean")
    name = f"{kind} {sizes} {P_x} {target.ndim} {options}"
    return LossCase(name, loss, terms, P_x, sizes, x, target, reduction=reduction, of_nothing=of_nothing)


def dice(P_x: On, *sizes: Any, labels: bool = False, **options: Any) -> LossCase:
    shape = shape_of(sizes)
    target = draw.integers(0, shape[1], (shape[0], *shape[2:])) if labels else draw.integers(0, 2, shape)
    x = draw.uniform(0.1, 0.9, shape) if labels else 3 * draw.standard_normal(shape) ** 2

    def terms(x: Any, target: Any) -> Any:
        t = one_hot(target, shape[1]) if labels else target
        x = jax.nn.softmax(x, 1) if options.get("softmax") else x
        x = jax.nn.sigmoid(x) if options.get("sigmoid") else x
        if not options.get("include_background", True):
            x, t = x[:, 1:], t[:, 1:]
        axes = tuple(range(2, len(shape))) if not options.get("batch") else (0, *range(2, len(shape)))
        squares = (lambda a: a**2) if options.get("squared_pred") else (lambda a: a)
        below = squares(t).sum(axes) + squares(x).sum(axes)
        return 1 - (2 * (t * x).sum(axes) + options.get("smooth_nr", 1e-5)) / (below + options.get("smooth_dr", 1e-5))

    return case("Dice", terms, P_x, sizes, x, target, options, True)


def binary_focal(P_x: On, *sizes: Any, **options: Any) -> LossCase:
    """torchvision.ops.sigmoid_focal_loss."""
    shape = shape_of(sizes)
    alpha, gamma = options.get("alpha"), options.get("gamma", 2)
    target = draw.integers(0, 2, shape).astype(float) if gamma != 1.5 else draw.uniform(size=shape)

    def terms(x: Any, t: Any) -> Any:
        p = jax.nn.sigmoid(x)
        entropy = -(t * jax.nn.log_sigmoid(x) + (1 - t) * jax.nn.log_sigmoid(-x))
        loss = entropy * (1 - (p * t + (1 - p) * (1 - t))) ** gamma
        return loss if alpha is None else (alpha * t + (1 - alpha) * (1 - t)) * loss

    return case("Focal", terms, P_x, sizes, 3 * draw.standard_normal(shape), target, options)


def focal_of_classes(P_x: On, *sizes: Any, probable: bool = False, **options: Any) -> LossCase:
    shape = shape_of(sizes)
    labels = draw.integers(0, shape[1], (shape[0], *shape[2:]))
    alpha, gamma = options.get("alpha", (1.0,) * shape[1]), options.get("gamma", 2)
    weights = np.array(alpha if isinstance(alpha, tuple) else [1 - alpha] + [alpha] * (shape[1] - 1))
    target = np.moveaxis(draw.dirichlet(np.ones(shape[1]), labels.shape), -1, 1) if probable else labels

    def terms(x: Any, target: Any) -> Any:
        log_p = jax.nn.log_softmax(x, 1)
        t = target if probable else one_hot(target, shape[1])
        each = t * weights.reshape(-1, *(1,) * (len(shape) - 2))
        return -(each * (1 - jnp.exp(log_p)) ** gamma * log_p).sum(1)

    options["use_softmax"] = True
    return case("Focal", terms, P_x, sizes, 3 * draw.standard_normal(shape), target, options)


CASES = (
    dice(on(1, 2, 2, ranks=(3, 1, 2, 0)), 2, 3, 5),
    dice(on(1, 3, 1, ranks=(2, 0, 3)), 2, 4, 3, labels=True, softmax=True, include_background=False),
    dice(on(2, 1, 2), 3, 3, [0, 4], batch=True, squared_pred=True, sigmoid=True, smooth_nr=0.5, smooth_dr=0.25),
    dice(on(2, 2), 3, 3, reduction="sum"),
    binary_focal(on(4), 5, alpha=0.25),
    binary_focal(on(2, 2, ranks=(3, 1, 2, 0)), 5, 3, gamma=1.5, reduction="sum"),
    focal_of_classes(on(2, 2, ranks=(3, 1, 2, 0)), 5, 3, alpha=(0.5, 1.0, 2.0)),
    focal_of_classes(on(1, 4, 1), 2, 3, 2, probable=True, gamma=0.5, alpha=0.25),
)
MORE = (
    dice(on(1, 2, 2, 1), 2, 3, 3, 4, include_background=False, squared_pred=True),
    focal_of_classes(on(1, 2, 2), 2, 4, 3, gamma=0),
)


@pytest.mark.simulated(4)
def test_parts_add_up_to_the_loss_of_the_whole() -> None:
    check(CASES if LONG == 1 else CASES + MORE)


@pytest.mark.simulated(4)
def test_each_elements_loss_and_what_is_no_number() -> None:
    """With "none": blocks. Labels on the first workers alone; a label that is no class; logits that are sure."""
    P, draw = dj.Partition(), np.random.default_rng(1)
    P_x, P_n, sure = on(1, 2, 2), on(2, 2), np.array([[800.0, -800.0]])
    x, t = draw.uniform(size=(3, 5, 4)), draw.integers(0, 5, (3, 4))
    own = cut(x, P_x, P.rank), t[:, :2] if P.rank % 2 == 0 else t[:, 2:]
    labels = own[1] if P.rank < 2 else np.zeros(0, int)
    wrong = own[1].copy()
    wrong[0, 0] = 5
    grid = P_x.partition(P)
    dices = nn.DistributedDiceLoss(grid, "none", include_background=False), nn.DistributedDiceLoss(grid, batch=True)
    each = nn.DistributedFocalLoss(grid, "none", use_softmax=True)
    binary = nn.DistributedFocalLoss(P_n.partition(P), "sum", gamma=0.5)

    def everything(x: Any) -> Any:
        edge = jnp.asarray(sure[:, P.rank % 2 :][:, :1] if P.rank < 2 else np.zeros((0, 1)))
        at_edge = jax.value_and_grad(lambda x: binary(x, (x > 0).astype(float)))(edge)
        return dices[0](x, labels), dices[1](x, wrong), each(x, labels), each(x, wrong), at_edge

    dice, of_wrong, focal, focal_of_wrong, at_edge = dj.jit(everything)(own[0])
    hot = np.moveaxis(np.eye(5)[t], -1, 1)
    want = 1 - (2 * (hot * x).sum(2) + 1e-5) / (hot.sum(2) + x.sum(2) + 1e-5)
    mine = {0: want[:, 1:3], 2: want[:, 3:]}.get(P.rank, np.zeros((3, 0)))
    np.testing.assert_allclose(dice, mine, rtol=1e-12)
    log_p = np.asarray(jax.nn.log_softmax(x, 1))
    want = -(hot * (1 - np.exp(log_p)) ** 2 * log_p).sum(1)
    np.testing.assert_allclose(
        focal, (want[:, :2], want[:, 2:])[P.rank] if P.rank < 2 else np.zeros((3, 0)), rtol=1e-11
    )
    assert np.isnan(sum(P.allgather_data(float(of_wrong))))
    assert P.rank > 0 or np.argwhere(np.isnan(focal_of_wrong)).tolist() == [[0, 0]]
    assert at_edge[0] == 0 and not np.any(at_edge[1])
