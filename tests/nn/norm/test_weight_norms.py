"""Weight and spectral normalisation of split weights, beside PyTorch's definitions on whole ones."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block_of
from matrix.layer_cases import one_step
from matrix.partitions import On, on
from sequential import Beside, check_beside

import distdl_jax as dj
from distdl_jax import nn


def drawn(shape: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(repr(shape).encode())).standard_normal(shape)


@dataclass(frozen=True)
class TwoSteps:
    """A layer with a state in training, and then in evaluation, from drawn vectors; the sum of both."""

    layer: Any

    def param_specs(self) -> Any:
        return self.layer.param_specs()

    def __call__(self, params: Any, x: Any) -> Any:
        specs = self.layer.state_specs()
        state = {name: jnp.asarray(block_of(drawn(spec.global_shape), spec)) for name, spec in specs.items()}
        y, state = self.layer(params, x, state=state, training=True)
        again, unchanged = self.layer(params, x, state=state, training=False)
        assert all(unchanged[name] is state[name] or state[name].shape == unchanged[name].shape for name in state)
        return y + again


def scaled(params: Any, name: str, rows: tuple[int, ...]) -> Any:
    g, v = params[f"{name}_g"], params[f"{name}_v"]
    rest = tuple(d for d in range(v.ndim) if d not in rows)
    norms = jnp.sqrt((v**2).sum(rest, keepdims=True))
    return {**params, name: v * (g.reshape(norms.shape) / norms)}


def normalised(params: Any, name: str, rows: tuple[int, ...], iterations: int) -> Any:
    w = params[name]
    rest = tuple(d for d in range(w.ndim) if d not in rows)
    order = (*rows, *rest)
    shape_u, shape_v = (tuple(w.shape[d] for d in dims) for dims in (rows, rest))
    matrix = w.transpose(order).reshape(int(np.prod(shape_u)), -1)
    u, v, fixed = drawn(shape_u).reshape(-1), drawn(shape_v).reshape(-1), jax.lax.stop_gradient(matrix)
    for _ in range(iterations):
        v = fixed.T @ u
        v = v / jnp.linalg.norm(v)
        u = fixed @ v
        u = u / jnp.linalg.norm(u)
    return {**params, name: w / (u @ matrix @ v)}


def weight_norm(
    sizes: Sequence[int], layer: Callable[[Any], Any], whole: Any, P_x: On, P_y: On | None = None,
    name: str = "weight", rows: tuple[int, ...] = (0,), spectral: int = 0,
) -> Beside:  # fmt: skip
    """Spectral normalisation of so many iterations, or weight normalisation."""

    def wrapped(P: dj.Partition) -> Any:
        if spectral:
            return TwoSteps(nn.SpectralNorm(layer(P), name, spectral, dim=rows))
        return nn.WeightNorm(layer(P), name, rows or None)

    def of_whole(p: Any, x: Any) -> Any:
        return 2 * whole(normalised(p, name, rows, spectral), x) if spectral else whole(scaled(p, name, rows), x)

    return Beside(f"norm {spectral} {sizes} {P_x} {name} {rows}", sizes, wrapped, of_whole, P_x, P_y)


spectral_norm = partial(weight_norm, spectral=1)


def linear(P_x: On, P_y: On, P_W: On, *sizes: int, **options: Any) -> Callable[[Any], Any]:
    return lambda P: nn.DistributedLinear(*(each.partition(P) for each in (P_x, P_y, P_W)), *sizes, **options)


def transposed(P: dj.Partition) -> Any:
    grids = (each.partition(P) for each in (on(1, 2, 1), on(1, 2, 1, ranks=(3, 2)), on(2, 2, 1)))
    return nn.DistributedConvTranspose1d(*grids, in_channels=2, out_channels=3, kernel_size=3, padding=1, bias=False)


def of_transposed(p: Any, x: Any) -> Any:
    turned = p["weight"][:, :, ::-1].swapaxes(0, 1)
    return jax.lax.conv_general_dilated(x, turned, (1,), [(1, 1)])


def gru_cell(P: dj.Partition) -> Any:
    return nn.DistributedGRUCell(P_4.partition(P), 3, 3, bias=False)


def affine(p: Any, x: Any) -> Any:
    return x @ p["weight"].T + p["bias"]


def layer_norm(p: Any, x: Any) -> Any:
    y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return y * p["weight"] + p["bias"]


P_4, P_2, P_3 = on(2, 2, ranks=(3, 1, 0, 2)), on(1, 2, ranks=(2, 3)), on(1, 3, ranks=(2, 0, 3))
CASES = (
    weight_norm((2, 5), linear(P_3, on(1, 1), P_3, 5, 3), affine, P_3, on(1, 1)),
    weight_norm((2, 5), linear(on(1, 2), P_2, P_4, 5, 1), affine, on(1, 2), P_2, rows=()),
    weight_norm((3, 5), lambda P: nn.DistributedLayerNorm(P_4.partition(P), 5), layer_norm, P_4),
    weight_norm((3, 3), gru_cell, one_step, P_4, name="weight_ih", rows=(0, 1)),
    spectral_norm((2, 5), linear(on(1, 2), P_2, P_4, 5, 3), affine, on(1, 2), P_2, spectral=2),
    spectral_norm((1, 2, 6), transposed, of_transposed, on(1, 2, 1), on(1, 2, 1, ranks=(3, 2)), rows=(1,)),
    spectral_norm((3, 3), gru_cell, one_step, P_4, name="weight_ih", rows=(0, 1)),
    spectral_norm((4, 4), linear(on(4, 1), on(4, 1), on(4, 1, 1), 4, 3, sharded=True), affine, on(4, 1), on(4, 1)),
)


@pytest.mark.simulated(4)
def test_as_pytorch_defines_them() -> None:
    """Outputs, states and gradients: rows and columns split, of copies, on any teams; in training and in evaluation."""
    check_beside(CASES)


@pytest.mark.simulated(4)
def test_initial_values() -> None:
    """The weight is the layer's, vectors have length 1, and the state goes through a network, and through Remat."""
    P = dj.Partition()
    layer = linear(on(1, 2), P_2, P_4, 5, 3)(P)
    key, wrapped = jax.random.key(0), nn.WeightNorm(layer)
    params, plain = wrapped.init(key, float), layer.init(key, float)
    own = wrapped._scaled(params["weight_g"], params["weight_v"])
    np.testing.assert_allclose(own, plain["weight"], rtol=1e-14)
    norms = dj.gather(params, wrapped.param_specs())["weight_g"]
    whole = dj.gather(plain, layer.param_specs())["weight"]
    if P.rank == 0:
        np.testing.assert_allclose(norms, np.linalg.norm(whole, axis=1), rtol=1e-14)
    network = nn.Sequential(nn.Remat(nn.SpectralNorm(layer)), jax.nn.relu)
    state = network.init_state(float)
    vectors = dj.gather(state, network.state_specs())[0]
    x = jnp.ones((2, 3 - P.rank % 2)) if P.rank < 2 else jnp.ones((2, 0))

    def iterated(params: Any, x: Any, state: Any) -> Any:
        return jax.lax.scan(lambda state, _: (network(params, x, state=state)[1], None), state, length=30)[0]

    state = dj.jit(iterated)((plain, {}), x, state)
    found = dj.gather(state, network.state_specs())[0]
    if P.rank == 0:
        assert all(abs(np.linalg.norm(vectors[name]) - 1) < 1e-12 for name in ("weight_u", "weight_v"))
        largest = np.linalg.svd(whole)[1][0]
        np.testing.assert_allclose(found["weight_u"] @ whole @ found["weight_v"], largest, rtol=1e-5)


