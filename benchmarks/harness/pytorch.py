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
    """As examples/lenet5.py has it."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def perceptron(widths: Sequence[int]) -> nn.Module:
    """As examples/digits_mlp.py has it."""
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


def prepared(description: tuple[str, list[int], list[int]]) -> Callable[[], object]:
    """A step of the network: value, gradient and adam; `widths` where it has some, x of `shape`."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, shape, widths = description
    x = torch.rand(shape)
    labels = torch.arange(shape[0]) % 10
    if name == "unet3d":
        network: nn.Module = UNet3d(shape[1], widths)
    else:
        network = lenet5() if name == "lenet5" else perceptron(widths)
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)

    def step() -> float:
        optimiser.zero_grad()
        y = network(x)
        loss = F.mse_loss(y, x[:, :1]) if name == "unet3d" else F.cross_entropy(y, labels)
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


if __name__ == "__main__":
    serve(prepared)
