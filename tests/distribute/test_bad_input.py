"""Mistakes: one sentence on all workers, caught by the user if wished, and no worker waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import io_callback
from jobs import run

import distdl_jax as dj
from distdl_jax import TensorSpec

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Counting(nnx.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.count[...] = self.count[...] + 1
        return x * self.count[...]


class Unhashable:
    """A leaf that JAX takes for a value of its own, and Python can't hash."""

    __hash__ = None  # type: ignore[assignment]


def called_back(x: Any) -> Any:
    return jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def with_effect(x: Any) -> Any:
    return io_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct((), x.dtype), x.sum())


leaked: list[Any] = []


def leaking(x: Any) -> Any:
    leaked.append(x)
    return x.sum()


def of_another_trace(spec: TensorSpec) -> Any:
    dj.distribute(leaking, (spec,))(spec.block(X))
    return dj.distribute(lambda x: (x * leaked[-1]).sum(), (spec,))(spec.block(X))


def raising(spec: TensorSpec, error: Exception, rank: int = 1) -> Any:
    def f(x: Any) -> Any:
        if spec.partition.rank == rank:
            raise error
        return x.sum()

    return dj.distribute(f, (spec,))(spec.block(X))


def in_64_bits_on_one(spec: TensorSpec) -> Any:
    with jax.enable_x64(bool(spec.partition.rank)):
        return dj.distribute(lambda x: jnp.sum(x), (spec,))(spec.block(X))


def in_a_branch(x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda x: jnp.linalg.inv(x[:3]), lambda x: x[:3], x)


def changed(model: Any, x: Any) -> Any:
    return model(x).sum()


def given(f: Callable[..., Any], *before: Any, **options: Any) -> Callable[[TensorSpec], Any]:
    """Return a call of `f` with this worker's block as the last argument."""

    def call(spec: TensorSpec) -> Any:
        specs = (*(None for _ in before), spec)
        return dj.distribute(f, specs, **options)(*before, spec.block(X))

    return call


def by_rank(spec: TensorSpec) -> str:
    return "ab"[spec.partition.rank]


MISTAKES: dict[str, tuple[Callable[[TensorSpec], Any], str]] = {
    "a module that f changes": (
        lambda spec: given(changed, Counting())(spec),
        r"changes its argument `args\[0\]\.count.*nnx.split.*nnx.merge",
    ),
    "a module that f changes, under dj.jit": (
        lambda spec: dj.jit(dj.distribute(changed, (None, spec)))(Counting(), spec.block(X)),
        r"changes its argument `args\[0\]\.count",
    ),
    "a module that is closed over and changed": (
        lambda spec: given(Counting())(spec),
        "Cannot mutate Variable from a different trace level",
    ),
    "tracers of another trace": (of_another_trace, "unexpected tracer"),
    "x64 on one worker": (in_64_bits_on_one, r"differ: first in JAX's settings \(jax_enable_x64 = False"),
    "a refusal in a branch": (given(in_a_branch, gather=0), r"`lu`.*test_bad_input.py:\d+ in <lambda>.*dj.constrain"),
    "complex PARTS": (given(lambda x: (x * 1j).sum(), out_specs=dj.PARTS), "Result 0 is complex64.*real floating"),
    "keyword arguments": (
        lambda spec: dj.distribute(jnp.sum, (spec,))(spec.block(X), axis=0),
        "by position, but got axis by name",
    ),
    "a static leaf that can't be hashed, under dj.jit": (
        lambda spec: dj.jit(dj.distribute(lambda m, x: x.sum(), (None, spec)))([Unhashable()], spec.block(X)),
        r"`args\[0\]\[0\]`.*must be an array, or hashable",
    ),
    "static leaves that differ": (
        lambda spec: given(lambda m, x: x.sum(), {"name": by_rank(spec)})(spec),
        "programs of .* differ: first in the specs, `gather` or an argument that is no array",
    ),
    "static leaves that differ, under dj.jit": (
        lambda spec: dj.jit(dj.distribute(lambda m, x: x.sum(), (None, spec)))([by_rank(spec)], spec.block(X)),
        "programs of .* differ: first in the specs, `gather` or an argument that is no array",
    ),
    "an exception on one worker": (
        lambda spec: raising(spec, ValueError("a mistake of mine")),
        "a mistake of mine",
    ),
    "an error of the library on one worker": (
        lambda spec: raising(spec, dj.PlanError("a plan of mine"), 0),
        "a plan of mine",
    ),
    "a constant that depends on the worker": (
        lambda spec: given(lambda x: x * spec.partition.rank)(spec),
        r"programs of .* differ: first in `mul` at test_bad_input.py:\d+",
    ),
    "a closed-over block": (
        lambda spec: given(lambda x: jnp.sum(x[:2] * (2 * spec.block(X))))(spec),
        "programs of .* differ: first in constant 0, of type float32",
    ),
    "a spec for a missing argument": (
        lambda spec: dj.distribute(jnp.sum, (spec, None))(spec.block(X)),
        r"`in_specs` \(of 2\) must hold a spec for each argument",
    ),
    "specs that aren't prefixes": (
        lambda spec: dj.distribute(lambda d: d["a"], ({"a": spec, "b": None},))({"a": spec.block(X)}),
        "`in_specs` must have the structure of what it describes",
    ),
    "results of another shape": (
        lambda spec: given(lambda x: x.sum(0), out_specs=spec)(spec),
        r"Result 0 has the shape \(3,\), but its spec",
    ),
    "pure_callback on blocks": (given(called_back), "`pure_callback` of .*would call Python with blocks.*whole value"),
    "io_callback": (given(with_effect), "`io_callback` .*has an effect outside of the program"),
    "print of blocks": (given(lambda x: jax.debug.print("{}", x)), "would print blocks"),
    "a whole result that is too large": (
        given(lambda x: x * 2, gather=16),
        "Result 0, float32.*more than `gather` allows.*dj.BLOCKS",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence_on_all_workers(mistake: str) -> None:
    """Each worker catches it, and goes on: the next function works, so nothing was left waiting or unread."""
    call, words = MISTAKES[mistake]

    def program() -> str:
        spec = TensorSpec(X.shape, dj.Partition().grid([2, 1]))
        with pytest.raises(Exception, match=words) as caught:
            call(spec)
        found = dj.jit(dj.distribute(lambda x: jnp.sum(x**2), (spec,)))(spec.block(X))
        np.testing.assert_allclose(found, np.sum(X**2), rtol=1e-5)
        return type(caught.value).__name__

    kinds = set(dj.simulate(2, program))
    assert len(kinds - {"ValueError"}) == 1, kinds  # the worker with the user's own error raises that


def test_arrays_without_elements() -> None:
    empty = np.zeros((0, 3), np.float32)

    def f(x: Any) -> Any:
        return x + 1, x.sum(0), jax.grad(lambda x: jnp.sum(x**2))(x), jnp.concatenate([x, x])

    def program() -> None:
        spec = TensorSpec(empty.shape, dj.Partition().grid([3, 1]))
        for y, expected in zip(dj.distribute(f, (spec,))(spec.block(empty)), f(empty), strict=True):
            np.testing.assert_array_equal(y, expected)

    dj.simulate(3, program)


def test_a_cut_dimension_of_length_1() -> None:
    x = np.arange(3, dtype=np.float32)[None]

    def program() -> list[int]:
        spec = TensorSpec(x.shape, dj.Partition().grid([2, 1]))
        step = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) * x.shape[0]))
        value, gradient = dj.distribute(step, (spec,), (None, spec))(spec.block(x))
        np.testing.assert_allclose(value, np.sin(x).sum(), rtol=1e-5)
        np.testing.assert_allclose(gradient, spec.block(np.cos(x)), rtol=1e-5)
        return list(gradient.shape)

    assert dj.simulate(2, program) == [[1, 3], [0, 3]]