@pytest.mark.simulated(2)
def test_one_around_the_other() -> None:
    """Two weights of one layer, each with vectors of its own; a layer with a state keeps it; plans are the layer's."""
    P = dj.Partition()
    cell = nn.DistributedGRUCell(P.grid([1, 2]), 4, 2)
    both = nn.SpectralNorm(nn.SpectralNorm(cell, "weight_ih", dim=(0, 1)), "weight_hh", dim=(0, 1))
    params, state, x = both.init(jax.random.key(0)), both.init_state(), jnp.ones((3, 2))
    assert {*state} == {*both.state_specs()} == {"weight_ih_u", "weight_ih_v", "weight_hh_u", "weight_hh_v"}
    carry = both.init_carry(dj.TensorSpec((3, 4), cell.P_x))
    y, after, new = jax.eval_shape(lambda *given: both(*given, state=state, carry=carry), params, x)
    assert y.shape == after.shape == (3, 1) and {*new} == {*state}
    norm = nn.WeightNorm(nn.DistributedBatchNorm(P.grid([1, 2]), 4))
    params = norm.init(jax.random.key(0))
    y, new = jax.eval_shape(lambda *given: norm(*given, state=norm.init_state(), training=True), params, x)
    names = {"running_mean", "running_var", "num_batches_tracked"}
    assert y.shape == x.shape and {*new} == {*norm.state_specs()} == names
    blocks = {worker: dj.ShapeDtype((3, 2), np.dtype("float32")) for worker in range(2)}
    shapes = jax.tree.map(lambda a: dj.ShapeDtype(a.shape, a.dtype), params)
    of_params = dict(enumerate(P.allgather_data(shapes)))
    assert norm.plan(blocks, of_params).outputs == norm.plan(blocks).outputs == blocks


