"""The networks of the examples in PyTorch, eagerly on one thread: a process of its own that takes training steps.

Runs where PyTorch is, which need not be where JAX is; see `make bench-peers`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parent))

from asked import serve


def lenet5() -> nn.Module:
    """Build the network of examples/lenet5.py."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def perceptron(widths: Sequence[int]) -> nn.Module:
    """Build the network of examples/digits_mlp.py."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class UNet3d(nn.Module):
    """As examples/unet3d.py has it."""

    def __init__(self, seen: int, channels: Sequence[int]) -> None:
        super().__init__()
        self.down, self.larger, self.up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        before = seen
        for width in channels:
            self.down.append(self._pair(before, width))
            before = width
        for width in reversed(channels[:-1]):
            self.larger.append(nn.ConvTranspose3d(before, width, 2, stride=2))
            self.up.append(self._pair(2 * width, width))
            before = width
        self.last = nn.Conv3d(before, 1, 1)

    @staticmethod
    def _pair(before: int, width: int) -> nn.Module:
        first, second = (nn.Conv3d(n, width, 3, padding=1) for n in (before, width))
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The volume of one channel."""
        kept = []
        for n, pair in enumerate(self.down):
            x = pair(F.max_pool3d(x, 2) if n else x)
            kept.append(x)
        for larger, pair, across in zip(self.larger, self.up, reversed(kept[:-1]), strict=True):
            x = pair(torch.cat([larger(x), across], 1))
        return self.last(x)


def vgg(widths: Sequence[int]) -> nn.Module:
    """VGG-11 as examples/vgg.py has it."""
    layers: list[nn.Module] = []
    for n, (before, after) in enumerate(pairwise((1, *widths))):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if n in (0, 1, 3, 5, 7) else []
    last = widths[-1]
    linear = [nn.Linear(last, last), nn.ReLU(), nn.Linear(last, last), nn.ReLU(), nn.Linear(last, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *linear)


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        first = (nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.body = nn.Sequential(*first, nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        convolution = nn.Conv2d(before, after, 1, stride, bias=False)
        self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(after)) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With the last activation."""
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(width: int) -> nn.Module:
    """ResNet-18 as examples/resnet.py has it."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers, before = [*layers, nn.MaxPool2d(3, 2, 1)], width
    for times, stride in ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1)):
        layers.append(Block(before, times * width, stride))
        before = times * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


class SuperResolution(nn.Module):
    """As examples/super_resolution.py has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = ((3, width, 5), (width, width, 3), (width, width, 3), (width, 3, 3))
        convs = [nn.Conv2d(a, b, kernel, padding="same") for a, b, kernel in shapes]
        before, after = [nn.ReLU(), convs[1], nn.ReLU(), nn.Upsample(scale_factor=2)], [nn.ReLU(), convs[3]]
        self.details = nn.Sequential(convs[0], *before, convs[2], *after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The large images."""
        return self.details(x) + F.interpolate(x, scale_factor=2, mode="bilinear")


class FourierOperator(nn.Module):
    """As examples/fno.py has it, in two dimensions."""

    def __init__(self, blocks: int, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.ParameterList(
            torch.randn(width, width, 2 * modes, modes, dtype=torch.cfloat) / width**2 for _ in range(blocks)
        )
        self.pointwise = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(blocks))
        self.lift = nn.Conv2d(3, width, 1)
        self.project = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What flows."""
        x, k = self.lift(x), self.modes
        for n, (weight, pointwise) in enumerate(zip(self.weights, self.pointwise, strict=True)):
            spectrum = torch.fft.rfft2(x)
            low = torch.cat([spectrum[:, :, :k, :k], spectrum[:, :, -k:, :k]], 2)
            product = torch.einsum("bikl,iokl->bokl", low, weight)
            kept = torch.zeros_like(spectrum)
            kept[:, :, :k, :k], kept[:, :, -k:, :k] = product[:, :, :k], product[:, :, k:]
            x = torch.fft.irfft2(kept, x.shape[2:]) + pointwise(x)
            x = F.gelu(x) if n < len(self.weights) - 1 else x
        return self.project(x)


NETWORKS: dict[str, Callable[[Sequence[int], Sequence[int]], nn.Module]] = {
    "lenet5": lambda shape, widths: lenet5(),
    "perceptron": lambda shape, widths: perceptron(widths),
    "unet3d": lambda shape, widths: UNet3d(shape[1], widths),
    "vgg": lambda shape, widths: vgg(widths),
    "resnet": lambda shape, widths: resnet(*widths),
    "super_resolution": lambda shape, widths: SuperResolution(*widths),
    "fno": lambda shape, widths: FourierOperator(*widths),
}
"""Each from the shape of x, and widths."""


def prepared(description: tuple[str, list[int], list[int]]) -> Callable[[], object]:
    """Return a step of the network: value, gradient and adam; `widths` where it has some, x of `shape`."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, shape, widths = description
    x = torch.rand(shape)
    network = NETWORKS[name](shape, widths)
    with torch.no_grad():
        y = network(x)
    target = torch.arange(shape[0]) % 10 if y.dim() == 2 else torch.rand(y.shape)
    of = F.cross_entropy if y.dim() == 2 else F.mse_loss
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)

    def step() -> float:
        optimiser.zero_grad()
        loss = of(network(x), target)
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


if __name__ == "__main__":
    serve(prepared)
