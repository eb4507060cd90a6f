"""Losses and parameters of copies: found by their values, and parts of a sum are not taken for them."""

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
from distdl_jax.functional import copies
from distdl_jax.settings import Settings
from distdl_jax.transforms import equal_losses

WORKERS = 2


def warned(program: Callable[[], Any], workers: int = WORKERS) -> list[str]:
    """The warnings of copies that a simulated program gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dj.simulate(workers, program)
        jax.effects_barrier()
    return [str(each.message) for each in caught if issubclass(each.category, dj.CopiesWarning)]


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (copies, equal_losses):
        monkeypatch.setattr(module, "current_settings", lambda: Settings(debug=True))


def data() -> tuple[Any, dj.CartesianPartition]:
    P = dj.Partition().grid([dj.Partition().size, 1])
    return jnp.arange(48.0).reshape(16, 3) + P.rank, P


def total(x: Any, P: dj.Partition) -> Any:
    return F.all_sum_reduce(x, P, axes_keep=())


def squares(x: Any, w: Any) -> Any:
    return jnp.sum((x * w) ** 2)


Loss = Callable[[Any, dj.CartesianPartition, Any], Any]
"""From a worker's data, their partition and the weights."""

# The same on all workers, and nothing says that it is a part: it counts twice.
COPIES: dict[str, Loss] = {
    "a sum": lambda x, P, w: total(squares(x, w), P),
    "the library's sum": lambda x, P, w: F.sum((x * w) ** 2, P).sum(),
    "the library's mean": lambda x, P, w: F.mean((x * w) ** 2, P).sum(),
    "the mean of means": lambda x, P, w: jnp.mean(F.mean((x * w) ** 2, P, 0)),
    "a sum of local means": lambda x, P, w: total(jnp.mean((x * w) ** 2), P),
    "a norm": lambda x, P, w: jnp.sqrt(total(squares(x, w), P)),
    "by the number of entries": lambda x, P, w: total(squares(x, w), P) / (WORKERS * x.size),
    "by a sum of weights": lambda x, P, w: total(squares(x, w), P) / total(jnp.sum(w * w), P),
    "scaled": lambda x, P, w: 0.25 * total(squares(x, w), P),
    "the maximum": lambda x, P, w: F.max((x * w) ** 2, P).max(),
    "gathered": lambda x, P, w: jnp.sum(F.all_gather((x * w) ** 2, P, 0)),
    "with a term of one's own": lambda x, P, w: jnp.sum(w**2) + total(squares(x, w), P),
    "in a jitted function": lambda x, P, w: jax.jit(lambda w: total(squares(x, w), P))(w),
    "in a checkpoint": lambda x, P, w: jax.checkpoint(lambda w: total(squares(x, w), P))(w),
    "in a scan": lambda x, P, w: jax.lax.scan(lambda c, row: (c + total(squares(row, w), P), None), 0.0, x)[0],
    "a sum of a loss of the library": lambda x, P, w: total(nn.DistributedMSELoss(P)(x * w, 0 * x), P),
    "the same data": lambda x, P, w: squares(jnp.ones((4, 3)), w),
    "divided by hand": lambda x, P, w: total(squares(x, w), P) / WORKERS,
}
PARTS: dict[str, Loss] = {
    "a part": lambda x, P, w: squares(x, w),
    "a part by a sum": lambda x, P, w: squares(x, w) / total(jnp.sum(w * w), P),
    "a part of a sum": lambda x, P, w: dj.part(total(squares(x, w), P), P),
    "a part of a norm, scaled": lambda x, P, w: 3 * dj.part(jnp.sqrt(total(squares(x, w), P)), P) + 1,
    "a part of terms": lambda x, P, w: jnp.sum(dj.part(F.mean((x * w) ** 2, P, 0), P)),
    "a part in a jitted function": lambda x, P, w: jax.jit(lambda w: dj.part(total(squares(x, w), P), P))(w),
    "on one worker": lambda x, P, w: total(squares(x, w), P) * (P.rank == 0),
    "returned on one worker": lambda x, P, w: [total(squares(x, w), P), 0.0][min(P.rank, 1)],
    "nothing": lambda x, P, w: squares(0 * x, w),
    "not a number": lambda x, P, w: squares(jnp.nan * x, w),
    "a loss of the library": lambda x, P, w: nn.DistributedMSELoss(P)(0 * x * w, 0 * x + 1),
    "a loss of copies": lambda x, P, w: nn.DistributedMSELoss(P)(F.mean(x * w, P, 0), jnp.zeros((1, 3))),
    "zero logits": lambda x, P, w: nn.DistributedCrossEntropyLoss(P)(0 * x * w, jnp.zeros(16, int)),
    "all masked": lambda x, P, w: nn.DistributedCrossEntropyLoss(P)(x * w, jnp.full(16, -100)),
    "elements": lambda x, P, w: jnp.sum(nn.DistributedMSELoss(P, "none")(0 * x * w, 0 * x + 1)),
}


