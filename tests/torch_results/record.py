"""Records what PyTorch's modules give: python tests/torch_results/record.py, where PyTorch is installed.

Of each module its `state_dict`, an input, and its output in evaluation, in float64: `results.npz`.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
found: dict[str, np.ndarray] = {}


def record(
    name: str,
    module: nn.Module,
    *shape: int,
    integers: int = 0,
    memory: torch.Tensor | None = None,
    **options: torch.Tensor,
) -> None:
    with torch.no_grad():
        for its in module.parameters():
            its.copy_(torch.randn_like(its))
    x = torch.randint(integers, shape) if integers else torch.randn(*shape)
    module.train()
    for _ in range(2):  # running statistics
        if not options:
            module(torch.randn(*shape) if not integers else x)
    module.eval()
    with torch.no_grad():
        keys = x if memory is None else memory
        y = module(x, keys, keys, **options)[0] if options else module(x)
    found.update({f"{name}/state/{key}": its.numpy() for key, its in module.state_dict().items()})
    found.update({f"{name}/x": x.numpy(), f"{name}/y": y.numpy()})
    told = {} if memory is None else {"memory": memory} | options
    found.update({f"{name}/{key}": its.numpy() for key, its in told.items()})


class Grouped(nn.Module):
    """Attention with fewer key heads, with the names of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.k_proj, self.v_proj = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.o_proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).reshape(2, 3, -1, 2).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(2, 3, 8))


record("linear", nn.Linear(5, 3), 2, 5)
for d in (1, 2, 3):
    sizes = (5, 4, 3)[:d]
    record(f"conv{d}", getattr(nn, f"Conv{d}d")(2, 4, 3, padding=1, groups=2), 2, 2, *sizes)
    record(f"conv_transpose{d}", getattr(nn, f"ConvTranspose{d}d")(2, 4, 3, stride=2, groups=2), 1, 2, *sizes)
record("batch_norm", nn.BatchNorm2d(3), 3, 3, 2, 2)
record("layer_norm", nn.LayerNorm(5), 3, 5)
record("rms_norm", nn.RMSNorm(5, eps=1e-6), 3, 5)
record("group_norm", nn.GroupNorm(2, 4), 2, 4, 3)
record("instance_norm", nn.InstanceNorm1d(2, affine=True), 2, 2, 4)
record("embedding", nn.Embedding(7, 3), 4, 2, integers=7)
padding = torch.tensor([[False, False, True], [False, True, True]])
causal = nn.Transformer.generate_square_subsequent_mask(3).isinf()
attention = nn.MultiheadAttention(8, 4, batch_first=True)
record("attention", attention, 2, 3, 8, key_padding_mask=padding, attn_mask=causal)
record("grouped", Grouped(), 2, 3, 8)
record(
    "network",
    nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Sequential(nn.Linear(8, 3))
    ),
    *(2, 1, 6, 6),
)
# To a memory of another length, of which some is padding, with numbers that are added to the scores.
record(
    "cross",
    nn.MultiheadAttention(8, 4, batch_first=True),
    *(2, 3, 8),
    memory=torch.randn(2, 5, 8),
    key_padding_mask=torch.tensor([[False, False, False, False, True], [True, False, True, False, False]]),
    attn_mask=torch.randn(3, 5),
)
np.savez_compressed(Path(__file__).parent / "results.npz", **found)
