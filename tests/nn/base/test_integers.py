"""Sizes are integers, Python's or numpy's, which make no difference; bools and floats are refused in a sentence."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import every_layer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_layer import LAYERS

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn

NUMBERS = {"DistributedUpsample": ["scale_factor"]}  # a factor may be any number
FIXED_BY_TYPE = ["Remat", "Precision", "WeightNorm", "SpectralNorm", "Residual", "Skip", "Pipeline", "Sequential"]


def changed(value: Any, change: Callable[[int], Any]) -> Any:
    """The same with each of its integers changed."""
    if type(value) in (tuple, list):
        return type(value)(changed(each, change) for each in value)
    return change(value) if type(value) is int else value


def made(name: str, P: dj.Partition, change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Any:
    """A layer of `every_layer`, of which `change` gets the name of each class and its arguments."""

    def wrapped(kind: str) -> Any:
        return lambda *args, **given: getattr(nn, kind)(*changed(args, np.int64), **change(kind, given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(every_layer, "nn", SimpleNamespace(**{kind: wrapped(kind) for kind in nn.__all__}))
        return LAYERS[name](P)


@pytest.mark.parametrize("kind", [np.int64, np.int32, lambda n: np.array(n, np.int16)], ids=["int64", "int32", "array"])
@pytest.mark.parametrize("name", LAYERS)
def test_numpy_integers(name: str, kind: Callable[[int], Any]) -> None:
    """Layers are equal, and print alike: in labels of agreements they may stand beside each other."""
    P = dj.planning_world(4, 1)
    layer = made(name, P, lambda _, given: {key: changed(value, kind) for key, value in given.items()})
    expected = LAYERS[name](P)
    assert (layer, hash(layer), repr(layer)) == (expected, hash(expected), repr(expected))
    assert jax.tree.map(repr, layer.param_specs()) == jax.tree.map(repr, expected.param_specs())


def integers_of(name: str) -> Iterator[tuple[str, str]]:
    """Each argument of a layer that is an integer, or holds some, with the class that it is of."""
    found: list[tuple[str, str]] = []

    def note(kind: str, given: dict[str, Any]) -> dict[str, Any]:
        found.extend((kind, key) for key, value in given.items() if changed(value, str) != value)
        return given

    made(name, dj.planning_world(4, 1), note)
    return iter(found)


@pytest.mark.parametrize("wrong", [2.5, True], ids=["float", "bool"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in FIXED_BY_TYPE])
def test_what_is_no_integer(name: str, wrong: Any) -> None:
    P = dj.planning_world(4, 1)
    for kind, key in integers_of(name):
        if key in NUMBERS.get(kind, []) and wrong is not True:
            continue

        def spoil(_: str, given: dict[str, Any], key: str = key) -> dict[str, Any]:
            return {**given, key: changed(given[key], lambda _: wrong)} if key in given else given

        with pytest.raises(dj.DistDLError, match=f"`{key}"):
            made(name, P, spoil)


@pytest.mark.simulated(2)
def test_a_plan_of_numpy_integers_spoils_no_other() -> None:
    """Equal plans are one in caches: what was planned from numpy's integers serves Python's, and the other way."""
    P, key = dj.Partition(), jax.random.key(0)

    def networks(integer: Callable[[int], Any]) -> list[Any]:
        linear = nn.DistributedLinear(P.grid([1, 2]), in_features=integer(14), out_features=integer(3))
        attention = nn.DistributedMultiHeadAttention(P.grid([1, 2, 1]), integer(6), integer(3))
        block = nn.DistributedFNOBlock(P.grid([1, 1, 2]), integer(2), integer(3), integer(2))
        return [
            linear(linear.init(key), jnp.ones((4, 7))),
            attention(attention.init(key), jnp.ones((2, 5 - P.rank, 6))),
            block(block.init(key), jnp.ones((2, 2, 4))),
            F.reshape(jnp.ones((4, 7)), P.grid([2, 1]), P.grid([2]), integer(56)),
            F.segment_sum(jnp.ones((4, 7)), P.grid([2, 1]), [0, 1, 2, 1] * 2, integer(3)),
            F.segment_max(jnp.ones((4, 7)), P.grid([2, 1]), [0, 1, 2, 1] * 2, integer(3)),
            dj.TensorSpec((integer(9), 2), P.grid([integer(2), integer(1)])).block(jnp.ones((9, 2))),
        ]

    jax.tree.map(np.testing.assert_array_equal, networks(np.int64), networks(int))
