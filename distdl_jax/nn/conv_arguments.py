"""Kernel, stride, dilation and padding as people give them, and as windows have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from distdl_jax.arguments import is_integer
from distdl_jax.errors import InvalidArgumentError
from distdl_jax.plans.windows import PaddingMode, Pairs, WindowSpec, same_padding

PADDING_MODES = get_args(PaddingMode)

Sizes = int | Sequence[int]
Padding = int | str | Sequence[int | tuple[int, int]]


def window_spec(
    dims: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, mode: PaddingMode = "zeros"
) -> WindowSpec:
    """The windows over `dims` feature dimensions that these arguments mean; refuses what they can't."""
    kernel = per_feature("kernel_size", kernel_size, dims)
    stride = per_feature("stride", stride, dims)
    dilation = per_feature("dilation", dilation, dims)
    pairs = padding_pairs(padding, kernel, stride, dilation)
    if mode not in PADDING_MODES:
        raise InvalidArgumentError(f"`padding_mode` (={mode!r}) must be one of {PADDING_MODES}.")
    return WindowSpec(kernel, stride, dilation, pairs, mode)


def per_feature(name: str, value: Any, dims: int) -> tuple[int, ...]:
    """One integer, 1 or more, for each of `dims` feature dimensions, from one for all or a sequence."""
    values = tuple(value) if isinstance(value, Sequence | np.ndarray) else (value,) * dims
    if len(values) != dims or not all(is_integer(v, least=1) for v in values):
        raise InvalidArgumentError(f"`{name}` (={value!r}) must be an integer, 1 or more, or {dims} of them.")
    return tuple(map(int, values))


def padding_pairs(padding: Any, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Pairs:
    """The (low, high) padding of each feature dimension, from what a layer takes as `padding`."""
    dims = len(kernel)
    if isinstance(padding, str) and padding == "valid":
        return ((0, 0),) * dims
    if isinstance(padding, str) and padding == "same":
        if any(s != 1 for s in stride):
            raise InvalidArgumentError(f"`padding` (='same') takes a stride of 1, but `stride` is {stride}.")
        return tuple(same_padding(k, d) for k, d in zip(kernel, dilation, strict=True))
    entries = padding if isinstance(padding, Sequence | np.ndarray) else (padding,) * dims
    pairs = [entry if isinstance(entry, Sequence | np.ndarray) else (entry, entry) for entry in entries]
    if len(pairs) == dims and all(len(pair) == 2 and all(is_integer(p, least=0) for p in pair) for pair in pairs):
        return tuple((int(low), int(high)) for low, high in pairs)
    raise InvalidArgumentError(
        f"`padding` (={padding!r}) must be 'same', 'valid', an integer of 0 or more, or for each of {dims} feature "
        "dimensions an integer or a pair (low, high)."
    )
