"""What plans say that workers communicate in a training step is, operation by operation, what their programs do."""

from collections import defaultdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from launcher.examples import examples
from predicted import check_predicted, step_of

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.transports.threads.world import ThreadTransport


@pytest.mark.parametrize("seed", range(examples(24)))
def test_plans_predict_every_operation_of_drawn_networks(seed: int) -> None:
    check_predicted(*drawn(seed))


@pytest.mark.parametrize("seed", range(100, 104))
def test_a_step_of_a_drawn_network_sends_what_its_cost_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of 2 to 8 workers, in messages and in collective operations."""
    build, size = drawn(seed)
    sent: defaultdict[int, list[int]] = defaultdict(list)
    perform = ThreadTransport.perform

    def counted(self: Any, operation: Any, given: np.ndarray, coming: Any) -> np.ndarray:
        nothing = operation.is_message and operation.dest is None
        nbytes = given.nbytes if operation.is_message else operation.bytes_sent
        sent[self._rank].append(0 if nothing else nbytes)
        return perform(self, operation, given, coming)

    def step() -> None:
        value_and_grad, *arguments = step_of(*build(dj.Partition()))
        jax.block_until_ready(jax.jit(value_and_grad)(*arguments))

    monkeypatch.setattr(ThreadTransport, "perform", counted)
    dj.simulate(size, step)
    cost = dj.cost(*build(dj.planning_world(size)))
    assert [sum(sent[worker][:-1]) for worker in range(size)] == list(cost.bytes)  # last, the loss is summed


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (3, 1, 2)])
def test_flops_of_a_convolution_are_what_xla_counts(stride: int, padding: int, dilation: int) -> None:
    """Products with padding don't count."""
    P = dj.planning_world(1).grid([1, 1, 1, 1])
    options = {"kernel_size": (3, 2), "stride": stride, "padding": padding, "dilation": dilation}
    layer = nn.DistributedConv2d(P, in_channels=4, out_channels=6, groups=2, bias=False, **options)
    spec = dj.TensorSpec((2, 4, 9, 8), P)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        pads = [(padding,) * 2] * 2
        return jax.lax.conv_general_dilated(
            x, w, (stride,) * 2, pads, rhs_dilation=(dilation,) * 2, feature_group_count=2
        )

    args = (jnp.zeros((2, 4, 9, 8)), jnp.zeros((6, 2, 3, 2)))
    counted = jax.jit(convolve).lower(*args).cost_analysis()["flops"]
    assert layer.output_spec(spec).global_shape == jax.eval_shape(convolve, *args).shape
    assert dj.cost(layer, spec, backward=False).flops[0] == counted


def test_a_linear_layer_counts_two_flops_for_each_product() -> None:
    """Forward, for the input where it has a gradient, and for the weight."""
    P = dj.planning_world(1).grid([1, 1])
    layers = [nn.DistributedLinear(P, P, P, *sizes, bias=False) for sizes in ((5, 7), (7, 3))]
    (first, second) = dj.cost(nn.Sequential(*layers), dj.TensorSpec((4, 5), P)).layers
    assert first.amounts.flops[0] == 2 * (2 * 4 * 5 * 7)
    assert second.amounts.flops[0] == 3 * (2 * 4 * 7 * 3)


def test_parameters_and_what_the_optimiser_stores() -> None:
    P = dj.planning_world(2).grid([1, 1, 2])
    layer = nn.DistributedConv1d(P, in_channels=1, out_channels=2, kernel_size=3)
    spec = dj.TensorSpec((1, 1, 8), P)
    adam, sgd = (dj.cost(layer, spec, optimiser=name).workers for name in ("adam", "sgd"))
    assert adam.parameters.tolist() == adam.gradients.tolist() == [4 * (2 * 3 + 2), 0]
    assert adam.optimiser.tolist() == [2 * 32, 0]
    assert sgd.optimiser.tolist() == [0, 0]
    forward = dj.cost(layer, spec, backward=False).workers
    assert not forward.gradients.any() and not forward.optimiser.any()


ONE = dj.planning_world(1).grid([1, 1])
MANY = dj.planning_world(300).grid([300, 1, 1])
LINEAR, SPEC = nn.DistributedLinear(ONE, ONE, ONE, 5, 7), dj.TensorSpec((4, 5), ONE)
SPEC_OF_MANY = dj.TensorSpec((300, 1, 5), MANY)
TOGETHER = partial(nn.DistributedMaxPool1d(MANY, 2), {})
AGAIN = nn.Remat(nn.DistributedConv1d(MANY, in_channels=1, out_channels=2, kernel_size=1))


@pytest.mark.parametrize(
    ("network", "spec", "options", "error", "words"),
    [
        (
            LINEAR,
            SPEC,
            {"optimiser": "nadam"},
            dj.InvalidArgumentError,
            r"`optimiser` .*'nadam'.* must be one of sgd, ",
        ),
        (LINEAR, SPEC, {"backward": "no"}, dj.InvalidTypeError, r"`backward` \(='no'\) must be True or False"),
        (LINEAR, SPEC, {"dtype": "foo"}, dj.InvalidTypeError, r"`dtype` \(='foo'\) must be a dtype"),
        (3, SPEC, {}, dj.InvalidTypeError, r"`network` \(=3\) must be a function"),
        (jnp.sin, jnp.zeros(3), {}, dj.InvalidArgumentError, r"`specs` must hold a TensorSpec"),
        (jnp.sin, SPEC, {"optimiser": "sgd"}, dj.InvalidArgumentError, "`optimiser` and `backward` are of networks"),
        (TOGETHER, SPEC_OF_MANY, {}, dj.InvalidArgumentError, r"has layers, so all workers trace it: at most 256"),
        (LINEAR, dj.TensorSpec((4, 6), ONE), {}, dj.PlanError, "`x` has shape"),
        (AGAIN, SPEC_OF_MANY, {}, dj.PlanError, r"Remat can't .* on all of them: at most 256"),
    ],
)
def test_what_can_not_be_predicted_is_refused(network: Any, spec: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        dj.cost(network, spec, **options)


def by_value(x: jax.Array) -> jax.Array:
    """Depends on a value in Python."""
    return x if x.sum() > 0 else -x


def until(x: jax.Array) -> jax.Array:
    """Has no derivative in reverse."""
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]


@pytest.mark.parametrize(
    ("function", "words"),
    [(by_value, "`network` can't be planned: a part of it depends on values"), (until, "1 Local.*Reverse-mode")],
)
def test_a_program_that_can_not_be_traced_is_refused_in_a_sentence(function: Any, words: str) -> None:
    P = dj.planning_world(2).grid([2, 1])
    network = nn.Sequential(nn.DistributedLinear(P, in_features=4, out_features=4), nn.Local(function))
    with pytest.raises(dj.PlanError, match=words):
        dj.cost(network, dj.TensorSpec((8, 4), P))


def test_a_spec_of_another_planning_world_will_do() -> None:
    """Counts, and the picture, are those of a spec of the layers' own world."""
    (P, P_x), (_, other) = ((P, P.grid([1, 1], [0])) for P in (dj.planning_world(4), dj.planning_world(4)))
    layers = nn.Sequential(nn.Repartition(P_x, P.grid([1, 4])), nn.AllSumReduce(P.grid([1, 4]), axes_reduce=1))
    own, foreign = (dj.TensorSpec((3, 28), each) for each in (P_x, other))
    assert dj.cost(layers, foreign).to_json() == dj.cost(layers, own).to_json()
    assert dj.draw(layers, foreign).text == dj.draw(layers, own).text