def test_what_constrain_says_is_the_mesh() -> None:
    def program() -> None:
        spec = TensorSpec(X.shape, dj.Partition().grid([2, 1]))
        f = dj.distribute(lambda x: dj.constrain(x, spec) * 2, (None,), dj.BLOCKS)
        np.testing.assert_allclose(f(X), spec.block(2 * X))

    dj.simulate(2, program)


def test_a_callback_on_whole_values_runs_on_every_worker() -> None:
    calls = []

    def squared(x: Any) -> Any:
        calls.append(0)
        return np.asarray(x) ** 2

    def f(x: Any) -> Any:
        return jax.pure_callback(squared, jax.ShapeDtypeStruct((), x.dtype), jnp.sum(x))

    def program() -> None:
        spec = TensorSpec(X.shape, dj.Partition().grid([2, 1]))
        np.testing.assert_allclose(jax.jit(dj.distribute(f, (spec,)))(spec.block(X)), X.sum() ** 2, rtol=1e-4)

    dj.simulate(2, program)
    assert len(calls) == 2


OVER_MPI = """
import jax, jax.numpy as jnp, distdl_jax as dj
P = dj.Partition()
spec = dj.TensorSpec((4, 3), P.grid([2, 1]))
def f(x):
    if P.rank == 1:
        raise ValueError("a mistake of mine")
    return x.sum()
for g in (f, lambda x: x * P.rank):
    try:
        dj.jit(dj.distribute(g, (spec,)))(jnp.ones((2, 3)))
    except Exception as error:
        print(f"caught {P.rank} {type(error).__name__}", flush=True)
total = dj.jit(dj.distribute(lambda x: x.sum(), (spec,)))(jnp.ones((2, 3)))
print(f"on {P.rank} {float(total)}", flush=True)
"""


def test_mistakes_over_mpi_are_caught_and_the_workers_go_on() -> None:
    status, output = run(2, "-c", OVER_MPI)
    assert status == 0, output
    assert output.count("caught 0 PlanError") == 2 and output.count("caught 1 ") == 2, output
    assert "on 0 12.0" in output and "on 1 12.0" in output, output
