"""Each line of docs/how-to/split-a-layer.md makes the layer of its row, which agrees with the sequential one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block_of
from jax import lax
from jobs import ROOT
from launcher.settings import long_run
from matrix.partitions import On, on
from sequential import Beside, check_beside, close, cut

import distdl_jax as dj
from distdl_jax import nn

PAGE = (ROOT / "docs" / "how-to" / "split-a-layer.md").read_text()
OPTIONS = {name: eval(text) for name, text in re.findall(r"`([FCA]) = ({.*?})`", PAGE)}
LENGTHS = (2, 4, 8, 8, 4)  # of x: samples, channels, rows, columns, and one more


class Row(NamedTuple):
    """A row of a table: the shapes of its partitions, None if it has none, and which of them are derived."""

    split: str
    shapes: dict[str, tuple[int, ...] | None]
    derived: set[str]
    workers: int
    line: str

    @property
    def kind(self) -> str:
        return self.line.split("(")[0].removeprefix("nn.Distributed")

    def on(self, name: str) -> On | None:
        return None if self.shapes[name] is None else on(*self.shapes[name])

    def layer(self, P: dj.Partition) -> Any:
        """Make the layer of partitions that are not in brackets."""
        shapes = {name: self.shapes[name] for name in self.shapes if name not in self.derived}
        grids = {name: shape and P.grid(shape) for name, shape in shapes.items()}
        return eval(self.line, {"nn": nn, **OPTIONS, **grids})


def rows() -> Iterator[Row]:
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 2 and cells[1].startswith("`nn."):
            given = dict(zip(("P_x", "P_y", "P_W"), [*cells[2:], "-", "-"], strict=False))
            shapes = {name: tuple(map(int, re.findall(r"\d+", cell))) or None for name, cell in given.items()}
            derived = {name for name, cell in given.items() if cell.startswith("(")}
            workers = math.prod(shapes["P_W"] or shapes["P_x"] or ())
            yield Row(cells[0], shapes, derived, workers, cells[1].strip("`"))


ROWS = list(rows())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}, {row.split}")
def test_the_partitions_are_those_of_the_row(row: Row) -> None:
    P = dj.planning_world(row.workers)
    layer = row.layer(P)
    for name, shape in row.shapes.items():
        if shape is not None:
            assert getattr(layer, name).shape == shape
    used = {rank for name in row.shapes for rank in getattr(getattr(layer, name, None), "ranks", ())}
    assert used == set(range(row.workers))


def conv(params: Any, x: Any, groups: int = 1) -> Any:
    y = lax.conv_general_dilated(x, params["weight"], (1,) * (x.ndim - 2), [(1, 1)] * (x.ndim - 2),
                                 feature_group_count=groups)  # fmt: skip
    return y + params["bias"].reshape(-1, *(1,) * (x.ndim - 2))


def transposed(params: Any, x: Any) -> Any:
    """Of stride 1: the convolution with the kernel turned round."""
    weight = jnp.flip(params["weight"], (2, 3)).swapaxes(0, 1)
    return conv({"weight": weight, "bias": params["bias"]}, x)


def normalised(x: Any, axes: tuple[int, ...]) -> Any:
    return (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-5)


def scaled(params: Any, x: Any) -> Any:
    weight, bias = (params[name].reshape(-1, 1, 1) for name in ("weight", "bias"))
    return x * weight + bias


def group_norm(params: Any, x: Any) -> Any:
    return scaled(params, normalised(x.reshape(2, 2, -1), (2,)).reshape(x.shape))


def attention(params: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("nse,hde->nshd", x, params[of]) + params[f"{of}_bias"] for of in ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("nshd,nthd->nhst", q, k) / math.sqrt(q.shape[-1]))
    return jnp.einsum("nhst,nthd,ehd->nse", weights, v, params["out"]) + params["out_bias"]


def spectral(params: Any, x: Any) -> Any:
    """Two modes: of rows the first two and the last two, of columns the first two."""
    weight = params["weight"][..., 0] + 1j * params["weight"][..., 1]
    spectrum = jnp.fft.rfft2(x)
    whole = jnp.zeros((*weight.shape[:2], *spectrum.shape[2:]), complex)
    whole = whole.at[:, :, jnp.array([0, 1, -2, -1]), :2].set(weight)
    return jnp.fft.irfft2(jnp.einsum("bihw,iohw->bohw", spectrum, whole), x.shape[2:])


def windows(x: Any) -> Any:
    n, c, h, w = x.shape
    return x.reshape(n, c, h // 2, 2, w // 2, 2)


def affine(params: Any, x: Any) -> Any:
    return x @ params["weight"].T + params["bias"]


WHOLE: dict[str, Callable[[Any, Any], Any]] = {
    "Linear": affine,
    "Pointwise": affine,
    "Conv2d": conv,
    "Conv3d": conv,
    "ConvTranspose2d": transposed,
    "MaxPool2d": lambda params, x: windows(x).max((3, 5)),
    "AvgPool2d": lambda params, x: windows(x).mean((3, 5)),
    "GlobalAvgPool": lambda params, x: x.mean((2, 3), keepdims=True),
    "BatchNorm": lambda params, x: scaled(params, normalised(x, (0, 2, 3))),
    "GroupNorm": group_norm,
    "InstanceNorm": lambda params, x: scaled(params, normalised(x, (2, 3))),
    "LayerNorm": lambda params, x: normalised(x, (1,)) * params["weight"] + params["bias"],
    "RMSNorm": lambda params, x: x / jnp.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * params["weight"],
    "Embedding": lambda params, x: params["weight"][x],
    "MultiHeadAttention": attention,
    "SpectralConv2d": spectral,
}


def beside(row: Row) -> Beside:
    P_x = row.on("P_x")
    assert P_x is not None
    lengths = list(LENGTHS[: len(P_x.shape)])
    if row.kind in ("Linear", "Pointwise", "LayerNorm", "RMSNorm"):
        lengths[-1] = 6
    elif row.kind == "MultiHeadAttention":
        lengths[-1] = 8
    whole = WHOLE[row.kind]
    if "groups" in row.line:
        whole = lambda params, x: conv(params, x, groups=4)  # noqa: E731
    P_y = row.on("P_y")
    if row.kind == "GlobalAvgPool":
        P_y = on(1, 2, 1, 1, ranks=(0, 2))
    integers = 10 if row.kind == "Embedding" else 0
    return Beside(f"{row.kind} {row.split}", lengths, row.layer, whole, P_x, P_y, integers=integers)


def of_size(workers: int) -> list[Row]:
    return [row for row in ROWS if row.workers == workers and not row.kind.endswith("Loss")]


def check(rows: list[Row]) -> None:
    """Compare outputs; in a long run gradients, too, which take three times as long to compile."""
    cases = [beside(row) for row in rows]
    if long_run():
        check_beside(cases)
        return
    P = dj.Partition()
    layers = [row.layer(P) for row in rows]
    specs = [layer.param_specs() for layer in layers]
    params = [case.params(spec) for case, spec in zip(cases, specs, strict=True)]
    own = jax.tree.map(lambda spec, whole: block_of(whole, spec), specs, params)
    blocks = [cut(case.x, case.P_x, P.rank) for case in cases]
    xs = [np.zeros((len(case.x), 0), case.x.dtype) if x is None else x for case, x in zip(cases, blocks, strict=True)]
    ys = dj.jit(lambda params, xs: [layer(*each) for layer, *each in zip(layers, params, xs, strict=True)])(own, xs)
    wholes = [np.asarray(case.whole(*each, case.x)) for case, *each in zip(cases, params, strict=True) if P.rank == 0]
    for case, whole, y in zip(cases, P.broadcast_data(wholes), ys, strict=True):
        mine = cut(whole, case.P_y or case.P_x, P.rank)
        if mine is not None:
            close(y, mine, 1e-12, case.name)


@pytest.mark.simulated(4)
def test_beside_the_sequential_layers_on_four_workers() -> None:
    check(of_size(4))


@pytest.mark.simulated(8)
def test_beside_the_sequential_layers_on_eight_workers() -> None:
    check(of_size(8))


def dice(x: Any, target: Any) -> Any:
    both, sums = (x * target).sum((2, 3)), (x + target).sum((2, 3))
    return jnp.mean(1 - (2 * both + 1e-5) / (sums + 1e-5))


PLAIN_LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "MSELoss": lambda x, target: jnp.mean((x - target) ** 2),
    "CrossEntropyLoss": lambda x, target: -jnp.mean((target * jax.nn.log_softmax(x, 1)).sum(1)),
    "DiceLoss": dice,
}


@pytest.mark.simulated(4)
def test_losses_beside_the_sequential_ones() -> None:
    P, draw = dj.Partition(), np.random.default_rng(0)
    x, target = draw.random((2, 4, 8, 8)), draw.random((2, 4, 8, 8))
    for row in (row for row in ROWS if row.kind.endswith("Loss")):
        P_x = row.on("P_x")
        assert P_x is not None
        loss, plain = row.layer(P), PLAIN_LOSSES[row.kind]
        value, gradient = dj.jit(dj.value_and_grad(loss))(cut(x, P_x, P.rank), cut(target, P_x, P.rank))
        want, of_x = jax.value_and_grad(plain)(x, target)
        np.testing.assert_allclose(value, want, rtol=1e-12)
        np.testing.assert_allclose(gradient, cut(of_x, P_x, P.rank), atol=1e-12)
