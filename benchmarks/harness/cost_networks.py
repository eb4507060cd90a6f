"""Ten networks on three partitions each, whose steps are foreseen and measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import distdl_jax as dj
import jax
from distdl_jax import nn

Built = tuple[nn.Sequential, dj.TensorSpec]
"""A network, and the spec of its input."""


@dataclass(frozen=True)
class Case:
    """A network: `build(P, grid)` puts it on a grid of the workers of P; `grids` are those of x, by name."""

    title: str
    build: Callable[[dj.Partition, tuple[int, ...]], Built]
    grids: Callable[[int], dict[str, tuple[int, ...]]]


def cases() -> list[Case]:
    """Return the ten networks."""
    return [
        Case("LeNet-5, batch 16", lambda P, grid: lenet(P, grid, 16), images),
        Case("LeNet-5, batch 256", lambda P, grid: lenet(P, grid, 256), images),
        Case("perceptron, 256 wide, batch 64", lambda P, grid: perceptron(P, grid, 64, 256), features),
        Case("perceptron, 1024 wide, batch 256", lambda P, grid: perceptron(P, grid, 256, 1024), features),
        Case("VGG-11, 32², batch 32", vgg, images),
        Case("ResNet-18, 64², batch 32", resnet, images),
        Case("five convolutions, 48², batch 8", convolutions, images),
        Case("3-D encoder, 32³", encoder, volumes),
        Case("residual with group norms, 32², batch 16", grouped, images),
        Case("1-D convolutions, 16,384, batch 8", signal, signals),
    ]


def images(workers: int) -> dict[str, tuple[int, ...]]:
    """Return grids of N x C x H x W."""
    if workers == 1:
        return {"whole": (1, 1, 1, 1)}
    square = math.isqrt(workers)
    tiles = (1, 1, 1, workers) if square**2 != workers else (1, 1, square, square)
    return {"batch": (workers, 1, 1, 1), "rows": (1, 1, workers, 1), "columns" if tiles[2] == 1 else "tiles": tiles}


def features(workers: int) -> dict[str, tuple[int, ...]]:
    """Return numbers of parts of the batch, and of a weight's outputs and inputs."""
    if workers == 1:
        return {"whole": (1, 1, 1)}
    return {"batch": (workers, 1, 1), "outputs": (1, workers, 1), "inputs": (1, 1, workers)}


def volumes(workers: int) -> dict[str, tuple[int, ...]]:
    """Return grids of N x C x D x H x W, of two samples."""
    if workers == 1:
        return {"whole": (1, 1, 1, 1, 1)}
    half = workers // 2
    return {"batch": (2, 1, 1, 1, half), "slabs": (1, 1, workers, 1, 1), "tiles": (1, 1, 1, half, 2)}


def signals(workers: int) -> dict[str, tuple[int, ...]]:
    """Return grids of N x C x length."""
    if workers == 1:
        return {"whole": (1, 1, 1)}
    return {"batch": (workers, 1, 1), "length": (1, 1, workers), "channels": (1, workers, 1)}


def to_scores(P: dj.Partition, P_x: dj.CartesianPartition, channels: int) -> list[Any]:
    """Return layers from images to ten numbers, on parts of the batch."""
    rows = P.grid((P.size, 1))
    linear = nn.DistributedLinear(rows, rows, P.grid((P.size, 1, 1)), channels, 10)
    return [nn.Repartition(P_x, P.grid((P.size, 1, 1, 1))), averaged, linear]


def averaged(x: jax.Array) -> jax.Array:
    """Average each channel of each image."""
    return x.mean((2, 3))


def lenet(P: dj.Partition, grid: tuple[int, ...], batch: int) -> Built:
    """Return LeNet-5, its linear layers on parts of the batch."""
    P_x, P_batch = P.grid(grid), P.grid((P.size, 1, 1, 1))
    rows, P_W = P.grid((P.size, 1)), P.grid((P.size, 1, 1))
    layers = nn.Sequential(
        nn.DistributedConv2d(P_x, in_channels=1, out_channels=6, kernel_size=5, padding=2),
        jax.nn.relu,
        nn.DistributedMaxPool2d(P_x, 2),
        nn.DistributedConv2d(P_x, in_channels=6, out_channels=16, kernel_size=5),
        jax.nn.relu,
        nn.DistributedMaxPool2d(P_x, 2),
        nn.Repartition(P_x, P_batch),
        flattened,
        nn.DistributedLinear(rows, rows, P_W, 400, 120),
        jax.nn.relu,
        nn.DistributedLinear(rows, rows, P_W, 120, 84),
        jax.nn.relu,
        nn.DistributedLinear(rows, rows, P_W, 84, 10),
    )
    return layers, dj.TensorSpec((batch, 1, 28, 28), P_x)


def flattened(x: jax.Array) -> jax.Array:
    """Flatten each image."""
    return x.reshape(len(x), -1)


