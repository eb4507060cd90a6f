"""The cases of benchmarks/layers.py, a line a layer: every layer of `distdl_jax.nn` beside the same in plain JAX.

Nothing here is made before it is asked for: a case's title can be read without a partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np

Shape = Sequence[int]


class Torch:
    """What PyTorch has to do for one worker's block: `torch.nn.NAME(*arguments, **options)` of inputs like the blocks.

    - `below`: what whole numbers among them are below, where it is less than in all.
    """

    def __init__(self, name: str, *arguments: Any, below: int | None = None, **options: Any) -> None:
        self.name, self.arguments, self.below, self.options = name, arguments, below, options

    def asked(self, inputs: Sequence[Tensor], n: int, backward: bool) -> dict[str, Any]:
        """As `harness/pytorch_layer.py` is told, on n workers."""
        return {
            "name": self.name,
            "arguments": self.arguments,
            "options": self.options,
            "inputs": [
                (given.block(n), self.below if self.below and isinstance(given.kind, int) else given.kind)
                for given in inputs
            ],
            "backward": backward,
        }


@dataclass(frozen=True)
class Tensor:
    """An input of a layer, of `shape`, cut over the first workers as `grid` says; without one all have a copy.

    `kind`: "normal" numbers, those "between" 0 and 1, "bool" (a third is true), or integers below a number.
    """

    shape: Shape
    grid: Shape | None = None
    kind: str | int = "normal"

    def block(self, n: int) -> Shape:
        """The shape of this worker's block; where not all n have one, of what they are sent: all of it."""
        if self.grid is None or math.prod(self.grid) != n:
            return self.shape
        return dj.TensorSpec(self.shape, on(*self.grid)).local_shape

    def whole(self, seed: int) -> np.ndarray:
        """Return the whole tensor, the same on every worker."""
        draw = np.random.default_rng(seed)
        if isinstance(self.kind, int):
            return draw.integers(0, self.kind, self.shape, np.int32)
        if self.kind == "bool":
            return draw.random(self.shape) < 1 / 3
        numbers = draw.normal(size=self.shape) if self.kind == "normal" else draw.uniform(0.01, 0.99, self.shape)
        return numbers.astype(np.float32)

    def own(self, whole: np.ndarray) -> jax.Array:
        """Return this worker's block."""
        if self.grid is None:
            return jnp.asarray(whole)
        box = dj.TensorSpec(self.shape, on(*self.grid)).box
        block = np.zeros((len(whole), 0), whole.dtype) if box is None else whole[tuple(slice(*side) for side in box)]
        return jnp.asarray(block)


@dataclass(frozen=True)
class Case:
    """One layer.

    - `title`: its name in `distdl_jax.nn`, and what is split.
    - `inputs`: of which the first one, where it holds numbers, is differentiated.
    - `layer`: makes it.
    - `plain`: of whole parameters and inputs.
    - `call`: of the layer, this worker's parameters and inputs, where it is more than `layer(params, *inputs)`.
    - `backward`: whether it has a derivative.
    - `torch`: the work of one worker in PyTorch, where DistDL has such a layer.
    - `tolerance`: how far the sums of what both give may be apart; None where workers hold copies of the output.
    """

    title: str
    inputs: Sequence[Tensor]
    layer: Callable[[], Any]
    plain: Callable[..., Any]
    call: Callable[..., Any] = lambda layer, params, *inputs: layer(params, *inputs)
    backward: bool = True
    tolerance: float | None = 1e-3
    torch: Torch | None = None


def on(*shape: int) -> dj.CartesianPartition:
    """Return the first workers, on a grid."""
    return dj.Partition().grid(shape)


def without_params(layer: Any, params: Any, *inputs: jax.Array) -> Any:
    """Calls losses, functions, and layers of several inputs."""
    return layer(*inputs)


def along_channels(values: jax.Array, dims: int) -> jax.Array:
    """Reshape to the shape that broadcasts to N x C x `dims` features."""
    return values.reshape(-1, *(1,) * dims)