def test_refusals() -> None:
    P = dj.planning_world(4)
    layer = linear(on(1, 2), P_2, P_4, 5, 3)(P)
    for sentence, norm, options in (
        (r"`name` \(='w'\) must be one of the layer's parameters, 'bias', 'weight'", nn.WeightNorm, {"name": "w"}),
        (r"`name` \(='weight'\) must be one of the layer's parameters, none", nn.SpectralNorm,
         {"layer": nn.Sequential(layer)}),
        (r"`dim` \(=2\) must name dimensions of 'weight', 0 to 1, each", nn.WeightNorm, {"dim": 2}),
        (r"`dim` \(=\(0, -2\)\) must name dimensions of", nn.WeightNorm, {"dim": (0, -2)}),
        (r"`dim` \(=\(\)\) must name a dimension", nn.SpectralNorm, {"dim": ()}),
        (r"`eps` \(=0\) must be a number above 0", nn.SpectralNorm, {"eps": 0}),
        (r"`n_power_iterations` \(=0\) must be 1 or more", nn.SpectralNorm, {"n_power_iterations": 0}),
    ):  # fmt: skip
        with pytest.raises(dj.InvalidArgumentError, match=sentence):
            norm(**{"layer": layer} | options)
    with pytest.raises(dj.InvalidTypeError, match=r"`layer` .* must be a layer"):
        nn.SpectralNorm(jax.nn.relu)
    with pytest.raises(dj.InvalidTypeError, match="`state` must hold 'weight_u'"):
        nn.SpectralNorm(layer)(layer.init(jax.random.key(0)), jnp.ones((2, 3)), state={})


def test_what_pytorch_has_is_read() -> None:
    """By its older names, and by those of a parametrization; of gates, too."""
    P = dj.planning_world(4, 2)
    layer = linear(on(1, 2), P_2, P_4, 5, 3)(P)
    weight, bias, g, u, v = (drawn(shape) for shape in ((3, 5), (3,), (3, 1), (3,), (5,)))
    specs = layer.param_specs()
    older = {"bias": bias, "weight_g": g, "weight_v": weight}
    newer = {"bias": bias, "parametrizations.weight.original0": g, "parametrizations.weight.original1": weight}
    for state_dict in (older, newer):
        params = dj.from_torch({f"a.{name}": x for name, x in state_dict.items()}, nn.WeightNorm(layer))
        np.testing.assert_array_equal(params["weight_v"], block_of(weight, specs["weight"]))
        assert params["weight_g"].shape == params["weight_v"].shape[:1]
    older = {"bias": bias, "weight_orig": weight, "weight_u": u, "weight_v": v}
    own = "parametrizations.weight."
    newer = {"bias": bias, f"{own}original": weight, f"{own}0._u": u, f"{own}0._v": v}
    for state_dict in (older, newer):
        normal = nn.SpectralNorm(layer)
        params, state = dj.from_torch(state_dict, nn.Sequential(jax.nn.relu, normal), state=True)
        np.testing.assert_array_equal(params[1]["weight"], block_of(weight, specs["weight"]))
        np.testing.assert_array_equal(state[1]["weight_v"], block_of(v, normal.state_specs()["weight_v"]))
    cell = nn.WeightNorm(nn.DistributedGRUCell(P_2.partition(P), 3, 3, bias=False), "weight_hh", (0, 1))
    rows = {"weight_ih": drawn((9, 3)), "weight_hh_g": drawn((9, 1)), "weight_hh_v": drawn((9, 3))}
    params = dj.from_torch(rows, cell)
    np.testing.assert_array_equal(params["weight_hh_g"], drawn((9, 1)).reshape(3, 3)[:, :2])
    with pytest.raises(dj.InvalidArgumentError, match=r"`state_dict\['weight_v'\]` must be 3 x 5, .* but is 5 x 3"):
        dj.from_torch({"bias": bias, "weight_g": g, "weight_v": weight.T}, nn.WeightNorm(layer))
