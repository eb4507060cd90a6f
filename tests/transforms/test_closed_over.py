"""Arrays that a function closes over are followed like its arguments, wherever its variables hold them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn
from distdl_jax.tracing.closures import MOST_OBJECTS, paths_of

NAMES = ("east", "north", "west")
SHOTS = {name: jnp.full((2, 4), float(n)) for n, name in enumerate(NAMES)}
"""Global, and the same on all workers; the others' values are each worker's own."""

simulated = pytest.mark.simulated(2, 4)


class Shot:
    def __init__(self, name: str, data: Any) -> None:
        self.name, self.data = name, data


class Data(NamedTuple):
    east: Any
    north: Any
    west: Any


class Slotted:
    __slots__ = NAMES

    def __init__(self, **shots: Any) -> None:
        for name, shot in shots.items():
            setattr(self, name, shot)


class Survey:
    """Shots on which all workers have their own blocks, and the order in which this worker takes them."""

    def __init__(self, *, is_mixed: bool = True, sizes: tuple[int, ...] = (2, 2, 2, 2)) -> None:
        workers = dj.Partition()
        self.P = workers.grid([workers.size, 1])
        self.order = sorted(NAMES, reverse=is_mixed and self.P.rank == 1)
        rows = sizes[self.P.rank]
        self.arrays = {n: np.arange(4.0 * rows).reshape(rows, 4) + 100 * k for k, n in enumerate(NAMES)}
        self.arrays = {n: array + 10 * self.P.rank for n, array in self.arrays.items()}
        self.shots = {name: jnp.asarray(array) for name, array in self.arrays.items()}
        self.x = jnp.ones((rows, 4))

    def stacked(self, x: Any, get: Callable[[str], Any]) -> Any:
        for name in self.order:
            x = F.roll(x + get(name), self.P, 1, 0)
        return x

    def step(self, x: Any) -> Any:
        return self.stacked(x, lambda name: self.shots[name])


def _dictionary(s: Survey) -> Callable[[Any], Any]:
    shots = s.shots
    return lambda x: s.stacked(x, lambda name: shots[name])


def _set(s: Survey) -> Callable[[Any], Any]:
    shots = {Shot(name, shot) for name, shot in s.shots.items()}

    def fun(x: Any) -> Any:
        for shot in sorted(shots, key=lambda shot: s.order.index(shot.name)):
            x = F.roll(x + shot.data, s.P, 1, 0)
        return x

    return fun


def _set_known_by_content(s: Survey) -> Callable[[Any], Any]:
    order = {n: k for k, n in enumerate(s.order)}

    class Source:
        def __init__(self, name: str) -> None:
            self.data = SHOTS[name] + 1
            places[id(self)] = order[name]

    places: dict[int, int] = {}
    sources = {Source(name) for name in NAMES}
    return lambda x: functools.reduce(
        lambda x, source: F.roll(x + source.data, s.P, 1, 0), sorted(sources, key=lambda a: places[id(a)]), x
    )


def _set_of_numbers(s: Survey) -> Callable[[Any], Any]:
    positions = {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)}

    def fun(x: Any) -> Any:
        for position in sorted(positions, reverse=s.order[0] != NAMES[0]):
            x = F.roll(x * jnp.array(position, jnp.float32), s.P, 1, 0)
        return x

    return fun


def _rows(s: Survey) -> Callable[[Any], Any]:
    rows = np.stack([s.arrays[name] for name in NAMES])
    return lambda x: s.stacked(x, lambda name: rows[NAMES.index(name)])


def _argument(order: Any, P: Any, shots: Any, x: Any) -> Any:
    for name in order:
        x = F.roll(x + shots[name], P, 1, 0)
    return x


def _default(s: Survey) -> Callable[[Any], Any]:
    def fun(x: Any, shots: Any = s.shots) -> Any:
        return s.stacked(x, lambda name: shots[name])

    return fun


def _wrapped(s: Survey) -> Callable[[Any], Any]:
    @functools.wraps(s.step)
    def fun(x: Any) -> Any:
        return 2 * s.step(x)

    return fun


def _nested(s: Survey) -> Callable[[Any], Any]:
    shots = list(s.shots.values())

    @jax.jit
    def inner(x: Any) -> Any:
        return s.stacked(x, lambda name: shots[NAMES.index(name)])

    return lambda x: inner(x) + 1


def _module(s: Survey) -> Callable[[Any], Any]:
    equinox = pytest.importorskip("equinox")

    class Model(equinox.Module):
        shots: dict[str, Any]

        def __call__(self, x: Any) -> Any:
            return s.stacked(x, lambda name: self.shots[name])

    return Model(s.shots)


def _layers(s: Survey) -> Callable[[Any], Any]:
    def layer(name: str) -> Any:
        return nn.Local(lambda x: x + s.shots[name])

    shift = [F.roll for _ in NAMES]
    layers = {name: layer(name) for name in NAMES}

    def fun(x: Any) -> Any:
        for name, roll in zip(s.order, shift, strict=True):
            x = roll(layers[name](x), s.P, 1, 0)
        return x

    return fun


HELD: dict[str, Callable[[Survey], Callable[[Any], Any]]] = {
    "a dictionary": _dictionary,
    "a list, in a jitted function": _nested,
    "a set of objects with names": _set,
    "a set of objects that differ in arrays": _set_known_by_content,
    "a set of tuples of numbers": _set_of_numbers,
    "numpy": lambda s: lambda x: s.stacked(x, lambda name: s.arrays[name]),
    "rows of a numpy array": _rows,
    "converted numpy": lambda s: lambda x: s.stacked(x, lambda name: jnp.asarray(s.arrays[name], jnp.float16)),
    "a named tuple": lambda s: functools.partial(
        lambda data, x: s.stacked(x, lambda name: getattr(data, name)), Data(**s.shots)
    ),
    "slots": lambda s: functools.partial(
        lambda data, x: s.stacked(x, lambda name: getattr(data, name)), Slotted(**s.shots)
    ),
    "partial": lambda s: functools.partial(_argument, s.order, s.P, s.shots),
    "a global": lambda s: lambda x: s.stacked(x, lambda name: SHOTS[name]),
    "a default": _default,
    "self": lambda s: s.step,
    "wraps": _wrapped,
    "an equinox module": _module,
    "layers": _layers,
    "jax.checkpoint": lambda s: jax.checkpoint(s.step),
    "vmap": lambda s: lambda x: jax.vmap(s.step)(x[None]),
    "a scan's constants": lambda s: (
        lambda x: lax.scan(
            lambda c, _: (c, [F.roll(x * s.shots[name], s.P, 1, 0) for name in s.order]), x, None, length=2
        )[1]
    ),
    "a derivative": lambda s: dj.value_and_grad(lambda x: jnp.sum(s.step(x) ** 2)),
}


@simulated
@pytest.mark.parametrize("held", HELD)
def test_arrays_taken_in_another_order_are_refused_wherever_they_are_held(held: str) -> None:
    survey = Survey()
    report = dj.check(HELD[held](survey), survey.x)
    assert "The workers' programs differ" in str(report.problem), held
    assert report.problem.count("and passes ") == 2


@simulated
@pytest.mark.parametrize("held", HELD)
def test_each_worker_may_hold_its_own_blocks(held: str) -> None:
    """Other values, other shapes, and a worker without data."""
    for sizes in ((2, 2, 2, 2), (2, 1, 1, 1), (1, 0, 0, 0)):
        survey = Survey(is_mixed=False, sizes=sizes)
        if held == "a set of objects that differ in arrays" or held == "a global":
            survey = Survey(is_mixed=False)
        assert dj.check(HELD[held](survey), survey.x).problem is None, sizes


@pytest.mark.world(2)
def test_dj_jit_refuses_another_order_on_all_workers_and_computes_the_same_otherwise() -> None:
    with pytest.raises(dj.PlanError, match=r"passes self.shots\['east'\], but worker 1 .* self.shots\['west'\]"):
        dj.jit(Survey().step)(Survey().x)
    survey = Survey(is_mixed=False)
    np.testing.assert_array_equal(dj.jit(survey.step)(survey.x), jax.jit(survey.step)(survey.x))


@simulated
def test_static_arguments_hold_arrays() -> None:
    @functools.partial(dj.jit, static_argnums=0)
    def step(survey: Survey, x: Any) -> Any:
        return survey.step(x)

    survey = Survey()
    with pytest.raises(dj.PlanError, match=r"survey.shots\['"):
        step(survey, survey.x)
    survey = Survey(is_mixed=False)
    np.testing.assert_array_equal(step(survey, survey.x), jax.jit(survey.step)(survey.x))


@simulated
@pytest.mark.parametrize("array", [np.full, jnp.full])
def test_what_workers_hold_and_choose_by_rank_is_accepted(array: Callable[..., Any]) -> None:
    survey = Survey(is_mixed=False)
    P, rank = survey.P, survey.P.rank
    masks = [array((2, 4), float(rank == root)) for root in range(P.size)]  # equal values, on others in another order
    ahead, behind = (survey.shots[name] for name in (NAMES if rank else NAMES[::-1])[:2])
    extra = [jnp.full((2, 4), float(n)) for n in range(rank)]  # another number of them on each worker

    def fun(x: Any) -> Any:
        y = [F.all_sum_reduce(x * mask, P, axes_reduce=0) for mask in masks]
        y.append(F.roll(F.roll(x + ahead, P, 1, 0) + behind, P, -1, 0))
        y += [F.roll(x * jnp.full((2, 4), float(rank == k)), P, 1, 0) for k in range(2)]
        y += [F.roll(x * np.full((2, 4), float(rank == k)), P, 1, 0) for k in range(2)]
        for field in extra:
            x = x + field
        return y, F.roll(x, P, 1, 0)

    assert dj.check(fun, survey.x).problem is None
    jax.tree.map(np.testing.assert_array_equal, dj.jit(fun)(survey.x), jax.jit(fun)(survey.x))


@simulated
def test_arrays_without_a_path_are_accepted_in_any_order() -> None:
    """A set of arrays that are each worker's own has no order, and no names, that could be compared."""
    survey = Survey()

    def fun(x: Any) -> Any:
        made = {name: jnp.asarray(np.cos(survey.arrays[name])) for name in NAMES}
        return survey.stacked(x, lambda name: made[name])

    assert dj.check(fun, survey.x).problem is None


