"""Losses beside those of the whole tensors, MONAI's and torchvision's among them: the sum of the workers' parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matrix.partitions import On, on
from sequential import Sizes, close, cut, shape_of

import distdl_jax as dj
from distdl_jax import nn


@dataclass(frozen=True, eq=False)
class LossCase:
    """A loss on P_x, and of whole tensors the loss of each element (or sample) and by what the mean divides.

    - `loss`: from P_x, the loss.
    - `of_nothing`: whether a worker without elements may have a part all the same.
    """

    name: str
    loss: Callable[[Any], Any]
    terms: Callable[[Any, Any], Any]
    P_x: On
    sizes: Sequence[Sizes]
    prediction: np.ndarray
    target: np.ndarray
    divisor: float | None = None
    reduction: str = "mean"
    of_nothing: bool = False

    def whole(self, prediction: Any) -> Any:
        terms = self.terms(prediction, self.target)
        return jnp.sum(terms) / {"sum": 1, "mean": self.divisor or terms.size, "batchmean": len(terms)}[self.reduction]

    def blocks(self, rank: int) -> tuple[Any, Any]:
        x = cut(self.prediction, self.P_x, rank, self.sizes)
        if x is None:
            return np.zeros(0), np.zeros(0, self.target.dtype)
        if self.target.shape == self.prediction.shape:
            return x, cut(self.target, self.P_x, rank, self.sizes)
        expanded = np.repeat(self.target[:, None], max(self.prediction.shape[1], self.P_x.shape[1]), 1)
        return x, cut(expanded, self.P_x, rank, [*self.sizes[:1], expanded.shape[1], *self.sizes[2:]])[:, 0]


def check(cases: Sequence[LossCase]) -> None:
    P = dj.Partition()
    losses = {case.name: case.loss(case.P_x.partition(P)) for case in cases}
    blocks = {case.name: case.blocks(P.rank) for case in cases}

    def everything(xs: Any) -> Any:
        parts = {name: losses[name](x, blocks[name][1]) for name, x in xs.items()}
        return sum(parts.values()), parts

    xs = {name: block[0] for name, block in blocks.items()}
    (_, parts), gradient = dj.jit(dj.value_and_grad(everything, has_aux=True))(xs)
    all_parts = P.allgather_data({name: float(part) for name, part in parts.items()})
    wholes = None
    if P.rank == 0:
        of_all = jax.jit(lambda xs: [jax.value_and_grad(case.whole)(x) for case, x in zip(cases, xs, strict=True)])
        wholes = jax.tree.map(np.asarray, of_all([case.prediction for case in cases]))
    for case, (want, its_gradient) in zip(cases, P.broadcast_data(wholes), strict=True):
        np.testing.assert_allclose(sum(each[case.name] for each in all_parts), want, rtol=1e-12, err_msg=case.name)
        mine = cut(its_gradient, case.P_x, P.rank, case.sizes)
        close(gradient[case.name], np.zeros(0) if mine is None else mine, 1e-12, case.name)
        if not xs[case.name].size and not case.of_nothing:
            assert parts[case.name] == 0, case.name


draw = np.random.default_rng(0)


def case(
    kind: str, terms: Any, P_x: On, sizes: Any, x: Any, target: Any, options: Any, divisor: float | None = None,
    of_nothing: bool = False, args: tuple[Any, ...] = (),
) -> LossCase:  # fmt: skip
    layer_type, reduction = getattr(nn, f"Distributed{kind}Loss"), options.get("reduction", "mean")
    name = f"{kind} {sizes} {P_x} {target.ndim} {options}"
    make = lambda P: layer_type(P, *args, **options)  # noqa: E731
    return LossCase(name, make, terms, P_x, sizes, x, target, divisor, reduction, of_nothing)


def elementwise(kind: str, terms: Any, P_x: On, *sizes: Any, between: bool = False, **options: Any) -> LossCase:
    """That of this kind; without, of the user's own terms."""
    shape = shape_of(sizes)
    prediction = draw.uniform(0.01, 0.99, shape) if between else draw.standard_normal(shape)
    target = draw.uniform(0.0, 1.0, shape) * 3 ** (not between)
    return case(kind, terms, P_x, sizes, prediction, target, options, args=() if kind else (terms,))


