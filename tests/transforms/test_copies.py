"""Warnings of losses and parameters of copies: where they are certain, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn

WORKERS = 2


def warned(program: Callable[[], Any], workers: int = WORKERS) -> list[str]:
    """The warnings of copies that a simulated program gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dj.simulate(workers, program)
    return [str(each.message) for each in caught if issubclass(each.category, dj.CopiesWarning)]


def data() -> tuple[Any, dj.CartesianPartition]:
    P = dj.Partition().grid([WORKERS, 1])
    return jnp.arange(48.0).reshape(16, 3) + P.rank, P


def total(x: Any, P: dj.Partition) -> Any:
    return F.all_sum_reduce(x, P, axes_keep=())


def squares(x: Any, w: Any) -> Any:
    return jnp.sum((x * w) ** 2)


def mean(x: Any) -> Any:
    """The mean over the workers."""
    return x / WORKERS


Loss = Callable[[Any, dj.CartesianPartition, Any], Any]
"""From a worker's data, their partition and the weights."""

# A function of sums alone: it counts twice.
COUNTED_TWICE: dict[str, Loss] = {
    "a sum": lambda x, P, w: total(squares(x, w), P),
    "the library's sum": lambda x, P, w: F.sum((x * w) ** 2, P).sum(),
    "the library's mean": lambda x, P, w: F.mean((x * w) ** 2, P).sum(),
    "the mean of means": lambda x, P, w: jnp.mean(F.mean((x * w) ** 2, P, 0)),
    "a sum of local means": lambda x, P, w: total(jnp.mean((x * w) ** 2), P),
    "a norm": lambda x, P, w: jnp.sqrt(total(squares(x, w), P)),
    "by the number of entries": lambda x, P, w: total(squares(x, w), P) / (WORKERS * x.size),
    "by a sum of weights": lambda x, P, w: total(squares(x, w), P) / total(jnp.sum(w * w), P),
    "in a jitted function": lambda x, P, w: jax.jit(lambda w: total(squares(x, w), P))(w),
    "in a checkpoint": lambda x, P, w: jax.checkpoint(lambda w: total(squares(x, w), P))(w),
}
# Parts, and copies that the program divides, perhaps by their number.
HEALTHY: dict[str, Loss] = {
    "a part": lambda x, P, w: squares(x, w),
    "a part by a sum": lambda x, P, w: squares(x, w) / total(jnp.sum(w * w), P),
    "divided": lambda x, P, w: total(squares(x, w), P) / WORKERS,
    "multiplied": lambda x, P, w: 0.5 * total(squares(x, w), P),
    "the mean, divided": lambda x, P, w: F.mean((x * w) ** 2, P).sum() / P.size,
    "by both numbers": lambda x, P, w: total(squares(x, w), P) / (WORKERS * x.size * WORKERS),
    "divided before": lambda x, P, w: total(squares(x, w) / WORKERS, P),
    "by the workers counted": lambda x, P, w: total(squares(x, w), P) / total(jnp.ones(()), P),
    "divided by an argument": lambda x, P, w: total(squares(x, w), P) * (w[0] / w[0] / WORKERS),
    "the mean of the workers' parts": lambda x, P, w: dj.all_reduce(jnp.sum(x * w), P, "mean", axes_keep=()),
    "the mean of one number each": lambda x, P, w: F.mean(jnp.sum(x * w).reshape(1, 1), P).sum(),
    "a root by the workers": lambda x, P, w: total(jnp.sqrt(squares(x, w)), P) / WORKERS,
    "a mean of one's own": lambda x, P, w: mean(total(squares(x, w), P)),
    "divided within": lambda x, P, w: total(jnp.sum((x * w / WORKERS**0.5) ** 2), P),
    "divided within a root": lambda x, P, w: jnp.sqrt(total(jnp.sum((x * w / WORKERS) ** 2), P)),
    "gathered": lambda x, P, w: jnp.sum(F.all_gather((x * w) ** 2, P, 0)),
    "complex": lambda x, P, w: total(jnp.sum(jnp.abs(2j * x * w) ** 2), P) / WORKERS,
    "on one worker": lambda x, P, w: total(squares(x, w), P) * (P.rank == 0),
    "chosen on one worker": lambda x, P, w: jnp.where(P.rank == 0, total(squares(x, w), P), 0),
    "returned on one worker": lambda x, P, w: [total(squares(x, w), P), 0.0][min(P.rank, 1)],
    "with a part": lambda x, P, w: jnp.sum(w**2) + total(squares(x, w), P),
    "a loss of the library": lambda x, P, w: nn.DistributedMSELoss(P)(x * w, x),
    "a loss of copies": lambda x, P, w: nn.DistributedMSELoss(P)(F.mean(x * w, P, 0), jnp.zeros((1, 3))),
}


@pytest.mark.parametrize("name", [*COUNTED_TWICE, *HEALTHY])
def test_losses(name: str) -> None:
    """The warning is there exactly where the value is that of a loss which counts for each worker."""
    values: dict[int, list[float]] = {}
    loss_of = (COUNTED_TWICE | HEALTHY)[name]

    def program() -> None:
        x, P = data()
        value, _ = dj.jit(dj.value_and_grad(lambda w: loss_of(x, P, w)))(jnp.ones(3))
        values[P.rank] = [float(value), float(jax.jit(lambda w: loss_of(x, P, w))(jnp.ones(3)))]

    said = warned(program)
    assert len(said) == (name in COUNTED_TWICE), said
    for text in said:
        np.testing.assert_allclose(values[0][0], WORKERS * values[0][1], rtol=1e-6)
        assert "returns the same loss on 2 workers" in text and "test_copies.py" in text and "dj.CopiesWarning" in text