def test_paths_are_the_shortest_ones_and_names_before_positions() -> None:
    a, b = jnp.zeros(2), jnp.ones(2)
    shots, order = {"a": a, "b": b}, [b, a]
    assert paths_of([a, b], {"order": order, "shots": shots}) == ["shots['a']", "shots['b']"]
    assert paths_of([a, b], {"all": {"x": {"y": shots}}, "order": order}) == ["order[1]", "order[0]"]
    assert paths_of([a], {"one": Shot("a", a), "two": Shot("a", b)}) == ["one.data"]
    assert paths_of([np.zeros(2)], {"shots": [np.zeros(2), np.zeros(2)]}) == [""]  # which one isn't known


def test_large_closures_are_searched_no_further_than_needed() -> None:
    shots = {"near": jnp.ones(2)}
    many = [[[np.zeros(1) for _ in range(50)] for _ in range(50)] for _ in range(50)]
    assert len(many) ** 3 > MOST_OBJECTS
    far = {"far": {"very": {"far": {"away": jnp.zeros(2)}}}}
    roots = {"many": many, "numbers": list(range(10**6)), "shots": shots, "far": far}
    assert paths_of([shots["near"], np.full(7, 3.0)], roots) == ["shots['near']", ""]


def test_no_code_of_users_runs() -> None:
    class Lazy:
        def __init__(self) -> None:
            self.me, self.shot = self, jnp.ones(2)

        @property
        def data(self) -> Any:
            raise AssertionError("a property was read")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was looked up")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        def __hash__(self) -> int:
            return 0

        def __repr__(self) -> str:
            raise AssertionError("printed")

    class Proxy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no object is bound to it")

    lazy = Lazy()
    roots = {"lazy": {lazy}, "proxy": Proxy(), "keys": {(1, lazy): lazy.shot + 1}, "x": {"y": {"z": lazy.shot + 2}}}
    constants = [lazy.shot, roots["keys"][1, lazy], roots["x"]["y"]["z"]]
    assert [bool(path) for path in paths_of(constants, roots)] == [True, True, True]
