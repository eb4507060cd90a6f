"""What one worker computes between two movements, in numbers: flops, bytes, what the backward pass needs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """One worker's arithmetic on its block, and on its copy of the parameters.

    - `kind`: of operation: "convolution", "matrix product", "fft", "elementwise" and so on.
    - `flops`: multiplications and additions of the forward pass, as XLA counts them.
    - `flops_x`, `flops_params`: the same of the gradient with respect to the input, and to the parameters.
    - `read`, `written`: bytes that the forward pass reads and writes, each array once.
    - `saves_x`, `saves_y`: whether the backward pass reads the input, or the output, which are stored until then.
    - `saved`: bytes that are stored beside these two; None: not known, so that memory can't be foreseen.
    - `scratch`, `scratch_x`, `scratch_params`: bytes that the three directions take while they compute, beside their
      arguments and results.
    - `fuses_x`: whether it is a loop in which the compiler can compute its input, too; else it reads it from memory.
    - `y_is_recomputed`: whether the compiler computes the output again in such loops, from the input and what is
      `saved`.
    - `shape`: what a table of measured times is asked for: the problem of a convolution, (m, k, n) of a matrix product.
    """

    kind: str
    flops: int = 0
    flops_x: int = 0
    flops_params: int = 0
    read: int = 0
    written: int = 0
    saves_x: bool = False
    saves_y: bool = False
    saved: int | None = None
    scratch: int = 0
    scratch_x: int = 0
    scratch_params: int = 0
    fuses_x: bool = False
    y_is_recomputed: bool = False
    shape: Hashable = None
