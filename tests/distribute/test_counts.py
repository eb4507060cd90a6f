"""How much unmodified networks' training steps send: recorded numbers, which may fall; beside hand-built layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import TensorSpec, nn

WORKERS = 4
OPTIMIZER = optax.adam(1e-3)


@dataclass(frozen=True)
class Case:
    """A network in plain JAX, of NHWC data, and where there is one its hand-built twin on blocks, of NCHW data.

    - `loss`: of parameters and x. `params`: their types. `shape`, `grid`: of x.
    - `by_hand`: the network of layers on a partition, and the shape and the grid of its input.
    - `most`: recorded for the worker that sends most: messages, team operations, bytes of both.
    """

    loss: Callable[..., Any]
    params: Any
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    most: tuple[int, int, int]
    by_hand: Callable[[dj.Partition], Any] | None = None

    @property
    def gradient(self) -> Callable[..., Any]:
        return jax.value_and_grad(self.loss)


def shapes(tree: Any) -> Any:
    """Return the types of parameters of these shapes."""
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), tree, is_leaf=_is_shape)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and all(isinstance(n, int) for n in leaf)


# --- networks in plain JAX --------------------------------------------------------------------------------------------

NHWC = ("NHWC", "HWIO", "NHWC")


def conv(w: Any, x: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=NHWC)


def norm(x: Any, axes: tuple[int, ...]) -> Any:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, axes, keepdims=True) + 1e-5)


def u_net(params: Any, x: Any, normed: bool = False) -> Any:
    """A U-Net of three levels, with a convolution each, and a norm if `normed`."""
    down, bottom, up, last = params["down"], params["bottom"], params["up"], params["last"]

    def block(w: Any, x: Any) -> Any:
        y = conv(w, x)
        return jax.nn.relu(norm(y, (1, 2, 3)) if normed else y)

    levels = []
    for w in down:
        levels.append(block(w, x))
        x = lax.reduce_window(levels[-1], -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = block(bottom, x)
    for level, (transposed, w) in zip(reversed(levels), up, strict=True):
        x = lax.conv_transpose(x, transposed, (2, 2), "SAME", dimension_numbers=NHWC)
        x = block(w, jnp.concatenate([x, level], -1))
    return jnp.mean(conv(last, x) ** 2)


U_NET = shapes(
    {
        "down": [(3, 3, 1, 8), (3, 3, 8, 16)],
        "bottom": (3, 3, 16, 32),
        "up": [((2, 2, 32, 16), (3, 3, 32, 16)), ((2, 2, 16, 8), (3, 3, 16, 8))],
        "last": (1, 1, 8, 1),
    }
)


def u_net_by_hand(P: dj.Partition) -> Any:
    def block(a: int, b: int, k: int = 3) -> list[Any]:
        options = {"kernel_size": k, "padding": k // 2, "bias": False}
        return [nn.DistributedConv2d(P, in_channels=a, out_channels=b, **options), jax.nn.relu]

    def level(a: int, channels: tuple[int, ...]) -> list[Any]:
        c, *deeper = channels
        if not deeper:
            return block(a, c)
        sizes = {"in_channels": deeper[0], "out_channels": c, "kernel_size": 2, "stride": 2, "bias": False}
        inside = [nn.DistributedMaxPool2d(P, 2), *level(c, tuple(deeper)), nn.DistributedConvTranspose2d(P, **sizes)]
        return [*block(a, c), nn.Skip(nn.Sequential(*inside)), *block(2 * c, c)]

    return nn.Sequential(*level(1, (8, 16, 32)), *block(8, 1, 1)[:1])


def res_net(params: Any, x: Any) -> Any:
    """Two residual blocks with batch norms, the second one of half the size, a mean, and a product."""
    x = jax.nn.relu(norm(conv(params["first"], x), (0, 1, 2)))
    for n, (a, b, shortcut) in enumerate(params["blocks"]):
        y = jax.nn.relu(norm(conv(a, x, 1 + n), (0, 1, 2)))
        y = norm(conv(b, y), (0, 1, 2))
        x = jax.nn.relu(y + (norm(conv(shortcut, x, 2), (0, 1, 2)) if n else x))
    return jnp.mean((x.mean((1, 2)) @ params["last"]) ** 2)


RES_NET = shapes(
    {
        "first": (3, 3, 1, 8),
        "blocks": [
            ((3, 3, 8, 8), (3, 3, 8, 8), (0,)),
            ((3, 3, 8, 16), (3, 3, 16, 16), (1, 1, 8, 16)),
        ],
        "last": (16, 10),
    }
)


def res_net_by_hand(P: dj.Partition) -> Any:
    def both(a: int, b: int, k: int, stride: int = 1) -> list[Any]:
        sizes = {"in_channels": a, "out_channels": b, "kernel_size": k, "stride": stride, "padding": k // 2}
        return [nn.DistributedConv2d(P, **sizes, bias=False), nn.DistributedBatchNorm(P, b, affine=False)]

    def body(a: int, b: int, stride: int) -> Any:
        return nn.Sequential(*both(a, b, 3, stride), jax.nn.relu, *both(b, b, 3))

    P_features, P_one = P.grid([1, P.size]), P.grid([1, 1])
    return nn.Sequential(
        *(*both(1, 8, 3), jax.nn.relu),
        *(nn.Residual(body(8, 8, 1)), jax.nn.relu),
        *(nn.Residual(body(8, 16, 2), nn.Sequential(*both(8, 16, 1, 2))), jax.nn.relu),
        *(nn.DistributedGlobalAvgPool(P), nn.Flatten(P, P_features)),
        nn.DistributedLinear(P_features, P_one, P_features, 16, 10, bias=False),
    )


def vision_transformer(params: Any, x: Any) -> Any:
    """Patches of 4 x 4, two blocks of attention with four heads, a mean, and a product."""
    x = lax.conv_general_dilated(x, params["patches"], (4, 4), "VALID", dimension_numbers=NHWC)
    x = x.reshape(len(x), -1, x.shape[-1]) + params["places"]
    for its in params["blocks"]:
        q, k, v = jnp.einsum("bsc,nhcd->nbhsd", norm(x, (2,)), its["qkv"])
        weights = jax.nn.softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]).astype(np.float32))
        x = x + jnp.einsum("bhsd,hdc->bsc", weights @ v, its["out"])
        x = x + jax.nn.gelu(norm(x, (2,)) @ its["up"]) @ its["down"]
    return jnp.mean((x.mean(1) @ params["last"]) ** 2)


VIT = shapes(
    {
        "patches": (4, 4, 3, 32),
        "places": (64, 32),
        "blocks": [{"qkv": (3, 4, 32, 8), "out": (4, 8, 32), "up": (32, 128), "down": (128, 32)}] * 2,
        "last": (32, 10),
    }
)


def fourier_operator(params: Any, x: Any) -> Any:
    """Two blocks that multiply 6 x 6 low frequencies, in N C H W."""
    x = jnp.einsum("bihw,oi->bohw", x, params["lift"])
    for its in params["blocks"]:
        spectrum = jnp.fft.rfft2(x)
        low = jnp.concatenate([spectrum[:, :, :6, :6], spectrum[:, :, -6:, :6]], 2)
        product = jnp.einsum("bihw,iohw->bohw", low, lax.complex(its["real"], its["imag"]))
        padded = jnp.concatenate([product[:, :, :6], jnp.zeros_like(spectrum[:, :, 12:, :6]), product[:, :, 6:]], 2)
        padded = jnp.pad(padded, [(0, 0)] * 3 + [(0, spectrum.shape[3] - 6)])
        x = jax.nn.gelu(jnp.fft.irfft2(padded, x.shape[2:]) + jnp.einsum("bihw,oi->bohw", x, its["point"]))
    return jnp.mean(jnp.einsum("bihw,oi->bohw", x, params["last"]) ** 2)


FNO = shapes(
    {
        "lift": (8, 3),
        "blocks": [{"real": (8, 8, 12, 6), "imag": (8, 8, 12, 6), "point": (8, 8)}] * 2,
        "last": (1, 8),
    }
)


def fourier_operator_by_hand(P: dj.Partition) -> Any:
    point = partial(nn.DistributedConv2d, P, kernel_size=1, bias=False)
    blocks = [nn.DistributedFNOBlock(P, 8, 8, 6, jax.nn.gelu)] * 2
    return nn.Sequential(point(in_channels=3, out_channels=8), *blocks, point(in_channels=8, out_channels=1))


def gated_recurrent(params: Any, x: Any) -> Any:
    """A GRU over time, x of samples x times x features, and a product with its last state."""

    def cell(h: Any, x: Any) -> tuple[Any, Any]:
        r, z = jnp.split(jax.nn.sigmoid(x @ params["gates_x"] + h @ params["gates_h"]), 2, -1)
        new = jnp.tanh(x @ params["new_x"] + r * (h @ params["new_h"]))
        return (1 - z) * new + z * h, None

    start = jnp.zeros((len(x), params["new_h"].shape[0]), x.dtype)
    return jnp.mean((lax.scan(cell, start, x.swapaxes(0, 1))[0] @ params["last"]) ** 2)


GRU = shapes({"gates_x": (6, 32), "gates_h": (16, 32), "new_x": (6, 16), "new_h": (16, 16), "last": (16, 3)})


def accumulated(params: Any, x: Any) -> tuple[Any, Any]:
    """The gradients of four microbatches, x of 4 x samples x rows x columns x channels, added up in a loop."""

    def add(total: Any, x: Any) -> tuple[Any, Any]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(u_net)(params, x)), None

    nothing = jnp.zeros(()), jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)
    return lax.scan(add, nothing, x)[0]


# --- counts -----------------------------------------------------------------------------------------------------------

SPACE, OF_SPACE = (1, 2, 2, 1), (1, 1, 2, 2)
CASES = {
    "U-Net": Case(u_net, U_NET, (2, 32, 32, 1), SPACE, (18, 1, 76_492), u_net_by_hand),
    "ResNet": Case(res_net, RES_NET, (4, 32, 32, 1), SPACE, (16, 26, 51_280), res_net_by_hand),
    "ViT": Case(vision_transformer, VIT, (2, 32, 32, 3), (1, 4, 1, 1), (27, 2, 209_232)),
    "FNO": Case(fourier_operator, FNO, (4, 3, 32, 32), OF_SPACE, (31, 6, 492_164), fourier_operator_by_hand),
    "U-Net with norms": Case(partial(u_net, normed=True), U_NET, (2, 32, 32, 1), SPACE, (18, 21, 76_652)),
    "GRU over split time": Case(gated_recurrent, GRU, (8, 24, 6), (1, 4, 1), (3, 1, 5_284)),
}


def counted(step: Callable[..., Any], params: Any, shape: tuple[int, ...], grid: tuple[int, ...]) -> list[int]:
    """Return what the worker sends that sends most, in a step with Adam."""
    spec = TensorSpec(shape, dj.planning_world(WORKERS).grid(grid))

    def train(params: Any, state: Any, x: Any) -> Any:
        value, gradient = step(params, x)
        updates, state = OPTIMIZER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(OPTIMIZER.init, params)
    return most(dj.cost(dj.distribute(train, (None, None, spec)), params, state, spec).workers)


def most(sent: Any) -> list[int]:
    teams = sent.collectives_forward + sent.collectives_backward
    team_bytes = sent.team_bytes_forward + sent.team_bytes_backward
    return [int(n.max()) for n in (sent.messages, teams, sent.bytes_forward + sent.bytes_backward + team_bytes)]


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_no_more_than_recorded(name: str) -> None:
    case = CASES[name]
    with jax.enable_x64(False):
        found = counted(case.gradient, case.params, case.shape, case.grid)
    assert all(a <= b for a, b in zip(found, case.most, strict=True)), (name, found)


def test_accumulated_microbatches_send_no_more_than_recorded() -> None:
    with jax.enable_x64(False):
        found = counted(accumulated, U_NET, (4, 2, 32, 32, 1), (1, *SPACE))
    assert all(a <= b for a, b in zip(found, (72, 1, 136_036), strict=True)), found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.by_hand])
def test_a_step_sends_no_more_than_hand_built_layers(name: str) -> None:
    """Messages and team operations together: in small teams layers sum by messages. They are counted without a loss."""
    case = CASES[name]
    assert case.by_hand is not None
    P = dj.planning_world(WORKERS).grid(OF_SPACE)
    n, *rest = case.shape
    spec = TensorSpec((n, *rest) if case.grid == OF_SPACE else (n, rest[-1], *rest[:-1]), P)
    messages, teams, _ = most(dj.cost(case.by_hand(P), spec).workers)
    assert sum(case.most[:2]) <= messages + teams, (messages, teams)


UNEVEN = {"ResNet": (2, 33, 31, 1), "ViT": (2, 32, 32, 3), "GRU": (8, 25, 6)}


@pytest.mark.parametrize("name", UNEVEN)
def test_gradients_on_uneven_blocks(name: str) -> None:
    """Of strided convolutions, norms, patches that lie across blocks, and a loop over split time."""
    case = next(case for key, case in CASES.items() if key.startswith(name))
    draw = np.random.default_rng(0)
    x = draw.normal(size=UNEVEN[name])
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: draw.normal(size=p.shape) / np.sqrt(p.size), case.params)
        expected = jax.jit(case.gradient)(params, x)

        def program() -> None:
            spec = TensorSpec(x.shape, dj.Partition().grid([1, 3, *([1] * (x.ndim - 2))]))
            found = jax.jit(dj.distribute(case.gradient, (None, spec)))(params, spec.block(x))
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)

        dj.simulate(3, program)


def test_parameters_that_are_cut_are_scattered_once() -> None:
    """As in ZeRO: gathered where they are read, and summed onto their blocks, which then aren't moved again."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(301, 48))
    with jax.enable_x64(True):
        params = {"up": draw.normal(size=(48, 96)), "down": draw.normal(size=(96, 48)), "shift": draw.normal(size=48)}
        optimizer = optax.adam(1e-2, eps=1e-3)

        def train(params: Any, state: Any, x: Any) -> Any:
            def loss(params: Any) -> Any:
                return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] + params["shift"] - x) ** 2)

            value, gradient = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        expected = params, optimizer.init(params)
        for _ in range(3):
            *expected, value = jax.jit(train)(*expected, x)

        def program() -> Any:
            P = dj.Partition()
            spec = TensorSpec(x.shape, P.grid([3, 1]))
            specs = {
                "up": TensorSpec((48, 96), P.grid([3, 1])),
                "down": TensorSpec((96, 48), P.grid([1, 3])),
                "shift": TensorSpec((48,), P.grid([3])),
            }
            of_state = (optax.ScaleByAdamState(None, specs, specs), None)
            f = dj.distribute(train, (specs, of_state, spec), (specs, of_state, None))
            found = {name: specs[name].block(p) for name, p in params.items()}
            state = optimizer.init(found)
            plan = f.plan(found, state, spec.block(x))
            for _ in range(3):
                found, state, loss = jax.jit(f)(found, state, spec.block(x))
            np.testing.assert_allclose(loss, value, rtol=1e-10)
            for name, p in expected[0].items():
                np.testing.assert_allclose(found[name], specs[name].block(p), rtol=1e-9, atol=1e-12)
            return [moved.what for moved in plan.moved if moved.operations]

        found = dj.simulate(3, program)[0]
    assert sorted(found) == ["gather", "gather", "gather", "scattered sum", "scattered sum", "sum"]