def of_classes(
    P_x: On, *sizes: Any, weights: bool = False, ignored: bool = False, probable: bool = False, **options: Any
) -> LossCase:
    shape = shape_of(sizes)
    classes, smoothing = shape[1], options.get("label_smoothing", 0.0)
    w = draw.uniform(0.5, 2, classes) if weights else np.ones(classes)
    labels = draw.integers(0, classes, (shape[0], *shape[2:]))
    if ignored:
        labels[0] = options.setdefault("ignore_index", -100)
    kept = labels != -100
    target = np.moveaxis(draw.dirichlet(np.ones(classes), labels.shape), -1, 1) if probable else labels

    def terms(x: Any, target: Any) -> Any:
        log_p = jax.nn.log_softmax(x, axis=1)
        t = target if probable else one_hot(target, classes)
        smooth = w.reshape(-1, *(1,) * (len(shape) - 2)) * ((1 - smoothing) * t + smoothing / classes)
        return -(smooth * log_p).sum(1) * (probable | kept)

    divisor = labels.size if probable else (w[np.where(kept, labels, 0)] * kept).sum()
    x, options["weight"] = 10 * draw.standard_normal(shape), w if weights else None
    return case("CrossEntropy", terms, P_x, sizes, x, target, options, divisor)


def squares(x: Any, t: Any) -> Any:
    return (x - t) ** 2


def binary(x: Any, t: Any) -> Any:
    return -(t * jnp.log(x) + (1 - t) * jnp.log(1 - x))


def weighted_logits(w: Any) -> Any:
    return lambda x, t: -(w * t * jax.nn.log_sigmoid(x) + (1 - t) * jax.nn.log_sigmoid(-x))


def one_hot(labels: Any, classes: int) -> Any:
    return jnp.moveaxis(jax.nn.one_hot(labels, classes), -1, 1)


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

    return case("Dice", terms, P_x, sizes, x, target, options, of_nothing=True)


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
    elementwise("MSE", squares, on(2, 2, ranks=(3, 1, 2, 0)), 5, 3),
    elementwise("MSE", squares, on(3, 1), [0, 3, 1], 2, reduction="sum"),
    elementwise("L1", lambda x, t: abs(x - t), on(1, 4), 2, 3),
    elementwise("Huber", lambda x, t: optax.huber_loss(x, t, delta=0.7), on(2, 1, 2), 3, 2, 3, delta=0.7),
    elementwise("BCE", binary, on(2, 2), 3, 3, between=True),
    elementwise("BCEWithLogits", weighted_logits(np.array([1, 2.0, 3])), on(2, 2), 3, 3, pos_weight=[1, 2, 3]),
    elementwise("BCEWithLogits", weighted_logits(1.0), on(4, 1), 2, 5),
    elementwise("KLDiv", lambda x, t: t * (jnp.log(t) - x), on(2, 2), 3, 3, between=True, reduction="batchmean"),
    elementwise("KLDiv", lambda x, t: jnp.exp(t) * (t - x), on(2, 2), 3, 4, log_target=True),
    elementwise("PoissonNLL", lambda x, t: jnp.exp(x) - t * x, on(2, 2), 3, 3),
    elementwise("PoissonNLL", lambda x, t: x - t * jnp.log(x + 1e-8), on(4, 1), 3, 3, between=True, log_input=False),
    elementwise("", optax.log_cosh, on(2, 2, ranks=(3, 1, 2, 0)), 5, 3),
    elementwise("", lambda x, t: jnp.abs(x - t) ** 1.5, on(3, 1), [0, 3, 1], 2, reduction="sum"),
    of_classes(on(2, 2, ranks=(3, 1, 2, 0)), 5, 3),
    of_classes(on(1, 3, ranks=(2, 0, 3)), 4, 7, weights=True, ignored=True, label_smoothing=0.2),
    of_classes(on(2, 2, 1), 3, 4, 2, probable=True, weights=True, label_smoothing=0.1),
    of_classes(on(1, 4), 3, 3, ignore_index=None, reduction="sum"),
    of_classes(on(1, 2, 2), 3, 4, 5, weights=True, ignored=True),
    dice(on(1, 2, 2, ranks=(3, 1, 2, 0)), 2, 3, 5),
    dice(on(1, 3, 1, ranks=(2, 0, 3)), 2, 4, 3, labels=True, softmax=True, include_background=False),
    dice(on(2, 1, 2), 3, 3, [0, 4], batch=True, squared_pred=True, sigmoid=True, smooth_nr=0.5, smooth_dr=0.25),
    dice(on(2, 2), 3, 3, reduction="sum"),
    binary_focal(on(4), 5, alpha=0.25),
    binary_focal(on(2, 2, ranks=(3, 1, 2, 0)), 5, 3, gamma=1.5, reduction="sum"),
    focal_of_classes(on(2, 2, ranks=(3, 1, 2, 0)), 5, 3, alpha=(0.5, 1.0, 2.0)),
    focal_of_classes(on(1, 4, 1), 2, 3, 2, probable=True, gamma=0.5, alpha=0.25),
    focal_of_classes(on(1, 2, 2), 2, 4, 3, gamma=0),
)


