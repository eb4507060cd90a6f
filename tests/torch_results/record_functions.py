"""Records what PyTorch's functions give: python tests/torch_results/record_functions.py, where PyTorch is installed.

Of each function the arguments, the output y, and the gradients of the sum of cos(k) y_k over its entries k, in float64:
`functions.npz`.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
found: dict[str, np.ndarray] = {}


def sampled(
    mode: str, padding: str, aligned: bool, shape: tuple[int, ...], outputs: tuple[int, ...], reach: float | None = None
) -> None:
    """Points all over and beside the image, or with `reach` at most so many entries from the place of the output."""
    x = torch.randn(shape, requires_grad=True)
    points = torch.randn(shape[0], *outputs, len(outputs))
    if reach is None:  # some on the border, on the edge, and in the middle
        count = len(points.flatten()[::5])
        points.flatten()[::5] = torch.tensor([-1.0, 1.0, 0.0]).repeat(count)[:count]
    else:
        theta = torch.eye(len(outputs), len(outputs) + 1).expand(shape[0], -1, -1)
        by = torch.tanh(points) * reach * 2 / torch.tensor(shape[:1:-1])
        points = F.affine_grid(theta, [*shape[:2], *outputs], aligned) + by
    points.requires_grad_(True)
    y = F.grid_sample(x, points, mode, padding, aligned)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape))
    parts = {"x": x, "grid": points, "y": y, "dx": x.grad, "dgrid": points.grad}
    name = f"grid_sample {len(outputs)} {mode} {padding} {int(aligned)} {reach}"
    found.update({f"{name}/{key}": part.detach().numpy() for key, part in parts.items()})


sampled("bilinear", "zeros", False, (1, 2, 5, 4), (3, 5))
sampled("bilinear", "border", True, (2, 2, 3, 3, 2), (2, 3, 2))
sampled("bilinear", "reflection", False, (1, 1, 3, 4), (3, 2))
sampled("nearest", "reflection", True, (2, 1, 3, 4), (2, 2))
sampled("nearest", "border", False, (3, 1, 2, 5), (1, 7))
sampled("bilinear", "zeros", False, (1, 1, 9, 3), (9, 3), 1.5)
sampled("bilinear", "reflection", True, (2, 1, 1, 8), (1, 8), 2.0)

theta = torch.randn(2, 3, 4)
found["affine_grid/theta"] = theta.numpy()
found.update({f"affine_grid/{int(to)}": F.affine_grid(theta, [2, 1, 3, 4, 2], to).numpy() for to in (False, True)})
np.savez_compressed(Path(__file__).with_name("functions.npz"), **found)
