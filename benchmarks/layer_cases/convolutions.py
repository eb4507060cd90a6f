"""Convolutions of a kernel of 3 with a padding of 1, transposed ones of a kernel and a stride of 2, and pools of 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from distdl_jax import nn
from jax import lax

from layer_cases import Case, Tensor, Torch, along_channels, on

SHAPES = {1: (16, 32, 4096), 2: (8, 32, 64, 64), 3: (1, 8, 32, 32, 32), 4: (1, 8, 12, 12, 12, 12)}
POOLED = {1: (16, 32, 16384), 2: (8, 32, 128, 128), 3: (2, 16, 48, 48, 48), 4: (1, 8, 16, 16, 16, 16)}


def conv(dims: int, stride: int = 1, groups: int = 1) -> Callable[[Any, Any], Any]:
    """Compute the convolution in plain JAX."""

    def plain(p: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, p["weight"], (stride,) * dims, [(1, 1)] * dims, feature_group_count=groups)
        return y + along_channels(p["bias"], dims)

    return plain


def conv_lstm(dims: int, hidden: int) -> Callable[[Any, Any], Any]:
    """Compute a step from zeros in plain JAX."""
    plain = conv(dims)

    def step(p: Any, x: Any) -> Any:
        zeros = jnp.zeros((len(x), hidden, *x.shape[2:]), x.dtype)
        i, _, g, o = jnp.split(plain(p, jnp.concatenate([x, zeros], 1)), 4, 1)
        return jax.nn.sigmoid(o) * jnp.tanh(jax.nn.sigmoid(i) * jnp.tanh(g))

    return step


def torch(name: str, dims: int, *arguments: Any, **options: Any) -> Torch | None:
    """Compute the layer on one worker, in PyTorch, which has those of up to three dimensions."""
    return Torch(f"{name}{dims}d", *arguments, **options) if dims < 4 else None


def torch_conv(dims: int, seen: int, made: int, **options: Any) -> Torch | None:
    """Compute the convolution on one worker, in PyTorch."""
    return torch("Conv", dims, seen, made, 3, padding=1, **options)


def transposed(p: Any, x: Any) -> Any:
    """In plain JAX, as a product: windows do not overlap. What XLA makes of strides took 30 times as long."""
    dims = x.ndim - 2
    places, kernel = "hwdt"[:dims], "klmn"[:dims]
    between = "".join(a + b for a, b in zip(places, kernel, strict=True))
    y = jnp.einsum(f"bi{places},io{kernel}->bo{between}", x, p["weight"])
    y = y.reshape(len(x), -1, *(2 * n for n in x.shape[2:]))
    return y + along_channels(p["bias"], dims)


def pool(op: Any, start: float, divisor: float = 1) -> Callable[[Any, Any], Any]:
    """Compute the pooling in plain JAX."""

    def plain(p: Any, x: Any) -> Any:
        windows = (1, 1, *(2,) * (x.ndim - 2))
        y = lax.reduce_window(x, start, op, windows, windows, "VALID")
        return y if divisor == 1 else y / 2 ** (x.ndim - 2)

    return plain


def cases(n: int) -> Iterator[Case]:
    """Yield cases on n workers; along channels and features, on pairs of channels where n is divisible by 4."""
    c = 2 if n % 4 == 0 else 1
    for dims, shape in SHAPES.items():
        name, channels = f"Conv{dims}d", {"in_channels": shape[1], "out_channels": shape[1]}
        same = channels | {"kernel_size": 3, "padding": 1}
        ones = (1,) * (dims - 1)
        rows, all_ones = (1, 1, n, *ones), (1, 1, 1, *ones)
        x, plain = Tensor(shape, rows), conv(dims)

        c_in = shape[1]
        usual = torch_conv(dims, c_in, c_in)

        def made(name: str, *grids: tuple[int, ...], **options: Any) -> Callable[[], Any]:
            return lambda: getattr(nn, f"Distributed{name}")(*(on(*grid) for grid in grids), **options)

        yield Case(f"Distributed{name}, rows split", [x], made(name, rows, **same), plain, torch=usual)
        if dims == 2:
            strided = {**same, "stride": 2}
            depthwise = {**same, "groups": shape[1]}
            batch = (n, 1, 1, 1)
            yield Case(f"Distributed{name}, stride 2", [x], made(name, rows, **strided), conv(dims, 2),
                       torch=torch_conv(dims, c_in, c_in, stride=2))  # fmt: skip
            yield Case(f"Distributed{name}, a group a channel", [x], made(name, rows, **depthwise),
                       conv(dims, 1, shape[1]), torch=torch_conv(dims, c_in, c_in, groups=c_in))  # fmt: skip
            yield Case(f"Distributed{name}, batch split", [Tensor(shape, batch)], made(name, batch, **same), plain,
                       torch=usual)  # fmt: skip
        yield Case(f"DistributedFeature{name}, columns split" if dims > 1 else f"DistributedFeature{name}, split",
                   [Tensor(shape, (1, 1, *ones, n))], made(f"Feature{name}", (1, 1, *ones, n), **same),
                   plain, torch=usual)  # fmt: skip
        along = (1, n, 1, *ones)
        yield Case(f"DistributedChannel{name}, in-channels split", [Tensor(shape, along)],
                   made(f"Channel{name}", along, all_ones, along, **same), plain,
                   torch=torch_conv(dims, c_in // n, c_in))  # fmt: skip
        yield Case(f"DistributedChannel{name}, out-channels split", [Tensor(shape, all_ones)],
                   made(f"Channel{name}", all_ones, along, (n, 1, 1, *ones), **same), plain,
                   torch=torch_conv(dims, c_in, c_in // n))  # fmt: skip
        grids = ((1, 1, n // c, *ones), (1, c, n // c, *ones), (c, 1, n // c, *ones))
        yield Case(f"DistributedGeneral{name}, rows{' and channels' * (c > 1)} split", [Tensor(shape, grids[0])],
                   made(f"General{name}", *grids, **same), plain,
                   torch=torch_conv(dims, c_in // c, c_in // c))  # fmt: skip
        yield Case(f"DistributedConvTranspose{dims}d, rows split", [x],
                   made(f"ConvTranspose{dims}d", rows, **channels, kernel_size=2, stride=2), transposed,
                   torch=torch("ConvTranspose", dims, c_in, c_in, 2, stride=2))  # fmt: skip
        if dims < 4:
            cell = {"in_channels": c_in, "hidden_channels": c_in, "kernel_size": 3}
            yield Case(f"DistributedConvLSTMCell{dims}d, rows split", [x],
                       made(f"ConvLSTMCell{dims}d", rows, **cell), conv_lstm(dims, c_in))  # fmt: skip
    for dims, shape in POOLED.items():
        rows = (1, 1, n, *(1,) * (dims - 1))
        for kind, plain in (("Max", pool(lax.max, -jnp.inf)), ("Avg", pool(lax.add, 0.0, prod((2,) * dims)))):
            layer = getattr(nn, f"Distributed{kind}Pool{dims}d")
            yield Case(f"Distributed{kind}Pool{dims}d, rows split", [Tensor(shape, rows)],
                       lambda layer=layer, rows=rows: layer(on(*rows), 2), plain,
                       torch=torch(f"{kind}Pool", dims, 2))  # fmt: skip