@pytest.mark.simulated(4)
def test_parts_add_up_to_the_loss_of_the_whole() -> None:
    """Values and gradients: samples, classes and features split, evenly or not, with empty blocks, on any teams."""
    check(CASES)


@pytest.mark.world(4)
def test_over_mpi() -> None:
    check(CASES[14:15])


@pytest.mark.simulated(4)
def test_each_elements_loss() -> None:
    """With "none": the block's; over classes those of the samples, where the first classes are. NaN for no class."""
    P, draw = dj.Partition(), np.random.default_rng(1)  # threads share no generator
    P_x, x, t = on(2, 2), draw.standard_normal((5, 4)), draw.standard_normal((5, 4))
    grid, (x_own, t_own) = P_x.partition(P), (cut(each, P_x, P.rank) for each in (x, t))
    squared, entropy = nn.DistributedMSELoss(grid, "none"), nn.DistributedCrossEntropyLoss(grid, "none")
    row, column = divmod(P.rank, 2)
    labels = np.arange(5) % 4
    own = np.array_split(labels, 2)[row]
    on_first = np.zeros(0, own.dtype) if column else own
    wrong = np.array([4, -1, *own[2:]])
    squares, losses, of_first, of_wrong = jax.jit(lambda x, t, *a: (squared(x, t), *(entropy(x, its) for its in a)))(
        x_own, t_own, own, on_first, wrong
    )
    np.testing.assert_allclose(squares, (x_own - t_own) ** 2)
    want = -np.asarray(jax.nn.log_softmax(x))[np.arange(5), labels]
    np.testing.assert_allclose(losses, np.zeros((len(own), 0)) if column else np.array_split(want, 2)[row], rtol=1e-12)
    np.testing.assert_array_equal(of_first, losses)
    assert np.all(np.isnan(of_wrong[:2]))
    np.testing.assert_allclose(of_wrong[2:], losses[2:], rtol=1e-12)


@pytest.mark.simulated(2)
def test_nothing_is_not_a_number() -> None:
    """All samples ignored, no samples at all, logits of -inf, probabilities of 0 and 1: 0 or what is right."""
    P = dj.Partition()
    grid = on(1, 2).partition(P)
    loss, impossible, sure = nn.DistributedCrossEntropyLoss(grid), jnp.full((2, 3), -jnp.inf), jnp.array([[0.0, 1.0]])
    cases = (
        (loss, jnp.ones((2, 3)), jnp.full(2, -100)),
        (loss, jnp.ones((0, 3)), jnp.zeros(0, int)),
        (loss, impossible.at[:, 1].set(0.0) if P.rank == 0 else impossible, jnp.ones(2, int)),
        (nn.DistributedBCELoss(grid, "sum"), sure, sure),
        (nn.DistributedBCELoss(grid, "sum"), sure, 1 - sure),
        (nn.DistributedKLDivLoss(grid, "sum"), sure, 0 * sure),
    )

    def values(xs: Any) -> Any:
        parts = [loss(x, target) for (loss, _, target), x in zip(cases, xs, strict=True)]
        return sum(parts), parts

    (total, parts), gradients = dj.jit(dj.value_and_grad(values, has_aux=True))([x for _, x, _ in cases])
    assert [float(part) for part in parts] == [0, 0, 0, 0, 200, 0] and total == 400
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    assert not any(np.any(gradient) for gradient in (*gradients[:3], gradients[4]))
    np.testing.assert_array_equal(gradients[3], [[1, -1]])


