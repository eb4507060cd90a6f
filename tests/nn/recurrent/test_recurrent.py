"""Recurrent cells in loops, and layers over sequences, beside plain JAX on whole tensors."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block_of
from matrix.partitions import On, on
from sequential import Beside, Sizes, check_beside

import distdl_jax as dj
from distdl_jax import nn


def drawn(shape: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(repr(shape).encode())).standard_normal(shape)


@dataclass(frozen=True)
class Continued:
    """A layer that goes on from a drawn carry. What it carries in the end is added to each step of its output.

    - `shape`: of the whole x, samples x steps x ...
    - `is_cell`: whether the layer is called step by step, in a loop.
    """

    layer: Any
    shape: tuple[int, ...]
    is_cell: bool

    def param_specs(self) -> Any:
        return self.layer.param_specs()

    def __call__(self, params: Any, x: Any) -> Any:
        P, at = self.layer.P_x, len(self.shape) - self.layer.P_x.dim
        specs = self.layer.carry_specs(dj.TensorSpec((*self.shape[:1], *self.shape[1 + at :]), P))
        carry = jax.tree.map(lambda spec: jnp.asarray(block_of(drawn(spec.global_shape), spec)), specs)

        def step(carry: Any, x: Any) -> Any:
            y, carry = self.layer(params, x, carry=carry)
            return carry, y

        if not self.is_cell:
            y, carry = self.layer(params, x, carry=carry)
        else:
            xs = jnp.moveaxis(x, 1, 0) if P.active else jnp.zeros((self.shape[1], *x.shape))
            carry, ys = jax.lax.scan(step, carry, xs)
            y = jnp.moveaxis(ys, 0, 1)
        if not P.active:
            return x
        parts = jax.tree.leaves(carry)
        return y + sum(jnp.expand_dims(part, 1) if self.is_cell else part.sum(0)[..., None, :] for part in parts)


def gru(params: Any, x: Any, parts: Any) -> Any:
    """PyTorch's equations, with its weights of 3 n_h rows."""
    (h,) = parts
    of_x, of_h = of_both(params, x, h)
    n = h.shape[-1]
    r, z = (jax.nn.sigmoid(of_x[..., at : at + n] + of_h[..., at : at + n]) for at in (0, n))
    new = jnp.tanh(of_x[..., 2 * n :] + r * of_h[..., 2 * n :])
    return (new + z * (h - new),)


def lstm(params: Any, x: Any, parts: Any) -> Any:
    h, c = parts
    return of_gates(sum(of_both(params, x, h)), c)


def of_gates(gates: Any, c: Any, axis: int = -1) -> Any:
    i, f, g, o = jnp.split(gates, 4, axis)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def of_both(params: Any, x: Any, h: Any) -> Any:
    found = []
    for kind, a in (("ih", x), ("hh", h)):
        weight = params[f"weight_{kind}"]
        y = a @ weight.reshape(-1, weight.shape[-1]).T
        found.append(y + params[f"bias_{kind}"].reshape(-1) if f"bias_{kind}" in params else y)
    return found


def conv_lstm(mode: str) -> Any:
    def step(params: Any, x: Any, parts: Any) -> Any:
        h, c = parts
        both, sides = jnp.concatenate([x, h], 1), [(0, 0), (0, 0)] + [(1, 1)] * (x.ndim - 2)
        wide = jnp.pad(both, sides, mode={"zeros": "constant", "circular": "wrap"}[mode])
        gates = jax.lax.conv_general_dilated(wide, params["weight"], (1,) * (x.ndim - 2), "VALID")
        return of_gates(gates + params["bias"].reshape(-1, *(1,) * (x.ndim - 2)), c, 1)

    return step


def recurrent(kind: str, P_x: On, sizes: Sequence[Sizes], *, step: Any, layers: int = 0, **options: Any) -> Beside:
    """A cell (without `layers`) or a layer of x of samples x steps x ..., where P_x has one worker along the steps."""
    shape = tuple(n if isinstance(n, int) else sum(n) for n in sizes)
    over = options | {"num_layers": layers} if layers else options

    def layer(P: dj.Partition) -> Any:
        grid = On(P_x.shape if layers else (*P_x.shape[:1], *P_x.shape[2:]), P_x.ranks).partition(P)
        return Continued(getattr(nn, f"Distributed{kind}")(grid, **over), shape, not layers)

    def whole(params: Any, x: Any) -> Any:
        hidden = options.get("hidden_size") or options["hidden_channels"]
        of_carry = (shape[0], hidden, *shape[3:]) if "hidden_channels" in options else (*shape[:-2], hidden)
        of_cells = [{k.removesuffix(f"_l{n}"): p for k, p in params.items() if k.endswith(f"_l{n}")}
                    for n in range(layers)] or [params]  # fmt: skip
        first = drawn((layers, *of_carry)) if layers else drawn(of_carry)[None]
        total, at = 0, x.ndim - 2 if layers else 1
        for its, h in zip(of_cells, first, strict=True):
            parts, ys = (h,) * (1 if step is gru else 2), []
            for t in range(x.shape[at]):
                parts = step(its, x.take(t, at), parts)
                ys.append(parts[0])
            x, total = jnp.stack(ys, at), total + sum(parts)
        return x + jnp.expand_dims(total, at)

    return Beside(f"{kind} {sizes} {P_x} {over}", sizes, layer, whole, P_x)


