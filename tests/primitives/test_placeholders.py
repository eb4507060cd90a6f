"""Of a placeholder nothing counts but its kind: the data's dtype travels and arrives, whatever the placeholder's.

Every primitive that has placeholders, and gather and scatter: outputs and input cotangents are bit for bit those of
placeholders of the data's own dtype. The operators take the pairs of dtypes in turn, under dj.jit so that each pair is
met, and all of them in a long run.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.examples import LONG
from matrix.partitions import on

import distdl_jax as dj
from distdl_jax import nn

pytestmark = [pytest.mark.primitives, pytest.mark.world(4)]

INEXACT = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
EXACT = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
MODES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda fun: fun,
    "jax.jit": jax.jit,
    "dj.jit": dj.jit,
}


def operators(P: dj.Partition) -> dict[str, tuple[Callable[[Any], Any], dj.Partition, dj.Partition]]:
    """Movements from some workers to others, with the partitions that hold the data before and after."""
    one, other, pair, rows, all_four = (
        each.partition(P)
        for each in (on(1, ranks=(2,)), on(1, ranks=(1,)), on(2, ranks=(3, 0)), on(3, ranks=(1, 2, 3)), on(4))
    )
    spec = dj.TensorSpec((7,), rows)
    return {
        "broadcast": (nn.Broadcast(one, pair), one, pair),
        "sum_reduce": (nn.SumReduce(pair, other), pair, other),
        "repartition": (nn.Repartition(pair, rows), pair, rows),
        "rebalance": (nn.Repartition(rows, all_four), rows, all_four),
        "gather": (lambda x: dj.gather(x, spec, root=0), rows, one),
        "scatter": (lambda x: dj.scatter(x, spec, root=2), one, rows),
    }


def values(dtype: str) -> np.ndarray:
    """Seven numbers that every dtype has, but for booleans."""
    return np.array([3, 4, 5, 0, 1, 2, 7]).astype(jnp.dtype(dtype))


def block(name: str, P_x: dj.Partition, dtype: str, placeholder: str) -> jax.Array:
    """This worker's input: its part of the values, or a placeholder."""
    if not P_x.active:
        return dj.zero_volume_tensor(dtype=placeholder)
    whole = name in ("broadcast", "sum_reduce", "scatter")
    return jax.device_put(values(dtype) if whole else np.array_split(values(dtype), P_x.size)[P_x.rank])


def all_of(P: dj.Partition, chosen: list[tuple[str, str, str]], mode: str, differentiate: bool) -> dict[str, Any]:
    """Output and input cotangent, for each operator and the data's and the placeholder's dtype."""
    found = operators(P)
    args = {
        f"{name} of {dtype}, {placeholder} elsewhere": (name, block(name, found[name][1], dtype, placeholder))
        for name, dtype, placeholder in chosen
    }

    def program(xs: dict[str, jax.Array]) -> dict[str, Any]:
        results = {}
        for label, x in xs.items():
            F = found[args[label][0]][0]
            if differentiate:
                y, pullback = jax.vjp(F, x)
                results[label] = (y, pullback(2 * y)[0])
            else:
                results[label] = (F(x),)
        return results

    results = MODES[mode](program)({label: x for label, (_, x) in args.items()})
    for label, (_, x) in args.items():
        if differentiate:
            assert (results[label][1].shape, results[label][1].dtype) == (x.shape, x.dtype), label
    return results


def check(dtypes: list[str], mode: str, differentiate: bool, every: int) -> None:
    """Every pair of dtypes for one in `every` operators, which take turns; all in a long run."""
    P = dj.Partition()
    found = operators(P)
    chosen = [
        (name, dtype, placeholder)
        for i, name in enumerate(found)
        for j, (dtype, placeholder) in enumerate(product(dtypes, dtypes))
        if LONG > 1 or (i + j + j // len(dtypes)) % every == 0
    ]
    got = all_of(P, chosen, mode, differentiate)
    alike = dict.fromkeys((name, dtype, dtype) for name, dtype, _ in chosen)
    want = all_of(P, list(alike), "jax.jit", differentiate)
    for name, dtype, placeholder in chosen:
        _, P_x, P_y = found[name]
        label = f"{name} of {dtype}, {placeholder} elsewhere"
        assert got[label][0].dtype == jnp.dtype(dtype) or not (P_x.active or P_y.active), label
        for a, b in zip(got[label], want[f"{name} of {dtype}, {dtype} elsewhere"], strict=True):
            assert a.shape == b.shape and (a.dtype == b.dtype or a.size == 0), label
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=label)
        if name == "scatter" and P_y.active:
            np.testing.assert_array_equal(
                np.asarray(got[label][0]), np.array_split(values(dtype), 3)[P_y.rank], err_msg=label
            )


@pytest.mark.parametrize(("mode", "every"), [("dj.jit", 3), ("jax.jit", 5), ("eager", 26)])
def test_differentiable_data(mode: str, every: int) -> None:
    """All pairs under dj.jit, each of two operators; some elsewhere: without jit each is a program of its own."""
    check(INEXACT, mode, differentiate=True, every=every)


def test_integers_and_booleans() -> None:
    check(EXACT, "jax.jit", differentiate=False, every=4)


def test_the_default_placeholder_stands_for_any_floating_dtype() -> None:
    """Under x64 it is a float64 one."""
    P = dj.Partition()
    found = operators(P)
    xs = {
        (name, dtype): block(name, P_x, dtype, "float32") if P_x.active else dj.zero_volume_tensor()
        for (name, (_, P_x, _)), dtype in product(found.items(), INEXACT)
    }

    @MODES["dj.jit"]
    def program(xs: list[jax.Array]) -> list[jax.Array]:
        return [found[name][0](x) for (name, _), x in zip(labels, xs, strict=True)]

    labels = list(xs)
    for (name, dtype), y in zip(labels, program(list(xs.values())), strict=True):
        assert not found[name][2].active or name == "gather" or y.dtype == jnp.dtype(dtype)


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
