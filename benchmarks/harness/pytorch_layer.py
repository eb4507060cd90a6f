"""One layer of PyTorch, eagerly on one thread: a process of its own that calls it, and takes its gradients.

Runs where PyTorch is, which need not be where JAX is; see `layer_cases.Torch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))

from asked import serve


def drawn(shape: list[int], kind: str | int) -> torch.Tensor:
    """As `layer_cases.Tensor` says."""
    if isinstance(kind, int):
        return torch.randint(kind, shape)
    return torch.randn(shape) if kind == "normal" else 0.01 + 0.98 * torch.rand(shape)


def prepared(asked: dict[str, Any]) -> Callable[[], object]:
    """`calls` of the layer, with the gradients of its parameters and of the first input, or without any."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = getattr(torch.nn, asked["name"])(*asked["arguments"], **asked["options"])
    x, *others = (drawn(*given) for given in asked["inputs"])
    x.requires_grad_(asked["backward"] and x.is_floating_point())
    cotangent = torch.ones_like(layer(x, *others).detach())

    def forward() -> None:
        with torch.no_grad():
            layer(x, *others)

    def both_ways() -> None:
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        layer(x, *others).backward(cotangent)

    call = both_ways if asked["backward"] else forward
    return lambda: [call() for _ in range(asked["calls"])]


if __name__ == "__main__":
    serve(prepared)