@pytest.mark.parametrize("name", [*COPIES, *PARTS])
def test_losses_in_the_first_call(name: str) -> None:
    def program() -> None:
        x, P = data()
        step = dj.jit(lambda w: dj.value_and_grad(lambda w: (COPIES | PARTS)[name](x, P, w))(w))
        for _ in range(2):
            step(jnp.ones(3))

    said = warned(program)
    assert len(said) == (name in COPIES), said
    for text in said:
        assert "returns the same loss, to the last bit, on workers 0 and 1" in text and "dj.part(loss, P)" in text


@pytest.mark.parametrize("name", ["a sum", "in a scan", "a part", "a part of a sum", "zero logits"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, dj.jit], ids=["eager", "jax.jit", "dj.jit"])
def test_losses_in_each_call(name: str, wrap: Any, debug: None) -> None:
    def program() -> None:
        x, P = data()
        step = wrap(lambda w: dj.value_and_grad(lambda w: (COPIES | PARTS)[name](x, P, w))(w))
        for _ in range(2):
            jax.block_until_ready(step(jnp.ones(3)))
        jax.effects_barrier()

    assert len(warned(program)) == 2 * (name in COPIES)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.float64])
def test_losses_in_loops_are_seen_on_request_alone(dtype: Any, request: pytest.FixtureRequest) -> None:
    def program() -> None:
        x, P = data()
        x = x.astype(dtype)

        def body(w: Any, _: Any) -> Any:
            value, gradient = dj.value_and_grad(lambda w: total(squares(x / 99, w), P))(w)
            return w - 1e-6 * gradient.astype(w.dtype), value

        jax.block_until_ready(dj.jit(lambda w: jax.lax.scan(body, w, None, 3))(jnp.ones(3, dtype)))
        jax.effects_barrier()

    assert warned(program) == []
    request.getfixturevalue("debug")
    assert len(warned(program)) == 3


def test_whose_losses_are_equal() -> None:
    """A worker alone; sums along one dimension; workers without data, which return 0; and a warning that is ignored."""

    def of(grid: list[int], loss: Callable[[Any, Any], Any]) -> Callable[[], None]:
        def program() -> None:
            P = dj.Partition().grid(grid)
            dj.jit(dj.value_and_grad(lambda w: loss(w, P)))(jnp.ones(3))

        return program

    def along_rows(w: Any, P: Any) -> Any:
        return F.all_sum_reduce(jnp.sum((w - P.rank) ** 2), P, axes_reduce=0)

    assert warned(of([1], lambda w, P: total(jnp.sum(w), P)), 1) == []
    (text,) = warned(of([2, 2], along_rows), 4)
    assert "on workers 0, 1, 2 and 3" in text
    (text,) = warned(of([4], lambda w, P: total(jnp.sum(w), P) if P.rank in (1, 3) else 0 * total(jnp.sum(w), P)), 4)
    assert "on workers 1 and 3" in text
    assert warned(of([4], lambda w, P: jnp.sum(w) * [1, 2, 1, 3][P.rank]), 4) == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", dj.CopiesWarning)
        dj.simulate(2, of([2], lambda w, P: total(jnp.sum(w), P)))
    assert not caught


def test_options_of_jit_and_results_stay() -> None:
    """The losses among a program's results are not the caller's: trees, names, shardings, donation, transformations."""

    def program() -> None:
        x, P = data()
        derivative = dj.value_and_grad(lambda w: dj.part(total(squares(x, w), P), P))
        expected = derivative(jnp.ones(3))
        one = jax.sharding.SingleDeviceSharding(jnp.ones(3).devices().pop())
        for options in ({}, {"out_shardings": one}, {"donate_argnums": 0}, {"static_argnames": "kind"}):
            step = dj.jit(lambda w, kind=0: {"a": derivative(w), "n": None}, **options)
            for _ in range(3):
                result = step(jnp.ones(3))
                assert jax.tree.structure(result) == jax.tree.structure({"a": expected, "n": None})
                assert all(map(np.array_equal, jax.tree.leaves(result), jax.tree.leaves(expected)))
        assert dj.jit(lambda w: {"a": derivative(w)}).trace(jnp.ones(3)).jaxpr.jaxpr.debug_info.result_paths[1] == (
            "result['a'][1]"
        )
        mapped = jax.vmap(dj.jit(derivative))(jnp.ones((2, 3)))
        assert np.allclose(mapped[1], expected[1])

    dj.simulate(2, program)


