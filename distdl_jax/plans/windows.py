"""The windows of a convolution or a pooling, and the inputs that they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.plans.decomposition import Range, balanced_range, intersect_ranges
from distdl_jax.plans.padding import WINDOW_MODES, PaddingMode, widest
from distdl_jax.validation import padding_pairs, per_feature

Pairs = tuple[tuple[int, int], ...]
"""(low, high) for each feature dimension."""


def same_padding(kernel: int, dilation: int = 1) -> tuple[int, int]:
    """Return the padding (low, high) that gives as many outputs as inputs at stride 1; low is smaller for even spans.

    >>> same_padding(3), same_padding(4), same_padding(3, dilation=2)
    ((1, 1), (1, 2), (2, 2))
    """
    total = dilation * (kernel - 1)
    return total // 2, total - total // 2


@dataclass(frozen=True)
class WindowedAxis:
    """Windows that slide over one dimension: output j reads the inputs j * stride - low + dilation * (0 ... kernel-1).

    Input indices below 0 and from `size` on are padding, unless the dimension is periodic: then they wrap around. With
    span = dilation * (kernel - 1) + 1 there are (low + size + high - span) // stride + 1 outputs, which workers hold in
    balanced blocks, however the input is split.

    - `size`: the global extent of the input.
    - `kernel`, `stride`, `dilation`: 1 or more. A kernel may be even: only `padding` places the windows.
    - `padding`: (low, high), each 0 or more.
    - `periodic`: whether the padding wraps around (circular padding), any number of times.

    Any arguments with at least one output are valid. Otherwise `InvalidArgumentError` is raised.

    >>> windows = WindowedAxis(size=10, kernel=3, stride=2, padding=(1, 1))
    >>> windows.outputs, windows.output_range(2, 0), windows.input_range((0, 3))
    (5, (0, 3), (-1, 6))
    >>> windows.clipped((-1, 6))
    ((0, 6), (1, 0))
    """

    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: tuple[int, int] = (0, 0)
    periodic: bool = False

    def __post_init__(self) -> None:
        if self.size < 0:
            raise InvalidArgumentError(f"`size` (={self.size}) must be 0 or more: it is the extent of the input.")
        for name in ("kernel", "stride", "dilation"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"`{name}` (={getattr(self, name)}) must be 1 or more.")
        if len(self.padding) != 2 or min(self.padding) < 0:
            raise InvalidArgumentError(f"`padding` (={self.padding}) must be a pair (low, high), each 0 or more.")
        padded = self.size + sum(self.padding)
        if self.span > padded:
            raise InvalidArgumentError(
                f"`kernel` (={self.kernel}) with dilation {self.dilation} spans {self.span} inputs, which must be at "
                f"most the padded input's {padded} (size {self.size}, padding {self.padding}): there would be no "
                "output."
            )
        if self.periodic and self.size == 0:
            raise InvalidArgumentError(
                "`size` (=0) must be 1 or more in a periodic dimension: there is nothing to wrap around."
            )

    @property
    def span(self) -> int:
        """The inputs from the first to the last that one window reads."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def outputs(self) -> int:
        """The number of outputs, always 1 or more."""
        return (self.size + sum(self.padding) - self.span) // self.stride + 1

    def output_range(self, p: int, i: int) -> Range:
        """Return the balanced output block of worker `i` of `p`."""
        return balanced_range(self.outputs, p, i)

    def input_range(self, outputs: Range) -> Range:
        """Return the range of inputs that the windows of `outputs` read, including padding.

        It may reach below 0 and above `size`. Its length is (count - 1) * stride + span, so that its windows give
        exactly `count` outputs; or 0 if `outputs` is empty.
        """
        start, stop = outputs
        first = start * self.stride - self.padding[0]
        if start >= stop:
            first = min(max(first, 0), self.size)
            return first, first
        return first, (stop - 1) * self.stride - self.padding[0] + self.span

    def input_ranges(self, p: int) -> tuple[Range, ...]:
        """Return the input range of each of `p` workers' balanced output blocks."""
        return tuple(self.input_range(self.output_range(p, i)) for i in range(p))

    def clipped(self, wanted: Range) -> tuple[Range, tuple[int, int]]:
        """Return the part of an input range that workers own, and the padding (low, high) to add around it.

        In a periodic dimension all of it is owned, and there is no padding.
        """
        if self.periodic:
            return wanted, (0, 0)
        length = wanted[1] - wanted[0]
        low = min(max(-wanted[0], 0), length)  # all of it, if the range ends below 0
        start, stop = intersect_ranges(wanted, (0, self.size))
        start, stop = min(start, self.size), min(stop, self.size)
        return (start, stop), (low, length - low - (stop - start))


@dataclass(frozen=True)
class WindowSpec:
    """Windows over D feature dimensions: an entry for each, and the padding mode."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Pairs
    mode: PaddingMode = "zeros"

    def along(self, d: int, size: int) -> WindowedAxis:
        """Return the windows along feature dimension `d` of a tensor of `size` there."""
        low, high = self.padding[d]
        limit = widest(self.mode, size)
        if limit is not None and max(low, high) > limit:
            raise PlanError(
                f"`padding` (={self.padding[d]}) in feature dimension {d} must be at most {limit} there: the tensor "
                f"has length {size}, and padding_mode is {self.mode!r}."
            )
        wraps = self.mode == "circular"
        try:
            return WindowedAxis(size, self.kernel[d], self.stride[d], self.dilation[d], (low, high), wraps)
        except InvalidArgumentError as error:
            raise PlanError(f"In feature dimension {d}: {error}") from None


def window_spec(
    dims: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, mode: PaddingMode = "zeros"
) -> WindowSpec:
    """Return the windows over `dims` feature dimensions for a layer's arguments.

    **Raises:** `InvalidArgumentError` for an argument that is not accepted.
    """
    kernel = per_feature("kernel_size", kernel_size, dims)
    stride = per_feature("stride", stride, dims)
    dilation = per_feature("dilation", dilation, dims)
    pairs: Pairs
    if isinstance(padding, str) and padding == "valid":
        pairs = ((0, 0),) * dims
    elif isinstance(padding, str) and padding == "same":
        if any(s != 1 for s in stride):
            raise InvalidArgumentError(f"`padding` (='same') requires a stride of 1, but `stride` is {stride}.")
        pairs = tuple(same_padding(k, d) for k, d in zip(kernel, dilation, strict=True))
    else:
        pairs = padding_pairs(padding, dims)
    if mode not in WINDOW_MODES:
        raise InvalidArgumentError(f"`padding_mode` (={mode!r}) must be one of {WINDOW_MODES}.")
    return WindowSpec(kernel, stride, dilation, pairs, mode)
