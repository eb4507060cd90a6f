"""What one worker computes between two movements, in numbers: flops, bytes, what the backward pass needs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from distdl_jax.plans.shape_dtype import ShapeDtype


@dataclass(frozen=True, slots=True)
class Work:
    """One worker's arithmetic on its block, and on its copy of the parameters.

    - `kind`: of operation: "convolution", "matrix product", "fft", "elementwise" and so on.
    - `flops`: multiplications and additions of the forward pass, as XLA counts them; of complex numbers, in
      real arithmetic.
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


def matrix_product(
    rows: int, inner: int, columns: int, itemsize: int, *, batch: int = 1, is_complex: bool = False
) -> Work:
    """Return the work of `batch` products of x, rows x inner, and a weight, inner x columns.

    x is stored for the weight's gradient. A product of two complex numbers is four of real ones.
    """
    flops = 2 * batch * rows * inner * columns * (4 if is_complex else 1)
    read, written = batch * itemsize * inner * (rows + columns), batch * itemsize * rows * columns
    shape = (rows, inner, columns)
    return Work("matrix product", flops, flops, flops, read, written, saves_x=True, saved=0, shape=shape)


def elementwise(x: ShapeDtype, y: ShapeDtype, flops: int = 1, *, saves_x: bool = False, saves_y: bool = False) -> Work:
    """Return the work of a few `flops` for each entry of y, forward, and of x, backward."""
    read, written = x.size * x.dtype.itemsize, y.size * y.dtype.itemsize
    return Work("elementwise", flops * y.size, flops * x.size, 0, read, written, saves_x=saves_x, saves_y=saves_y)


def optimiser_update(shape: tuple[int, ...], itemsize: int, copies: int) -> Work:
    """Return the work of an optimiser on a parameter of a shape, beside which it stores `copies` arrays like it.

    Each of these is read, with the gradient, and written; then the parameter is, with all of them. Loops over a few
    taps of a kernel take longer than loops over the columns of a matrix.
    """
    entries = math.prod(shape)
    read, written = (2 * copies + 1 + max(copies, 1)) * entries * itemsize, (copies + 1) * entries * itemsize
    flops = (2 + UPDATE_FLOPS * copies) * entries
    return Work("optimiser", flops, read=read, written=written, shape=(math.prod(shape[2:]),))


UPDATE_FLOPS = 6
"""Operations of an optimiser on each number that it stores, as Adam has them."""
