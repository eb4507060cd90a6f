"""Workers that make calls alike in another order are refused; those that choose what they pass, or hold, are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn

pytestmark = pytest.mark.simulated(2, 4)


class Case:
    """This worker's partition, fields alike, and the order in which it comes upon them."""

    def __init__(self) -> None:
        workers = dj.Partition()
        self.P = workers.grid([workers.size, 1])
        self.flat = workers.grid([1, workers.size])
        self.root = workers.grid([1, 1])
        self.fields = {name: jnp.full((2, 4), float(n)) for n, name in enumerate(["eps", "rho", "vp", "vs"])}
        self.names = sorted(self.fields, reverse=self.P.rank == 1)

    def moved(self, move: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda f: {name: move(f[name]) for name in self.names}

    def on_root(self, x: Any) -> Any:
        return x if self.P.rank == 0 else x[:0]


def _returned(case: Case) -> Callable[[Any], Any]:
    def fun(f: Any) -> Any:
        y = F.roll(f["vp"], case.P, 1, 0)
        z = F.roll(jnp.sin(f["vp"]), case.P, 1, 0)
        return (y, z) if case.P.rank == 1 else (z, y)

    return fun


def _added_up(case: Case) -> Callable[[Any], Any]:
    def fun(f: Any) -> Any:
        total = f["common"]
        for name in case.names:
            total = F.roll(total + f[name], case.P, 1, 0)
        return total

    return fun


MIXED: dict[str, Callable[[Case], Callable[[Any], Any]]] = {
    "roll": lambda c: c.moved(lambda x: F.roll(x, c.P, 1, 0)),
    "arithmetic": lambda c: c.moved(lambda x: F.roll(2 * x + 1, c.P, 1, 0)),
    "beside a common field": lambda c: lambda f: {n: F.roll(f[n] * f["common"], c.P, 1, 0) for n in c.names},
    "added up, with a common field": _added_up,
    "all_sum_reduce": lambda c: c.moved(lambda x: F.all_sum_reduce(x, c.P, axes_reduce=0)),
    "all_gather": lambda c: c.moved(lambda x: F.all_gather(x, c.P, axes=(0,))),
    "repartition": lambda c: c.moved(lambda x: F.repartition(x, c.flat, c.P)),
    "broadcast": lambda c: c.moved(lambda x: F.broadcast(c.on_root(x), c.root, c.flat)),
    "integers": lambda c: c.moved(lambda x: F.roll(x.astype(int), c.P, 1, 0)),
    "a list": lambda c: lambda f: [F.roll(x, c.P, 1, 0) for x in [f[name] for name in c.names]],
    "in a jitted function": lambda c: c.moved(jax.jit(lambda x: F.roll(x, c.P, 1, 0))),
    "in jax.checkpoint": lambda c: c.moved(jax.checkpoint(lambda x: F.roll(x, c.P, 1, 0))),
    "in a scan": lambda c: (
        lambda f: lax.scan(lambda f, _: (c.moved(lambda x: F.roll(x, c.P, 1, 0))(f), None), f, None, length=3)[0]
    ),
    "gradient": lambda c: dj.grad(
        lambda f: sum(jnp.sum(y**3) for y in c.moved(lambda x: F.roll(x, c.P, 1, 0))(f).values())
    ),
    "of what moved": lambda c: (
        lambda f: c.moved(lambda x: F.roll(x, c.P, 1, 0))(
            {name: F.roll(f["vp"] + n, c.P, 1, 0) for n, name in enumerate(sorted(c.fields))}
        )
    ),
    "results": _returned,
}


@pytest.mark.parametrize("name", MIXED)
def test_calls_in_another_order_are_refused(name: str) -> None:
    case = Case()
    fields = case.fields | ({"common": jnp.ones((2, 4))} if "common" in name else {})
    report = dj.check(MIXED[name](case), fields)
    assert not report.ok and "The workers' programs differ" in str(report.problem)
    assert "worker 0" in report.problem and "worker 1" in report.problem and "test_mixed_calls.py" in report.problem
    if name not in ("of what moved", "results", "gradient"):
        assert ("f['eps']" in report.problem and "f['vs']" in report.problem) or "f[" in report.problem
    with pytest.raises(dj.PlanError, match="The workers' programs differ"):
        dj.jit(MIXED[name](case))(fields)


@pytest.mark.parametrize("name", [name for name in MIXED if name != "gradient"])
def test_calls_with_closed_over_fields_in_another_order_are_refused(name: str) -> None:
    case = Case()
    fields = case.fields | ({"common": jnp.ones((2, 4))} if "common" in name else {})
    report = dj.check(lambda: MIXED[name](case)(fields))
    assert not report.ok and "The workers' programs differ" in str(report.problem)
    if name not in ("of what moved", "results"):
        assert "fields['" in report.problem


def test_layers_in_another_order_are_refused() -> None:
    case = Case()
    layers = {name: nn.DistributedLinear(case.flat, in_features=8, out_features=8) for name in ("a", "b")}
    params = {name: layer.init(jax.random.key(0)) for name, layer in layers.items()}

    def network(params: Any, x: Any) -> Any:
        for name in sorted(layers, reverse=case.P.rank == 1):
            x = layers[name](params[name], x)
        return jnp.sum(x**2)

    report = dj.check(dj.value_and_grad(network), params, jnp.ones((2, 8 // case.P.size)))
    assert "params['a']" in str(report.problem)


def _teams(case: Case) -> Callable[[Any], Any]:
    """Each worker computes its own model, and both are moved together."""

    def fun(f: Any) -> Any:
        y = f["vp"] * f["eps"] if case.P.rank == 0 else jnp.sin(f["rho"])
        y = F.roll(y, case.P, 1, 0)
        return F.all_sum_reduce(y * (f["vs"] if case.P.rank else 1.0), case.P, axes_reduce=0)

    return fun


def _all_to_all_by_hand(case: Case) -> Callable[[Any], Any]:
    def fun(f: Any) -> Any:
        blocks, n = list(f.values()), case.P.size
        return [F.roll(blocks[(case.P.rank + s) % n], case.P, s, 0) for s in range(n)]

    return fun


def _reduce_scatter_by_hand(case: Case) -> Callable[[Any], Any]:
    def fun(f: Any) -> Any:
        blocks, n, r = list(f.values()), case.P.size, case.P.rank
        total = blocks[(r - 1) % n]
        for s in range(n - 1):
            total = F.roll(total, case.P, 2, 0) + blocks[(r - s - 2) % n]
        return total

    return fun


HEALTHY: dict[str, Callable[[Case], Callable[[Any], Any]]] = {
    "chosen by rank": lambda c: lambda f: F.roll(f["vp" if c.P.rank else "vs"], c.P, 1, 0),
    "teams": _teams,
    "constants": lambda c: (
        lambda f: {
            name: F.broadcast(x if c.P.rank == 0 else dj.zero_volume_tensor(), c.root, c.flat) for name, x in f.items()
        }
    ),
    "all-to-all by hand": _all_to_all_by_hand,
    "reduce-scatter by hand": _reduce_scatter_by_hand,
    "jnp.where": lambda c: (
        lambda f: [F.roll(jnp.where(c.P.rank == 0, f[a], f[b]), c.P, 1, 0) for a, b in (("vp", "vs"), ("vs", "vp"))]
    ),
    "own results": lambda c: lambda f: F.roll(f["vp"], c.P, 1, 0) * f["vs" if c.P.rank else "rho"],
}


def _in_sorted_order(case: Case) -> Callable[[Any], Any]:
    return lambda f: {n: F.roll(f[n], case.P, 1, 0) for n in sorted(f)}


BRANCHES: dict[str, Callable[[Case], Callable[[Any, Any], Any]]] = {
    "first branch": lambda c: lambda p, f: lax.cond(p, _in_sorted_order(c), c.moved(lambda x: F.roll(x, c.P, 1, 0)), f),
    "last branch": lambda c: lambda p, f: lax.cond(p, c.moved(lambda x: F.roll(x, c.P, 1, 0)), _in_sorted_order(c), f),
    "closed over": lambda c: (
        lambda p, f: lax.cond(
            p, lambda: _in_sorted_order(c)(c.fields), lambda: c.moved(lambda x: F.roll(x, c.P, 1, 0))(c.fields)
        )
    ),
    "switch": lambda c: (
        lambda p, f: lax.switch(p.astype(int), [*[_in_sorted_order(c)] * 2, c.moved(lambda x: F.roll(x, c.P, 1, 0))], f)
    ),
    "in a scan": lambda c: (
        lambda p, f: lax.scan(lambda f, _: (BRANCHES["last branch"](c)(p, f), None), f, None, length=2)[0]
    ),
    "gradient": lambda c: (
        lambda p, f: dj.grad(lambda f: sum(jnp.sum(y**3) for y in BRANCHES["first branch"](c)(p, f).values()))(f)
    ),
    "results of movements": lambda c: (
        lambda p, f: lax.cond(
            p, lambda f: (F.roll(f["vp"], c.P, 1, 0), F.roll(f["vp"] ** 2, c.P, 1, 0)), _returned(c), f
        )
    ),
    "results without movements": lambda c: (
        lambda p, f: [
            F.roll(y, c.P, 1, 0)
            for y in lax.cond(p, lambda f: (f["vp"], f["vs"]), lambda f: tuple(f[n] for n in c.names if n[0] == "v"), f)
        ]
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_with_equal_operations_are_compared_by_what_they_move(name: str) -> None:
    """One branch in the same order on all workers, the other not: the operations don't tell them apart."""
    case = Case()
    report = dj.check(BRANCHES[name](case), jnp.array(True), case.fields)
    assert "The workers' programs differ" in str(report.problem) and "where conditionals take branch" in report.problem
    case.names.sort()
    fun = BRANCHES[name](case)
    if name != "results of movements":
        assert dj.check(fun, jnp.array(True), case.fields).problem is None


def test_branches_that_move_other_values_are_accepted() -> None:
    case = Case()

    def fun(p: Any, f: Any) -> Any:
        either = lax.cond(p, lambda f: F.roll(f["vp"], case.P, 1, 0), lambda f: F.roll(f["vs"], case.P, 1, 0), f)
        first, second = lax.cond(p, lambda f: (f["vp"], f["vs"]), lambda f: (f["vs"], f["vp"]), f)
        same = lax.cond(p, lambda x: F.roll(x, case.P, 1, 0), lambda x: F.roll(x, case.P, 1, 0) * 2, either)
        return F.roll(first, case.P, 1, 0) + same - F.roll(second, case.P, 1, 0)

    def loss(f: Any, p: Any) -> Any:
        return jnp.sum(fun(p, f) ** 2)

    for p in jnp.array([True, False]):
        assert dj.check(dj.value_and_grad(loss), case.fields, p).problem is None
    np.testing.assert_allclose(dj.jit(fun)(p, case.fields), jax.jit(fun)(p, case.fields))


@pytest.mark.parametrize("name", HEALTHY)
def test_what_a_worker_chooses_is_accepted(name: str) -> None:
    case = Case()
    fun = HEALTHY[name](case)
    assert dj.check(fun, case.fields).problem is None
    assert dj.check(lambda: fun(case.fields)).problem is None  # closed over
    jax.tree.map(np.testing.assert_allclose, dj.jit(fun)(case.fields), jax.jit(fun)(case.fields))
