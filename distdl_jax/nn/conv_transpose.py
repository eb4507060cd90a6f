"""Transposed convolutions: the adjoints of the convolutions' windows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.kernels.conv_transpose import TransposedProblem
from distdl_jax.layer.parameters import ParameterPartitions
from distdl_jax.nn.conv import DistributedConv
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_range, balanced_ranges, balanced_sizes
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.windows import PaddingMode
from distdl_jax.primitives.block_checks import owned_grid
from distdl_jax.primitives.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.primitives.plan import ShapeDtypes
from distdl_jax.validation import is_integer


@dataclass(frozen=True, repr=False)
class DistributedConvTranspose(DistributedConv):
    r"""The adjoint of a convolution with respect to its input, as a layer: it enlarges x where the stride is above 1.

    y[o] = sum over inputs i and taps t with i * stride - low + dilation * t = o of W[t]^T x[i], plus b. Of n inputs a
    feature dimension makes (n - 1) * stride - low - high + dilation * (kernel - 1) + output_padding + 1 outputs.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_{D-1} x ... x n_0 | P_x: P_n x P_ci x P_{D-1} x ... x P_0 |
    | y | n_b x n_co x m_{D-1} x ... x m_0 | P_y: P_n x P_co x P_{D-1} x ... x P_0 |
    | W (`params["weight"]`) | n_ci x n_co/groups x kernel, as in PyTorch | P_ci x P_co, of P_W's first slice |
    | b (`params["bias"]`) | n_co | P_co, its first column |

    P_x, P_y and P_W, and what may be split, are as in the convolutions: each worker fetches the inputs that its
    balanced block of outputs reads, multiplies, and products are summed where input channels are split.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`, `split`, `in_channels`, `out_channels`, `kernel_size`, `stride`, `dilation`, `groups`,
      `bias`: as in the convolutions.
    - `sharded`: whether the parameters are cut, W along n_ci and b along n_co, as in the convolutions.
    - `padding`: an integer, one for each feature dimension, or a pair (low, high) for each: how many outputs are left
      out at the ends.
    - `output_padding`: how many outputs are added at the high ends, less than stride or dilation.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit; when applied, `PlanError` where x or a parameter doesn't.

    Source: PyTorch's ConvTranspose1d, 2d and 3d; Hewett and Grady (2020), adjoints of convolutions.
    """

    padding_mode: PaddingMode = field(default="zeros", init=False)
    output_padding: int | Sequence[int] = field(default=0, kw_only=True)

    def __post_init__(self, split: str | None) -> None:
        if isinstance(self.padding, str):
            raise InvalidArgumentError(f"`padding` (={self.padding!r}) must be numbers in a transposed convolution.")
        super().__post_init__(split)
        vars(self).update(output_padding=self._extra)

    @cached_property
    def _extra(self) -> tuple[int, ...]:
        """The output padding of each feature dimension."""
        given = self.output_padding
        values = tuple(given) if isinstance(given, Sequence | np.ndarray) else (given,) * self.dims
        limits = [max(pair) for pair in zip(self._windows.stride, self._windows.dilation, strict=True)]
        if len(values) != self.dims or not all(
            is_integer(extra, least=0) and extra < limit for extra, limit in zip(values, limits, strict=True)
        ):
            raise InvalidArgumentError(
                f"`output_padding` (={given!r}) must be an integer of 0 or more, below stride or dilation "
                f"({', '.join(map(str, limits))}), or one for each of {self.dims} feature dimensions."
            )
        return tuple(map(int, values))

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        weight = (self.in_channels, self.out_channels // self.groups, *self._windows.kernel)
        return {"weight": weight} | ({"bias": (self.out_channels,)} if self.bias else {})

    @cached_property
    def _parameters(self) -> ParameterPartitions:
        # P_ci x P_co; with groups, whole ones on each worker along the output channels, P_ci is 1.
        return ParameterPartitions(self._partitions.work, self.sharded, inputs_first=self.groups == 1)

    def _fetch(self, x: ShapeDtypes) -> RangesPlan:
        owned = owned_grid("x", self.P_x, x)
        self._check_channels(owned)
        inputs, w = [], self._windows
        along = zip(w.kernel, w.stride, w.dilation, w.padding, self._outputs(owned), strict=True)
        for d, (k, s, dilation, (low, _), total) in enumerate(along, 2):
            n, reach = owned.extent[d], dilation * (k - 1)
            own = balanced_ranges(total, self.P_x.shape[d])
            read = ((-((reach - low - start) // s), (stop - 1 + low) // s + 1) for start, stop in own)
            clipped = (tuple(min(max(bound, 0), n) for bound in bounds) for bounds in read)
            inputs.append(tuple((a, b) if a < b else (0, 0) for a, b in clipped))
        return plan_ranges("windows", x, self.P_x, Halos(owned, (*owned.ranges[:2], *inputs)))

    def _outputs(self, owned: ProductGrid) -> tuple[int, ...]:
        """Return the number of outputs along each feature dimension."""
        w = self._windows
        totals: list[int] = []
        along = zip(w.kernel, w.stride, w.dilation, w.padding, self._extra, strict=True)
        for d, (k, s, dilation, (low, high), extra) in enumerate(along):
            n = owned.extent[d + 2]
            totals.append((n - 1) * s - low - high + dilation * (k - 1) + extra + 1)
            if n == 0 or totals[d] < 1:
                raise PlanError(
                    f"In feature dimension {d}: `x` has length {n}, of which stride {s}, `padding` (={(low, high)}) "
                    f"and a kernel of {k} make no output."
                )
        return tuple(totals)

    def _patterns(self, fetch: RangesPlan) -> Sequence[Sequence[Hashable]]:
        batch, channels, *features = fetch.halos.patterns
        on_features = (
            [(pattern, self._ranges(fetch, d, i)) for i, pattern in enumerate(patterns)]
            for d, patterns in enumerate(features)
        )
        return (batch, channels, *on_features)

    def _ranges(self, fetch: RangesPlan, d: int, i: int) -> tuple[Range, Range]:
        """Return the ranges of inputs and outputs at index `i` along feature dimension `d`, moved to lie at 0.

        Both are moved by as many strides, which changes nothing: so workers inside a tensor have the same problem.
        """
        s, (low, _) = self._windows.stride[d], self._windows.padding[d]
        first, last = fetch.halos.needed[d + 2][i]
        start, stop = balanced_range(self._outputs(fetch.halos.owned)[d], self.P_x.shape[d + 2], i)
        by = (start + low) // s
        return (first - by, last - by), (start - by * s, stop - by * s)

    def _problem(
        self, fetch: RangesPlan, x: ShapeDtype, groups: int, channels: tuple[int, int], index: Sequence[int]
    ) -> TransposedProblem:
        (p_co, p_ci), (i, j), w = self._partitions.channels, channels, self._windows
        if self.groups > 1:
            c_in, c_out = self.in_channels // p_co, self.out_channels // self.groups
        else:
            c_in, c_out = balanced_sizes(self.in_channels, p_ci)[j], balanced_sizes(self.out_channels, p_co)[i]
        inputs, outputs = zip(*(self._ranges(fetch, d, at) for d, at in enumerate(index)), strict=True)
        return TransposedProblem(
            x.shape,
            (c_in, c_out, *w.kernel),
            groups,
            x.dtype.name,
            w.stride,
            w.dilation,
            inputs=inputs,
            outputs=outputs,
            low=tuple(low for low, _ in w.padding),
        )


class DistributedConvTranspose1d(DistributedConvTranspose):
    """`DistributedConvTranspose` of N x C x n_0 tensors."""

    dims = 1


class DistributedConvTranspose2d(DistributedConvTranspose):
    """`DistributedConvTranspose` of N x C x n_1 x n_0 tensors."""

    dims = 2


class DistributedConvTranspose3d(DistributedConvTranspose):
    """`DistributedConvTranspose` of N x C x n_2 x n_1 x n_0 tensors."""

    dims = 3


class DistributedConvTranspose4d(DistributedConvTranspose):
    """`DistributedConvTranspose` of N x C x n_3 x n_2 x n_1 x n_0 tensors."""

    dims = 4
