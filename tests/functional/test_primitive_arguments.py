"""The primitives refuse what is not a partition, in a sentence that names the argument and its value."""

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import functional, nn

pytestmark = pytest.mark.world(1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda P, x: functional.broadcast(x, 3, P), "P_x"),
        (lambda P, x: functional.broadcast(x, P, 3), "P_y"),
        (lambda P, x: functional.sum_reduce(x, P, 3), "P_y"),
        (lambda P, x: functional.repartition(x, 3, P), "P_x"),
        (lambda P, x: functional.all_sum_reduce(x, 3, axes_keep=()), "P_x"),
        (lambda P, x: functional.all_to_all(x, 3, 0, 1), "P_x"),
        (lambda P, x: functional.reduce_scatter(x, 3, 0), "P_x"),
        (lambda P, x: nn.Broadcast(P, 3), "P_y"),
        (lambda P, x: nn.SumReduce(3, P), "P_x"),
        (lambda P, x: nn.Repartition(P, 3), "P_y"),
        (lambda P, x: nn.AllSumReduce(3, 0), "P_x"),
        (lambda P, x: nn.AllGather(3, 0), "P_x"),
        (lambda P, x: nn.ReduceScatter(3, 0), "P_x"),
        (lambda P, x: nn.DistributedLinear(P, P, 3, 1, 1), "P_W"),
    ],
)
def test_what_is_no_partition_is_named(call: Callable, name: str) -> None:
    with pytest.raises(dj.InvalidTypeError, match=rf"`{name}` \(=3\) must be a partition"):
        call(dj.Partition(), jnp.ones(3))


def test_what_no_message_can_hold_is_named() -> None:
    P = dj.Partition().grid([1, 1])
    keys = jax.random.split(jax.random.key(0), (2, 2))
    for values, sentence in (
        (keys, r"\(of dtype key<fry>\) must be an array of numbers; for random keys, pass jax.random.key_data"),
        (np.full((2, 2), "a"), r"\(of dtype <U1\) must be an array of numbers\."),
        (jnp.ones((2, 2), jnp.int4), r"\(of dtype int4\) must have a dtype of whole bytes, .* not of 4 bits\."),
        (jnp.ones((2, 2), jnp.float4_e2m1fn), r"\(of dtype float4_e2m1fn\) must have a dtype of whole bytes"),
    ):
        with pytest.raises(dj.InvalidTypeError, match=rf"`xs\[0\]` {sentence}"):
            nn.Concatenate(P)(values, values)
        with pytest.raises(dj.InvalidTypeError, match=rf"`x` {sentence}"):
            functional.repartition(values, P, P)
        if "of whole bytes" in sentence:
            with pytest.raises(dj.InvalidTypeError, match=rf"`tree\['a'\]` {sentence}"):
                dj.gather({"a": values}, dj.TensorSpec((2, 2), P))


def test_widths_of_a_halo_come_in_any_form_and_what_is_none_is_refused_when_made() -> None:
    P, x = dj.Partition().grid([1, 1]), jnp.ones((2, 2))
    wanted = nn.HaloExchange(P, ((1, 0), (0, 1)))
    for halo in (np.eye(2, dtype=int), [[1, np.array(0)], (0, np.int8(1))]):
        assert nn.HaloExchange(P, halo) == wanted
        np.testing.assert_array_equal(nn.HaloExchange(P, halo)(x), x)
    for bad in ("no", np.array(1), [1, 0], np.eye(2)):
        with pytest.raises(dj.InvalidArgumentError, match=r"(?s)`halo` .* must be 2 pairs \(left, right\) of integers"):
            nn.HaloExchange(P, bad)
    with pytest.raises(dj.InvalidArgumentError, match=r"`periodic` .* must have 2 entries"):
        nn.HaloExchange(P, ((1, 0), (0, 1)), periodic=(True,))
    outside = dj.planning_world(4, 3).grid([1, 2])
    assert nn.HaloExchange(outside, ()) == nn.HaloExchange(outside, ((1, 0), (0, 1)))  # it reads none
    with pytest.raises(dj.InvalidArgumentError, match=r"`halo` \(=\(\(1, 1\),\)\) must be 2 pairs"):
        nn.HaloExchange(outside, ((1, 1),))


@pytest.mark.parametrize(
    ("layer", "function"),
    [
        (nn.AllGather, functional.all_gather),
        (nn.AllReduce, functional.all_reduce),
        (nn.AllToAll, functional.all_to_all),
        (nn.AllSumReduce, functional.all_sum_reduce),
        (nn.Broadcast, functional.broadcast),
        (nn.HaloExchange, functional.halo_exchange),
        (nn.ReduceScatter, functional.reduce_scatter),
        (nn.Repartition, functional.repartition),
        (nn.SegmentSum, functional.segment_sum),
        (nn.SumReduce, functional.sum_reduce),
        (nn.Take, functional.take),
    ],
)
def test_a_layer_takes_and_documents_the_arguments_of_its_function(layer: type, function: Callable) -> None:
    arguments = inspect.signature(function).parameters
    for name, argument in inspect.signature(layer).parameters.items():
        assert argument.default == arguments[name].default
    assert inspect.getdoc(function) in inspect.getdoc(layer)
