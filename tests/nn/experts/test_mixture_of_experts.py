"""Mixtures of experts beside plain JAX on one worker, however tokens and experts are split, and whoever is dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.layer_cases import mixture_of_experts
from matrix.partitions import On, on
from sequential import Beside, beside, check_beside, cut

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.nn.experts.routing import capacity_of


@dataclass(frozen=True)
class Gated:
    """A gated expert without biases, of fewer outputs than inputs."""

    inputs: int
    outputs: int

    def init(self, key: jax.Array, dtype: Any) -> dict[str, jax.Array]:
        normal = jax.nn.initializers.normal()
        return {name: normal(key, (self.outputs, self.inputs), dtype) for name in ("gate", "value")}

    def __call__(self, params: Any, tokens: Any) -> Any:
        return jax.nn.sigmoid(tokens @ params["gate"].T) * (tokens @ params["value"].T)


def mixture(
    sizes: Sequence[Any], P_x: On, experts: int, k: int, factor: float | None, P_W: On | None = None,
    group_axes: Sequence[int] | None = None, expert: Gated | None = None,
) -> Beside:  # fmt: skip
    axes = ((0,) if len(sizes) > 2 else ()) if group_axes is None else group_axes
    of = {"hidden_dim": 3, "activation": jnp.tanh} if expert is None else {"expert": expert}
    of |= {"top_k": k, "capacity_factor": factor, "group_axes": group_axes, "P_W": P_W}

    def whole(params: Any, x: Any) -> Any:
        return mixture_of_experts(params, x, k, factor, axes, k > 1, expert)[0]

    return beside("MixtureOfExperts", sizes, whole, P_x, sizes[-1], experts, y_sizes=sizes, **of)


@pytest.mark.simulated(4)
def test_output_and_gradients_are_those_on_one_worker() -> None:
    """Uneven, empty and unbalanced blocks; more experts than workers and fewer; disjoint teams; groups of all kinds."""
    check_beside(
        [
            mixture((3, 5, 4), on(2, 2, 1, ranks=(3, 1, 2, 0)), 5, 2, 0.6),
            mixture((2, [3, 0, 1, 2], 4), on(1, 4, 1), 3, 2, 1.0, group_axes=()),
            mixture((7, 4), on(2, 1), 6, 1, 0.7, on(2, ranks=(3, 2))),
            mixture((1, 5, 3, 4), on(1, 2, 2, 1), 3, 1, 1.0, on(3, ranks=(1, 0, 2)), (1,), Gated(4, 2)),
            mixture((2, 3, 4), on(4, 1, 1), 4, 3, None),
        ]
    )


@pytest.mark.world(2)
def test_losses_in_a_network() -> None:
    """The state of a block in `Sequential`, with recomputation; its gradient, and the order of who is dropped."""
    P_world = dj.Partition()
    P = P_world.grid([1, 2, 1])
    layer = nn.DistributedMixtureOfExperts(P, 4, 3, 3, activation=jnp.tanh, capacity_factor=0.5)
    network = nn.Sequential(nn.Remat(nn.Residual(layer)), jnp.tanh)
    x = np.random.default_rng(0).normal(size=(2, 5, 4))
    own, begin = cut(x, on(1, 2, 1), P_world.rank), network.init_state(float)
    params, specs = network.init(jax.random.key(0), float), network.param_specs()

    def with_losses(y: Any, losses: Any) -> Any:
        balance, z = (jnp.sum(losses[name]) for name in ("load_balancing_loss", "router_z_loss"))
        return jnp.sum(y**2) + 0.3 * balance + 0.2 * z, losses

    def loss(params: Any) -> Any:
        y, state = network(params, own, state=begin)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, begin)
        return with_losses(y, state[0]["body"])

    def plain(params: Any) -> Any:
        y, losses = mixture_of_experts(params[0]["body"], x, 2, 0.5)
        return with_losses(jnp.tanh(x + y), losses)

    (value, losses), gradient = dj.jit(dj.value_and_grad(loss, has_aux=True))(params)
    same = network(params, own, state=begin, training=False)[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, same, begin))
    whole, slopes = dj.gather(params, specs), dj.gather(gradient, specs)
    if P_world.rank == 0:
        (want, wanted), its = jax.jit(jax.value_and_grad(plain, has_aux=True))(whole)
        np.testing.assert_allclose(value, want, rtol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), losses, wanted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), slopes, its)
        assert wanted["tokens_per_expert"].sum() == 2 * x.shape[0] * x.shape[1]


@pytest.mark.simulated(2)
def test_half_precision_and_the_way_back_from_nothing() -> None:
    """Of bfloat16 tokens the router is in float32; without tokens everything is empty, and gradients are 0."""
    P = dj.Partition()
    layer = nn.DistributedMixtureOfExperts(P.grid([2, 1]), 4, 2, 3)
    params = layer.init(jax.random.key(0))
    network = nn.Precision(layer, "bfloat16")
    state = network.init_state()

    def loss(params: Any, x: Any) -> Any:
        y, after = network(params, x, state=state)
        return jnp.sum(y) + jnp.sum(after["router_z_loss"]), (y, after)

    derivative = dj.jit(dj.value_and_grad(loss, has_aux=True))
    (_, (y, after)), gradient = derivative(params, jnp.ones((3, 4), jnp.float32))
    assert y.dtype == gradient["router"].dtype == after["router_z_loss"].dtype == jnp.float32
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((y, after, gradient)))
    (value, (y, _)), gradient = derivative(params, jnp.ones((0, 4), jnp.float32))
    assert value == 0 and y.shape == (0, 4)
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.world(1)
def test_what_does_not_fit_is_named() -> None:
    P = dj.planning_world(4)
    layer = nn.DistributedMixtureOfExperts
    line = P.grid([2, 1])
    for options, sentence in (
        ({"P_x": P.grid([1, 2])}, r"`P_x` \(1 x 2\) must have 2 dimensions or more, and one worker along the last"),
        ({"P_W": P.grid([2, 2])}, r"`P_W` \(2 x 2\) must have one dimension"),
        ({"top_k": 4}, r"`top_k` \(=4\) must be at most `num_experts` \(=3\)"),
        ({"capacity_factor": 0}, r"`capacity_factor` \(=0\) must be a number above 0, or None"),
        ({"capacity_factor": float("nan")}, r"`capacity_factor` \(=nan\)"),
        ({"group_axes": (0, -1)}, r"`group_axes` \(=\(0, -1\)\) must be dimensions of tokens, 0 to 0"),
        ({"num_experts": 0}, r"`num_experts` \(=0\) must be 1 or more"),
        ({"expert": Gated(4, 4), "hidden_dim": 3}, r"`hidden_dim` \(=3\) belongs to the default expert"),
        ({"expert": jnp.tanh}, r"`expert` .* must have `init\(key, dtype\)`"),
        ({"activation": 3}, r"`activation` \(=3\) must be a function"),
    ):
        with pytest.raises(dj.DistDLError, match=sentence):
            layer(**{"P_x": line, "embed_dim": 4, "num_experts": 3, **options})
    made = layer(line, 4, 3)
    assert made == layer(line, 4, 3, group_axes=(), normalize=True) != layer(line, 4, 3, normalize=False)
    with pytest.raises(dj.PlanError, match=r"`x` must have length 4 in dimension 1"):
        made.plan({worker: dj.ShapeDtype((2, 3), np.dtype(np.float32)) for worker in range(4)})
    with pytest.raises(dj.InvalidTypeError, match=r"`state` .* must be a dictionary of \['load_balancing_loss'"):
        layer(dj.Partition().grid([1, 1]), 4, 3)({}, jnp.ones((2, 4)), state={})


def test_capacity_is_not_moved_by_rounding() -> None:
    assert [capacity_of(10, 1, 1, factor) for factor in (1.1, 1.0, 0.01)] == [10, 10, 1]
    assert capacity_of(100, 10, 1, 1.1) == 11 and capacity_of(0, 3, 1, 1.0) == 0