@pytest.mark.simulated(2)
def test_no_number_stays_none() -> None:
    """A NaN or an infinity in an element: its loss and gradients, in both arguments, are those of plain JAX."""
    P = dj.Partition().grid([2, 1])

    def poisson(x: Any, t: Any) -> Any:
        stirling = t * jnp.log(t) - t + jnp.log(2 * np.pi * t) / 2
        return jnp.exp(x) - t * x + jnp.where(t <= 1, 0, stirling)

    nan, inf = np.nan, np.inf
    cases: tuple[tuple[Any, Any, list[float], list[float]], ...] = (
        (nn.DistributedBCELoss(P, "none"), binary, [nan, -0.5, 1.5, 0.3], [0.2, 1, 0.2, 0.2]),
        (nn.DistributedHuberLoss(P, "none"), optax.huber_loss, [nan, inf, 2, 3], [0, 1, nan, inf]),
        (nn.DistributedHuberLoss(P, "none", inf), lambda x, t: squares(x, t) / 2, [nan, inf, 2, -3], [0, 1, 3, 1]),
        (nn.DistributedKLDivLoss(P, "none"), lambda x, t: t * jnp.log(t) - t * x, [nan, 1, 2, 3], [0.2, nan, 2, -1]),
        (nn.DistributedPoissonNLLLoss(P, "none", full=True), poisson, [nan, 1, 2, 3], [2, nan, 3, 0.5]),
    )

    def program() -> Any:
        def each(function: Any, *pair: Any) -> Any:
            return function(*pair), jax.vjp(function, *pair)[1](jnp.ones_like(pair[0]))

        pairs = [[jnp.array(its, float)[2 * P.rank :][:2, None] for its in pair] for _, _, *pair in cases]
        return tuple([each(case[place], *pair) for case, pair in zip(cases, pairs, strict=True)] for place in (0, 1))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), *dj.jit(program)())


@pytest.mark.simulated(4)
def test_half_precision_is_summed_in_float32() -> None:
    """5,000 errors of 1 add up to more than float16 counts to."""
    P = dj.Partition()
    x = jnp.ones((1250, 1), jnp.float16)
    squares = nn.DistributedMSELoss(on(4, 1).partition(P), "sum")
    loss = nn.DistributedCrossEntropyLoss(on(1, 4).partition(P))
    logits = jnp.zeros((3, 3000), jnp.float16)
    part, entropy = dj.jit(lambda x, y: (squares(x, 0 * x), loss(y, jnp.zeros(3, int))))(x, logits)
    assert part.dtype == jnp.float32 and part == 1250
    np.testing.assert_allclose(sum(P.allgather_data(float(entropy))), np.log(12000), rtol=1e-6)


@pytest.mark.world(1)
def test_more_elements_than_an_integer_counts() -> None:
    """Where JAX has 32 bits: the whole tensor's number of elements is no integer of its."""
    P = dj.Partition().grid([1, 1])
    single, labels = jax.ShapeDtypeStruct((2**17, 2**15), "float32"), jax.ShapeDtypeStruct((2**17,), "int32")
    many = jax.ShapeDtypeStruct((2**32, 2), "float32"), jax.ShapeDtypeStruct((2**32,), "int32")
    with jax.enable_x64(False):
        for loss, data in (
            (nn.DistributedMSELoss(P), (single, single)),
            (nn.DistributedKLDivLoss(P, "batchmean"), (many[0], many[0])),
            (nn.DistributedCrossEntropyLoss(P), (single, labels)),
            (nn.DistributedCrossEntropyLoss(P, ignore_index=None), many),
            (nn.DistributedCrossEntropyLoss(P), (many[0], many[0])),
            (nn.DistributedAccuracy(P), many),
        ):
            assert jax.eval_shape(loss, *data).shape == ()


@pytest.mark.simulated(4)
def test_each_elements_dice_and_focal_loss_and_what_is_no_number() -> None:
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