def perceptron(P: dj.Partition, grid: tuple[int, ...], batch: int, width: int) -> Built:
    """Return four linear layers whose weights are cut as `grid` says: batch, outputs, inputs."""
    n, outputs, inputs = grid
    P_x, P_y, P_W = P.grid((n, inputs)), P.grid((n, outputs)), P.grid(grid)
    layers: list[Any] = []
    for _ in range(4):
        layers += [nn.DistributedLinear(P_x, P_y, P_W, width, width), jax.nn.relu, nn.Repartition(P_y, P_x)]
    return nn.Sequential(*layers), dj.TensorSpec((batch, width), P_x)


def vgg(P: dj.Partition, grid: tuple[int, ...]) -> Built:
    """Return eight convolutions with five pools."""
    P_x, before = P.grid(grid), 1
    layers: list[Any] = []
    for place, channels in enumerate((16, 32, 64, 64, 128, 128, 128, 128)):
        layers.append(nn.DistributedConv2d(P_x, in_channels=before, out_channels=channels, kernel_size=3, padding=1))
        layers.append(jax.nn.relu)
        if place in (0, 1, 3, 5):
            layers.append(nn.DistributedMaxPool2d(P_x, 2))
        before = channels
    return nn.Sequential(*layers, *to_scores(P, P_x, before)), dj.TensorSpec((32, 1, 32, 32), P_x)


def resnet(P: dj.Partition, grid: tuple[int, ...], width: int = 16) -> Built:
    """Return ResNet-18, with batch normalisation over all workers."""
    P_x = P.grid(grid)

    def conv(before: int, after: int, kernel: int, stride: int) -> list[Any]:
        sizes = {"in_channels": before, "out_channels": after, "kernel_size": kernel}
        layer = nn.DistributedConv2d(P_x, **sizes, stride=stride, padding=kernel // 2, bias=False)
        return [layer, nn.DistributedBatchNorm(P_x, after)]

    layers: list[Any] = [*conv(1, width, 7, 2), jax.nn.relu, nn.DistributedMaxPool2d(P_x, 3, 2, 1)]
    before = width
    for block in range(8):
        stride, after = 2 if block in (2, 4, 6) else 1, width * 2 ** (block // 2)
        body = nn.Sequential(*conv(before, after, 3, stride), jax.nn.relu, *conv(after, after, 3, 1))
        shortcut = nn.Sequential(*conv(before, after, 1, stride)) if stride > 1 else None
        layers += [nn.Residual(body, shortcut), jax.nn.relu]
        before = after
    return nn.Sequential(*layers, *to_scores(P, P_x, before)), dj.TensorSpec((32, 1, 64, 64), P_x)


def convolutions(P: dj.Partition, grid: tuple[int, ...]) -> Built:
    """Return five convolutions that leave images as large as they are."""
    P_x = P.grid(grid)
    layers: list[Any] = []
    for before, after, kernel in ((3, 32, 5), (32, 32, 3), (32, 32, 3), (32, 32, 3), (32, 3, 3)):
        sizes = {"in_channels": before, "out_channels": after, "kernel_size": kernel}
        layers += [nn.DistributedConv2d(P_x, **sizes, padding="same"), jax.nn.gelu]
    return nn.Sequential(*layers[:-1]), dj.TensorSpec((8, 3, 48, 48), P_x)


def encoder(P: dj.Partition, grid: tuple[int, ...]) -> Built:
    """Return the encoder of a 3-D U-Net."""
    P_x, before = P.grid(grid), 1
    layers: list[Any] = []
    for place, channels in enumerate((8, 8, 16, 16, 32)):
        sizes = {"in_channels": before, "out_channels": channels, "kernel_size": 3}
        layers += [nn.DistributedConv3d(P_x, **sizes, padding="same"), jax.nn.relu]
        layers += [nn.DistributedMaxPool3d(P_x, 2)] if place in (1, 3) else []
        before = channels
    return nn.Sequential(*layers), dj.TensorSpec((2, 1, 32, 32, 32), P_x)


def grouped(P: dj.Partition, grid: tuple[int, ...]) -> Built:
    """Return residual blocks with group normalisation."""
    P_x, width = P.grid(grid), 32

    def conv(before: int) -> nn.DistributedConv2d:
        return nn.DistributedConv2d(P_x, in_channels=before, out_channels=width, kernel_size=3, padding=1)

    layers: list[Any] = [conv(3)]
    for _ in range(3):
        body = nn.Sequential(nn.DistributedGroupNorm(P_x, 4, width), jax.nn.silu, conv(width))
        layers.append(nn.Residual(body))
    return nn.Sequential(*layers, conv(width)), dj.TensorSpec((16, 3, 32, 32), P_x)


def signal(P: dj.Partition, grid: tuple[int, ...]) -> Built:
    """Return convolutions of a long signal, with pools."""
    P_x, before = P.grid(grid), 8
    layers: list[Any] = []
    for channels in (16, 32, 32, 64):
        sizes = {"in_channels": before, "out_channels": channels, "kernel_size": 9}
        layers += [nn.DistributedConv1d(P_x, **sizes, padding="same"), jax.nn.relu, nn.DistributedAvgPool1d(P_x, 4)]
        before = channels
    return nn.Sequential(*layers), dj.TensorSpec((8, 8, 16384), P_x)