@pytest.mark.parametrize("derivative", [dj.grad, dj.value_and_grad])
def test_both_derivatives_once_and_ignored(derivative: Any) -> None:
    """Outside of jit each call traces: said once in a place, by Python's own default; and not at all on request."""

    def program() -> None:
        x, P = data()
        for _ in range(3):
            derivative(lambda w: total(squares(x, w), P))(jnp.ones(3))

    for action, times in (("default", 1), ("ignore", 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action, dj.CopiesWarning)  # type: ignore[arg-type]
            dj.simulate(WORKERS, program)
        assert sum(issubclass(each.category, dj.CopiesWarning) for each in caught) == times


def test_a_worker_alone_and_a_part_of_them() -> None:
    """Of a sum over one worker there is one copy; of a sum over rows as many as there are rows."""

    def program() -> None:
        P = dj.Partition().grid([dj.Partition().size, 1])
        dj.value_and_grad(lambda w: total(jnp.sum((w - P.rank) ** 2), P))(jnp.ones(3))

    assert warned(program, 1) == []

    def rows() -> None:
        P = dj.Partition().grid([2, 2])
        dj.value_and_grad(lambda w: F.all_sum_reduce(jnp.sum((w - P.rank) ** 2), P, axes_reduce=0))(jnp.ones(3))

    (text,) = warned(rows, 4)
    assert "on 2 workers" in text


def raw(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ params["w"]) ** 2) * params["s"]


def sgd(loss: Any, sums: bool = False) -> Any:
    def step(params: Any, x: Any) -> Any:
        P = dj.Partition()
        value, gradient = dj.value_and_grad(loss)(params, x)
        if sums:
            gradient = jax.tree.map(lambda g: total(g, P), gradient)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    return step


def by(optimiser: Any) -> Any:
    def step(params: Any, x: Any, state: Any = None) -> Any:
        value, gradient = dj.value_and_grad(raw)(params, x)
        updates, state = optimiser.update(gradient, optimiser.init(params) if state is None else state, params)
        return value, optax.apply_updates(params, updates), state

    return step


def in_a_scan(params: Any, x: Any) -> Any:
    def body(params: Any, x: Any) -> Any:
        value, gradient = dj.value_and_grad(raw)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return jax.lax.scan(body, params, jnp.stack([x, 2 * x]))


def metrics(params: Any, x: Any) -> Any:
    """The parameters are replicated, and a sum of this worker's own losses is not."""
    gradient = dj.grad(lambda p, x: raw(dj.replicated(p, dj.Partition().grid([2])), x))(params, x)
    norm = sum(jnp.sum(g) for g in jax.tree.leaves(gradient))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), params["s"] + norm + jnp.sum(x)


def drawn(rank: int) -> tuple[Any, Any]:
    key = jax.random.key(0)
    x = jax.random.normal(jax.random.fold_in(key, rank), (8, 4))
    return {"w": jax.random.normal(key, (4, 4)), "s": jnp.float32(1)}, x


STEPS: dict[str, tuple[Any, bool]] = {
    "sgd": (sgd(raw), True),
    "adam": (by(optax.adam(1e-2)), True),
    "adamw": (by(optax.adamw(1e-3)), True),
    "momentum and clipping": (by(optax.chain(optax.clip(1.0), optax.sgd(0.1, 0.9))), True),
    "a scan": (in_a_scan, True),
    "replicated": (sgd(lambda p, x: raw(dj.replicated(p, dj.Partition().grid([2])), x)), False),
    "summed afterwards": (sgd(raw, sums=True), False),
    "a metric": (metrics, False),
}


def calls(step: Any, change: Callable[[Any, Any, int], Any] = lambda params, x, rank: (params, x)) -> Any:
    def program() -> None:
        rank = dj.Partition().rank
        args, jitted = change(*drawn(rank), rank), dj.jit(step)
        for _ in range(2):
            jitted(*args)

    return program


@pytest.mark.parametrize("name", STEPS)
def test_parameters_that_drift(name: str) -> None:
    step, drifts = STEPS[name]
    said = warned(calls(step))
    assert len(said) == drifts, said
    for text in said:
        assert "updates `params['s']`, of which 2 workers hold equal values" in text and "its own `x`" in text


def test_what_is_no_copy_or_does_not_drift() -> None:
    """Blocks of different numbers; stages, each with a gate of its own; zeros; the same data on all workers."""

    def weight_only(params: Any, x: Any) -> Any:
        return jnp.sum((x @ params["w"]) ** 2)

    for loss, change in (
        (raw, lambda params, x, rank: ({"w": params["w"] + rank, "s": params["s"] + rank}, x)),
        (raw, lambda params, x, rank: ({"w": params["w"] + rank, "s": params["s"]}, x)),
        (weight_only, lambda params, x, rank: ({"w": 0 * params["w"]}, x)),
        (raw, lambda params, x, rank: (params, jnp.ones((8, 4)))),
    ):
        assert warned(calls(sgd(loss), change)) == []


def test_networks_say_nothing() -> None:
    """Weights that are broadcast, cut and replicated, and a layer of one's own."""

    def program() -> None:
        P_world = dj.Partition()
        P = P_world.grid([2, 1])
        network = nn.Sequential(
            nn.DistributedLinear(P, in_features=4, out_features=6),
            nn.DistributedLayerNorm(P, 6),
            jax.nn.relu,
            nn.DistributedLinear(P, in_features=6, out_features=3),
        )
        x, loss = jax.random.normal(jax.random.key(P.rank), (5, 4)), nn.DistributedMSELoss(P)

        @dj.jit
        def step(params: Any, x: Any) -> Any:
            value, gradient = dj.value_and_grad(lambda params: loss(network(params, x), x[:, :3]))(params)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

        step(network.init(jax.random.key(0)), x)

    assert warned(program) == []
