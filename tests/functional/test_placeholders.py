"""Of a placeholder nothing counts but its kind: the data's dtype travels and arrives, whatever the placeholder's.

Every primitive that has placeholders, and gather and scatter: outputs and input cotangents are the reference's of small
integers, which nothing rounds. The operators take the pairs of dtypes in turn, under dj.jit so that each pair is met,
and each operator meets each dtype, and all of them in a long run.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.examples import LONG
from matrix import movement_cases as cases
from matrix.case import Case, painted
from matrix.partitions import On, blocks, on
from matrix.programs import difference, wanted

import distdl_jax as dj

pytestmark = pytest.mark.primitives

INEXACT = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
EXACT = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda fun: fun, "jax.jit": jax.jit, "dj.jit": dj.jit}


ONE, OTHER, PAIR, ROWS, ALL = on(1, ranks=(2,)), on(1, ranks=(1,)), on(2, ranks=(3, 0)), on(3, ranks=(1, 2, 3)), on(4)
OPERATORS: dict[str, tuple[Case, On, On]] = {
    "broadcast": (cases.broadcast(ONE, PAIR, (7,)), ONE, PAIR),
    "sum_reduce": (cases.sum_reduce(PAIR, OTHER, (7,)), PAIR, OTHER),
    "repartition": (cases.repartition(PAIR, ROWS, blocks(PAIR, 7)), PAIR, ROWS),
    "rebalance": (cases.repartition(ROWS, ALL, blocks(ROWS, 7)), ROWS, ALL),
    "gather": (cases.gather((7,), ROWS, (), 0), ROWS, on(1)),
    "scatter": (cases.scatter((7,), ROWS, (), 2), ONE, ROWS),
}
"""Movements from some workers to others, with the partitions that hold the data before and after."""


def data(name: str, dtype: str) -> tuple[Any, ...]:
    """All workers' inputs."""
    return painted(name, OPERATORS[name][0].shapes, jnp.dtype(dtype))


def block(name: str, dtype: str, placeholder: str) -> jax.Array:
    """This worker's input: its part of the data, or a placeholder."""
    rank = dj.Partition().rank
    holds_it = rank in OPERATORS[name][1].ranks
    return jax.device_put(data(name, dtype)[rank]) if holds_it else dj.zero_volume_tensor(dtype=placeholder)


def reference(dtype: str, differentiate: bool) -> dict[str, Any]:
    """This worker's outputs and, of twice the outputs, input cotangents, by the name of the case."""
    xs = {case.name: data(name, dtype) for name, (case, _, _) in OPERATORS.items()}
    ys = {case.name: [2 * y for y in case.dense(list(xs[case.name]))] for case, _, _ in OPERATORS.values()}
    return wanted([case for case, _, _ in OPERATORS.values()], xs, ys if differentiate else {})


def check(dtypes: list[str], mode: str, differentiate: bool, every: int) -> None:
    """Every pair of dtypes for one in `every` operators, which take turns; all in a long run."""
    P = dj.Partition()
    functions = {name: case.operator(P) for name, (case, _, _) in OPERATORS.items()}
    args = {
        (name, dtype, placeholder): block(name, dtype, placeholder)
        for i, name in enumerate(OPERATORS)
        for j, (dtype, placeholder) in enumerate(product(dtypes, dtypes))
        if LONG > 1 or (i + j + j // len(dtypes)) % every == 0
    }

    def program(xs: list[jax.Array]) -> list[Any]:
        results = []
        for (name, _, _), x in zip(args, xs, strict=True):
            if differentiate:
                y, pullback = jax.vjp(functions[name], x)
                results.append({"y": y, "dx": pullback(2 * y)[0]})
            else:
                results.append({"y": functions[name](x)})
        return results

    got = MODES[mode](program)(list(args.values()))
    references = {dtype: reference(dtype, differentiate) for dtype in dtypes}
    for ((name, dtype, placeholder), x), result in zip(args.items(), got, strict=True):
        case, P_x, P_y = OPERATORS[name]
        label, want = f"{name} of {dtype}, {placeholder} elsewhere", references[dtype][case.name]
        assert result["y"].dtype == jnp.dtype(dtype) or P.rank not in (*P_x.ranks, *P_y.ranks), label
        assert not differentiate or (result["dx"].shape, result["dx"].dtype) == (x.shape, x.dtype), label
        assert not (text := difference(result, want, 0.0)), f"{label}: {text}"


@pytest.mark.world(4)
@pytest.mark.parametrize(("mode", "every"), [("dj.jit", 6), ("jax.jit", 18)])
def test_differentiable_data(mode: str, every: int) -> None:
    """All pairs under dj.jit; some elsewhere."""
    check(INEXACT, mode, differentiate=True, every=every)


@pytest.mark.simulated(4)
def test_differentiable_data_eagerly() -> None:
    """Some: each is a program of its own."""
    check(INEXACT, "eager", differentiate=True, every=36)


@pytest.mark.world(4)
def test_integers_and_booleans() -> None:
    check(EXACT, "jax.jit", differentiate=False, every=6)


@pytest.mark.world(4)
def test_the_default_placeholder_stands_for_any_floating_dtype() -> None:
    """Under x64 it is a float64 one."""
    P = dj.Partition()
    functions = {name: case.operator(P) for name, (case, _, _) in OPERATORS.items()}
    xs = {
        (name, dtype): block(name, dtype, "") if P.rank in P_x.ranks else dj.zero_volume_tensor()
        for (name, (_, P_x, _)), dtype in product(OPERATORS.items(), INEXACT)
    }

    @dj.jit
    def program(xs: list[jax.Array]) -> list[jax.Array]:
        return [functions[name](x) for (name, _), x in zip(labels, xs, strict=True)]

    labels = list(xs)
    for (name, dtype), y in zip(labels, program(list(xs.values())), strict=True):
        assert P.rank not in OPERATORS[name][2].ranks or name == "gather" or y.dtype == jnp.dtype(dtype)


@pytest.mark.world(4)
@pytest.mark.simulated(2)
@pytest.mark.parametrize("move", ["repartition", "broadcast", "all_sum_reduce", "all_max"])
def test_cotangents_of_another_dtype(move: str) -> None:
    """A derivative that a user wrote may return float32 for values in float16: messages are in float16."""
    P = dj.Partition()
    P_0 = P.create_partition_inclusive([0])
    x = jnp.ones(4, jnp.float16) if P.rank == 0 or move.startswith("all") else dj.zero_volume_tensor(dtype=jnp.float16)

    @jax.custom_vjp
    def doubled(x: jax.Array) -> jax.Array:
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy.astype(jnp.float32),))

    def moved(x: jax.Array) -> jax.Array:
        if move.startswith("all"):
            return getattr(dj.functional, move)(x, P, axes_reduce=0)
        return getattr(dj.functional, move)(x, P_0, P, preserve_batch=False)

    gradient = jax.jit(jax.grad(lambda x: jnp.sum(doubled(moved(x)).astype(jnp.float32))))(x)
    expected = {"broadcast": 2 * P.size, "all_sum_reduce": 2 * P.size}.get(move, 2)
    assert gradient.shape == x.shape and np.all(np.asarray(gradient) == expected)
