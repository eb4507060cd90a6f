"""Norms, clipping and LAMB on blocks are optax's on the whole tensors."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from blocks import block_of

import distdl_jax as dj
from distdl_jax.optim.norms import _unit_axes

SHAPES = {"matrix": (5, 3), "kernel": (3, 2, 3, 2), "bias": (5,), "few": (1,), "scale": (), "gain": (4,)}


def specs() -> dict[str, Any]:
    """Uneven blocks, empty ones, a scalar on one worker, copies on all, and some along one dimension of a partition."""
    P = dj.Partition()

    partitions = {
        "matrix": P.grid([2, 2], [0, 1, 2, 3]),
        "kernel": P.grid([2, 1, 1, 1], [3, 1]),
        "bias": P.grid([2], [1, 3]),
        "few": P.grid([2], [2, 3]),
        "scale": P.grid([1], [2]),
        "gain": P.grid([2, 2], [0, 1, 2, 3]),
    }
    replicated = {"scale": True, "gain": (0,)}
    return {
        name: dj.TensorSpec(SHAPES[name], partition, replicated.get(name, False))
        for name, partition in partitions.items()
    }


def drawn(seed: int, scale: float = 1.0, dtype: Any = float) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {name: np.asarray(scale * draw.normal(size=shape)).astype(dtype) for name, shape in SHAPES.items()}


NOT_BIAS = {name: name != "bias" for name in SHAPES}


def cut(tree: dict[str, Any], its: dict[str, Any] | None = None) -> dict[str, Any]:
    its = specs() if its is None else its
    return {name: block_of(tree[name], spec) for name, spec in its.items()}


def compare(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> None:
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, tolerance, tolerance)


def on_one_worker(whole: Callable[[], Any]) -> Any:
    """What plain optax makes of whole tensors, which one worker works out for all."""
    P = dj.Partition()
    return P.broadcast_data(jax.device_get(whole()) if P.rank == 0 else None, root=0)


@pytest.mark.simulated(4)
def test_global_norm() -> None:
    """In every dtype, with the derivative; copies count once. One NaN makes NaN of all of the gradient."""
    its = specs()
    tolerances = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 1e-6, "complex128": 1e-14}
    trees = {dtype: drawn(0, dtype=dtype) for dtype in tolerances}

    @dj.jit
    def program(trees: Any, zeros: Any) -> Any:
        norms = {dtype: dj.optim.global_norm(tree, its) for dtype, tree in trees.items()}
        gradient = jax.grad(lambda tree: dj.optim.global_norm(tree, its) / 4)
        with_nan = {**zeros, "kernel": trees["float64"]["kernel"] * jnp.nan}
        return norms, gradient(trees["float64"]), gradient(zeros), gradient(with_nan)

    zeros = jax.tree.map(np.zeros_like, cut(drawn(0)))
    norms, gradient, at_zero, at_nan = program({dtype: cut(tree) for dtype, tree in trees.items()}, zeros)
    for dtype, tolerance in tolerances.items():
        whole = trees[dtype]
        wide = {name: np.asarray(x, complex) for name, x in whole.items()}
        want = np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in wide.values()))
        np.testing.assert_allclose(norms[dtype], want, tolerance)
        if dtype == "float64":
            held = {name: spec.counts for name, spec in its.items()}
            for name, x in cut(whole).items():
                np.testing.assert_allclose(gradient[name], held[name] * x / want, 1e-12)
    assert not any(np.any(x) for x in jax.tree.leaves(at_zero))
    assert all(np.all(np.isnan(x) == its[name].counts) for name, x in at_nan.items())


TRANSFORMATIONS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "clip_by_global_norm": lambda specs: (dj.optim.clip_by_global_norm(2.0, specs), optax.clip_by_global_norm(2.0)),
    "adaptive_grad_clip": lambda specs: (dj.optim.adaptive_grad_clip(0.1, specs), optax.adaptive_grad_clip(0.1)),
    "adaptive_grad_clip along": lambda specs: tuple(
        optax.masked(clip, {name: name in ("matrix", "kernel") for name in SHAPES})
        for clip in (dj.optim.adaptive_grad_clip(0.1, specs, axis=-1), optax.adaptive_grad_clip(0.1, axis=-1))
    ),
    "scale_by_trust_ratio": lambda specs: (
        dj.optim.scale_by_trust_ratio(specs, 0.1, 0.5, 1e-3),
        optax.scale_by_trust_ratio(0.1, 0.5, 1e-3),
    ),
    "lamb": lambda specs: (
        optax.chain(
            optax.scale_by_adam(eps=1e-6),
            optax.add_decayed_weights(0.1),
            dj.optim.scale_by_trust_ratio(specs),
            optax.scale_by_learning_rate(0.1),
        ),
        optax.lamb(0.1, weight_decay=0.1),
    ),
    "lars": lambda specs: (
        optax.chain(
            optax.add_decayed_weights(0.1),
            optax.masked(dj.optim.scale_by_trust_ratio(specs, trust_coefficient=0.01), NOT_BIAS),
            optax.scale_by_learning_rate(0.1),
            optax.trace(0.9),
        ),
        optax.lars(0.1, 0.1, trust_coefficient=0.01, trust_ratio_mask=NOT_BIAS),
    ),
    "scale_by_lbfgs": lambda specs: (dj.optim.scale_by_lbfgs(specs, 3), optax.scale_by_lbfgs(3)),
}


@pytest.mark.simulated(4)
def test_transformations() -> None:
    """Eight updates in one program for all: gradients small and large, one of them zero, one twice; a parameter that is
    0."""
    its, first = specs(), {**drawn(0), "gain": np.zeros(4)}
    scales = ((3, 0.01), (1, 1.0), (2, 10.0), (4, 0.0), (5, 0.3), (5, 0.3), (6, 1.0), (7, 0.5))
    gradients = [drawn(*seed_scale) for seed_scale in scales]

    def run(optimiser: Any, params: Any, gradients: Any) -> Any:
        def step(carried: Any, gradient: Any) -> Any:
            params, state = carried
            updates, state = optimiser.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *gradients)
        return jax.lax.scan(step, (params, optimiser.init(params)), stacked)[0][0]

    def program(which: int, params: Any, gradients: Any) -> Any:
        return {name: run(make(its)[which], params, gradients) for name, make in TRANSFORMATIONS.items()}

    got = dj.jit(lambda *args: program(0, *args))(cut(first), [cut(gradient) for gradient in gradients])
    want = on_one_worker(lambda: jax.jit(lambda *args: program(1, *args))(first, gradients))
    for name in TRANSFORMATIONS:
        compare(got[name], cut(want[name]), 1e-12)


def test_a_unit_is_that_of_optax() -> None:
    """In the dimensions that no tensor above has."""
    for shape in ((2, 3, 2), (2, 3, 2, 1, 2)):
        x = np.random.default_rng(0).normal(size=shape)
        norms = np.sqrt(np.sum(x**2, _unit_axes(shape, None), keepdims=True))
        np.testing.assert_allclose(np.broadcast_to(norms, shape), optax.transforms.unitwise_norm(x), 1e-12)


@pytest.mark.simulated(4)
def test_what_does_not_fit_is_refused_on_every_worker() -> None:
    its, tree = specs(), cut(drawn(0))
    wrong = {**tree, "bias": tree["bias"][:1] if dj.Partition().rank == 1 else tree["bias"]}
    ratio, units = dj.optim.scale_by_trust_ratio(its), dj.optim.adaptive_grad_clip(0.1, its, axis=1)
    lbfgs, search = dj.optim.scale_by_lbfgs(its, 2), dj.optim.line_search(optax.scale_by_zoom_linesearch(2), its)
    some = dj.Partition().create_partition_inclusive([0, 1])
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: dj.optim.global_norm(wrong, its), r"`tree\['bias'\]` has shape \(1,\), but its spec"),
        (lambda: dj.optim.global_norm(tree, its | {"few": None}), r"`specs` must have a TensorSpec .* has None at"),
        (lambda: ratio.update(tree, None), r"`params` \(=None\) must be this worker's parameters"),
        (lambda: units.update(tree, None, tree), r"`axis` \(=1\) must name dimensions of each tensor"),
        (lambda: dj.optim.clip_by_global_norm(-1.0, its), r"`max_norm` \(=-1.0\) must not be negative, nor NaN"),
        (lambda: dj.optim.clip_by_global_norm(jnp.asarray(np.nan), its), "`max_norm` .* must not be negative, nor NaN"),
        (lambda: lbfgs.update(tree, lbfgs.init(tree)), r"`params` \(=None\) must be this worker's parameters"),
        (lambda: search.update(tree, search.init(tree), value=0.0, grad=tree, value_fn=jnp.sum), r"`params` \(=None\)"),
        (lambda: dj.optim.line_search(optax.sgd(0.1), its), "`search` .* must be one of optax's line searches"),
        (lambda: dj.optim.line_search(3, its), r"`search` \(=3\) must be one of optax's line searches"),  # type: ignore[arg-type]
        (lambda: dj.optim.lbfgs(its, linesearch=optax.polyak_sgd()), "`linesearch` .* must be one of optax's line"),
        (lambda: dj.optim.lbfgs(its, "a"), r"`learning_rate` \(='a'\) must be a real number, .* or a function of the"),  # type: ignore[arg-type]
        (lambda: dj.optim.scale_by_lbfgs(its, 0), r"`memory_size` \(=0\) must be 1 or more"),
        (
            lambda: dj.optim.value_and_grad_from_state(jnp.sum)(tree, state=optax.adam(0.1).init(tree)),
            "`state` must hold a value and a gradient",
        ),
        (lambda: dj.optim.global_norm(tree, its, partition=some), "must hold the workers of all specs"),
    ]
    for program, sentence in refused:
        with pytest.raises(dj.DistDLError, match=sentence):
            program()


def test_without_optax_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes a transformation of optax's says so; nothing else needs it."""
    monkeypatch.setitem(sys.modules, "optax", None)
    spec = dj.TensorSpec((4,), dj.planning_world(1).grid([1]))
    makers: dict[str, Callable[[], Any]] = {
        "clip_by_global_norm": lambda: dj.optim.clip_by_global_norm(1.0, spec),
        "adaptive_grad_clip": lambda: dj.optim.adaptive_grad_clip(1.0, spec),
        "scale_by_trust_ratio": lambda: dj.optim.scale_by_trust_ratio(spec),
        "scale_by_lbfgs": lambda: dj.optim.scale_by_lbfgs(spec),
        "lbfgs": lambda: dj.optim.lbfgs(spec),
        "line_search": lambda: dj.optim.line_search(None, spec),
        "value_and_grad_from_state": lambda: dj.optim.value_and_grad_from_state(jnp.sum),
    }
    for name, make in makers.items():
        with pytest.raises(dj.SetupError, match=rf"dj\.optim\.{name} needs optax, which is not installed: pip install"):
            make()
    ours = dj.planning_world(1)
    assert float(dj.optim.global_norm(jnp.array([3.0, 4.0, 0.0, 0.0]), spec, partition=ours)) == 5.0