CONV_LSTM = {"in_channels": 2, "hidden_channels": 1, "kernel_size": 3}
CIRCULAR = {"padding_mode": "circular", "sharded": True, **CONV_LSTM}
CASES = (
    recurrent("GRUCell", on(2, 1, 2, ranks=(3, 1, 2, 0)), (3, 3, 5), step=gru, input_size=5, hidden_size=3),
    recurrent("LSTMCell", on(1, 1, 3, ranks=(2, 0, 3)), (2, 2, 4), step=lstm, input_size=4, hidden_size=2),
    recurrent("GRU", on(2, 1, 2), (3, 2, 1), step=gru, layers=2, input_size=1, hidden_size=3, bias=False),
    recurrent("LSTM", on(1, 3, ranks=(3, 1, 0)), (2, 4), step=lstm, layers=1, input_size=4, hidden_size=5),
    recurrent("ConvLSTMCell1d", on(2, 1, 1, 2, ranks=(2, 1, 3, 0)), (3, 2, 2, 5), step=conv_lstm("zeros"), **CONV_LSTM),
    recurrent("ConvLSTMCell2d", on(1, 1, 1, 2, 2), (1, 2, 2, 3, 4), step=conv_lstm("circular"), **CIRCULAR),
)


@pytest.mark.simulated(4)
def test_as_plain_jax() -> None:
    """Outputs, carries, and gradients by x and parameters: batch and features uneven, empty, on any teams."""
    check_beside(CASES)


@pytest.mark.simulated(4)
def test_carries_keep_their_shapes_and_dtypes() -> None:
    """As the specs say; in half precision, too, beside parameters in float32; and the plan knows of the outputs."""
    P = dj.Partition()
    P_x, P_s, P_f = P.grid([2, 1], [3, 1]), P.grid([2, 1, 2]), P.grid([1, 1, 3])

    def all_shapes(tree: Any) -> Any:
        return jax.tree.map(lambda a: dj.ShapeDtype(a.shape, np.dtype(a.dtype)), tree)

    for layer, shape in (
        (nn.DistributedGRUCell(P_x, 3, 2), (5, 3)),
        (nn.DistributedLSTM(P_s, 3, 3, num_layers=2), (5, 2, 3)),
        (nn.DistributedConvLSTMCell1d(P_f, in_channels=2, hidden_channels=3, kernel_size=2), (2, 2, 4)),
    ):
        x_spec = dj.TensorSpec(shape, layer.P_x)
        params, carry = layer.init(jax.random.key(0)), layer.init_carry(x_spec, jnp.float16)
        x = jnp.ones(x_spec.local_shape, jnp.bfloat16)
        y, after = jax.eval_shape(lambda x, carry, f=layer, params=params: f(params, x, carry=carry), x, carry)
        assert all_shapes(after) == all_shapes(carry)
        specs = layer.carry_specs(x_spec)
        assert all(a.shape == spec.local_shape for a, spec in zip(*map(jax.tree.leaves, (carry, specs)), strict=True))
        told, of_params = (dict(enumerate(P.allgather_data(all_shapes(its)))) for its in (x, params))
        if layer.P_x.active:
            assert layer.plan(told, of_params).outputs[P.rank] == all_shapes(y)
            assert layer.output_spec(x_spec).local_shape == y.shape and y.dtype == jnp.float32


@pytest.mark.simulated(2)
def test_refusals_when_it_is_called() -> None:
    """In one sentence on both workers, where one of them is wrong."""
    P = dj.Partition()
    gru, lstm = (getattr(nn, f"Distributed{kind}Cell")(P.grid([1, 2]), 2, 4) for kind in ("GRU", "LSTM"))
    x, h = jnp.ones((3, 1)), jnp.ones((3, 2))
    for kind, sentence, cell, given, carry in (
        (dj.PlanError, r"On worker 1: `carry` must hold .* 3 x 2, .* but is float\d\d\[4, 2\]", gru, x,
         jnp.ones((3 + P.rank, 2))),
        (dj.PlanError, r"On worker 0: `carry\[1\]` must hold real floating-point .* but is int", lstm, x,
         (h, h.astype(int))),
        (dj.InvalidTypeError, r"(?s)`carry` .* must be the arrays \(h, c\), as returned by `init_carry`", lstm, x, h),
        (dj.PlanError, "`x` must have length 2 in dimension 1, balanced over 2 workers", gru, h, h),
    ):  # fmt: skip
        with pytest.raises(kind, match=sentence):
            cell(cell.init(jax.random.key(0)), given, carry=carry)
    with pytest.raises(dj.InvalidArgumentError, match=r"`x_spec` .* must be the spec of a tensor on P_x"):
        gru.init_carry(dj.TensorSpec((2, 2, 1), P.grid([2, 1, 1])))


def test_what_pytorch_has_is_read() -> None:
    """Its rows of gates, one gate after the other; and other names are refused."""
    P = dj.planning_world(2, 1).grid([1, 1, 2])
    layer = nn.DistributedLSTM(P, 3, 5, num_layers=2, bias=False)
    sizes = {"weight_ih_l0": 3, "weight_hh_l0": 5, "weight_ih_l1": 5, "weight_hh_l1": 5}
    state_dict = {f"rnn.{name}": drawn((20, n)) for name, n in sizes.items()}
    params = dj.from_torch(state_dict, layer)
    for name, n in sizes.items():
        np.testing.assert_array_equal(params[name], drawn((20, n)).reshape(4, 5, n)[:, 3:])
    with pytest.raises(dj.InvalidArgumentError, match="weight_ih_l0_reverse', which is not a parameter"):
        dj.from_torch(state_dict | {"rnn.weight_ih_l0_reverse": drawn((20, 3))}, layer)