@pytest.mark.parametrize("workers", [1, 3])
def test_parts(workers: int) -> None:
    """The parts of a value add up to it, and their gradient is that of the whole function on one worker."""

    def program() -> tuple[Any, Any, Any]:
        P_world = dj.Partition()
        P = P_world.create_partition_inclusive([*range(min(workers, 2))])
        x = jax.random.normal(jax.random.fold_in(jax.random.key(0), P_world.rank), (5,))

        def loss(x: Any) -> Any:
            return dj.part(jnp.sin(F.all_sum_reduce(jnp.sum(x**2) * P.active, P_world, axes_keep=())), P)

        value, gradient = dj.value_and_grad(loss)(x)
        return np.asarray(x), value, gradient

    with jax.enable_x64(True):
        results = dj.simulate(workers, program)
        active = results[: min(workers, 2)]
        whole = jnp.concatenate([x for x, _, _ in active])
        value, gradient = jax.value_and_grad(lambda x: jnp.sin(jnp.sum(x**2)))(whole)
        np.testing.assert_allclose([v for _, v, _ in results], value, rtol=1e-14)
        np.testing.assert_allclose(np.concatenate([g for _, _, g in active]), gradient, rtol=1e-13)


def test_arguments_of_part() -> None:
    P = dj.planning_world(4).grid([4])
    assert dj.part(2, P) == 0.5 and dj.part(2j, P) == 0.5j and dj.part(jnp.arange(3), P).tolist() == [0, 0.25, 0.5]
    with pytest.raises(dj.InvalidTypeError, match=r"`value` \(=None\) must be a number or an array"):
        dj.part(None, P)  # type: ignore[arg-type]
    with pytest.raises(dj.InvalidTypeError, match="`P`"):
        dj.part(2, "P")  # type: ignore[arg-type]


# --- copies of parameters ---------------------------------------------------------------------------------------------


def raw(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ params["w"]) ** 2) * params["s"]


def drawn(rank: int) -> tuple[Any, Any]:
    key = jax.random.key(0)
    x = jax.random.normal(jax.random.fold_in(key, rank), (8, 4))
    return {"w": jax.random.normal(key, (4, 4)), "s": jnp.float32(1)}, x


def drifting(kind: str) -> Callable[[], None]:
    """A program of two steps, in which copies that it declares are not updated in the same way."""

    def program() -> None:
        P = dj.Partition().grid([2])
        params, x = drawn(P.rank)
        optimiser = optax.adam(1e-2)
        state = optimiser.init(params)

        def loss(params: Any, x: Any) -> Any:
            copied = dj.replicated(params, P)
            if kind == "used without it, too":
                return raw(copied, x) + raw(params, x)
            return raw(copied, x)

        @dj.jit
        def step(params: Any, state: Any, x: Any) -> Any:
            _, gradient = dj.value_and_grad(loss)(params, x)
            if kind == "other noise":
                gradient["w"] += jax.random.normal(jax.random.key(P.rank), (4, 4))
            if kind == "rounding":
                gradient["w"] *= 1 + P.rank * jnp.finfo(x.dtype).eps
            updates, state = optimiser.update(gradient, state, params)
            if kind == "another rate":
                updates = jax.tree.map(lambda u: u * (1 + P.rank), updates)
            return optax.apply_updates(params, updates), state

        if kind == "another start":
            params["s"] += P.rank
        for _ in range(5):
            params, state = step(params, state, x)
            jax.block_until_ready(params)
            jax.effects_barrier()

    return program


@pytest.mark.parametrize("kind", ["another start", "another rate", "other noise", "used without it, too"])
def test_copies_that_differ_raise(kind: str, debug: None) -> None:
    with pytest.raises(Exception, match=r"`tree\['\w'\]` must be the same on all .* not on workers 0 and 1"):
        dj.simulate(2, drifting(kind))


def test_copies_that_agree_pass(debug: None) -> None:
    dj.simulate(2, drifting("nothing"))
    dj.simulate(2, drifting("rounding"))


def test_layers_compare_their_copies(debug: None) -> None:
    """Of a norm, a pointwise layer and the argument of a total; not of weights that are broadcast."""

    def program() -> None:
        P = dj.Partition().grid([2, 1])
        x = jax.random.normal(jax.random.key(P.rank), (5, 4))
        norm, pointwise = nn.DistributedLayerNorm(P, 4), nn.DistributedPointwise(P, in_features=4, out_features=3)
        network = nn.Sequential(norm, nn.DistributedLinear(P, in_features=4, out_features=3))
        params = [layer.init(jax.random.key(0)) for layer in (norm, pointwise)]
        loss = nn.DistributedMSELoss(P)
        jax.grad(lambda params: loss(network(params, x), x[:, :3]))(network.init(jax.random.key(0)))
        for layer, own in zip((norm, pointwise), params, strict=True):
            jax.vmap(layer, (None, 0))(own, jnp.stack([x, x]))
            spoilt = {**own, "weight": own["weight"].at[0].add(P.rank)}
            with pytest.raises(
                dj.PlanError, match=r'`params\["weight"\]` must be the same .* workers 0 and 1 \(compar'
            ):
                layer(spoilt, x)
        whole = dj.total(lambda theta: jnp.sum(theta * x), P)
        whole(2.0)
        with pytest.raises(dj.PlanError, match="`theta` must be the same"):
            whole(2.0 + P.rank)

    dj.simulate(2, program)


def test_healthy_programs_say_nothing() -> None:
    """Weights that are broadcast, cut and replicated, and a layer of one's own."""

    def program() -> None:
        P = dj.Partition().grid([2, 1])
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
