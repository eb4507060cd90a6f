"""Transposed convolutions: the adjoints of the convolutions' windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.kernels.algorithm_choice import chosen_unseen
from distdl_jax.kernels.conv_transpose import LocalTransposedConvolution
from distdl_jax.kernels.convolution import Choose, in_equal_forms
from distdl_jax.layer.matmul_plan import ProductPlan, products
from distdl_jax.layer.parameters import ParameterPartitions, ParamShapeDtypes
from distdl_jax.nn.conv import DistributedConv
from distdl_jax.partition import Partition
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_ranges, balanced_sizes, index_of
from distdl_jax.plans.halos import Halos
from distdl_jax.primitives.block_checks import owned_grid
from distdl_jax.primitives.broadcast import plan_broadcast
from distdl_jax.primitives.halo_exchange import plan_ranges
from distdl_jax.primitives.plan import ShapeDtypes
from distdl_jax.primitives.sum_reduce import plan_sum_reduce
from distdl_jax.validation import Padding, Sizes, is_integer

Ranges = tuple[tuple[Range, ...], ...]


@dataclass(frozen=True, init=False, repr=False)
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

    - `P_x`, `P_y`, `P_W`, `in_channels`, `out_channels`, `kernel_size`, `stride`, `dilation`, `groups`, `bias`: as in
      the convolutions.
    - `sharded`: whether the parameters are cut, W along n_ci and b along n_co, as in the convolutions.
    - `padding`: an integer, one for each feature dimension, or a pair (low, high) for each: how many outputs are left
      out at the ends.
    - `output_padding`: how many outputs are added at the high ends, less than stride or dilation.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit; when applied, `PlanError` where x or a parameter doesn't.

    Source: PyTorch's ConvTranspose1d, 2d and 3d; Hewett and Grady (2020), adjoints of convolutions.
    """

    output_padding: tuple[int, ...]

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
        *,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        sharded: bool = False,
    ) -> None:
        if isinstance(padding, str):
            raise InvalidArgumentError(f"`padding` (={padding!r}) must be numbers in a transposed convolution.")
        super().__init__(
            P_x,
            P_y,
            P_W,
            in_channels=in_channels,
            out_channels=out_channels,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
            sharded=sharded,
        )
        given = output_padding if isinstance(output_padding, Sequence | np.ndarray) else (output_padding,) * self.dims
        limits = [max(pair) for pair in zip(self.stride, self.dilation, strict=True)]
        if len(given) != self.dims or not all(
            is_integer(extra, least=0) and extra < limit for extra, limit in zip(given, limits, strict=False)
        ):
            raise InvalidArgumentError(
                f"`output_padding` (={output_padding!r}) must be an integer of 0 or more, below stride or dilation "
                f"({', '.join(map(str, limits))}), or one for each of {self.dims} feature dimensions."
            )
        vars(self).update(output_padding=tuple(map(int, given)))

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        weight = (self.in_channels, self.out_channels // self.groups, *self.kernel_size)
        return {"weight": weight} | ({"bias": (self.out_channels,)} if self.bias else {})

    @cached_property
    def _parameters(self) -> ParameterPartitions:
        # P_ci x P_co; with groups, whole ones on each worker along the output channels, P_ci is 1.
        return ParameterPartitions(self._partitions.work, self.sharded, inputs_first=self.groups == 1)

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes, choose: Choose = chosen_unseen) -> ProductPlan:
        # The algorithms are those of the ordinary convolution that it is; with stride and dilation there is no choice.
        parts = self._partitions
        owned = owned_grid("x", self.P_x, x)
        self._check_channels(owned)
        outputs, inputs = self._ranges(owned)
        fetch = plan_ranges("windows", x, self.P_x, Halos(owned, (*owned.ranges[:2], *inputs)))
        fetched = fetch.after(x)
        to_work = plan_broadcast(fetched, parts.x, parts.work)
        of_params = self._parameters.plan(params, self.bias)
        local = self._transposed(outputs, inputs)
        copies = to_work.after(fetched)
        parts_of_y = products(copies, of_params, local)
        if all(product.is_by_phases for product in local.values()):
            local = in_equal_forms(local, copies, parts_of_y, choose)
        to_y = plan_sum_reduce(parts_of_y, parts.work, parts.y)
        return ProductPlan(to_work, of_params, parts_of_y, to_y, local, fetch)

    def _ranges(self, owned: ProductGrid) -> tuple[Ranges, Ranges]:
        """Return, per feature dimension and worker along it, the ranges of its outputs and of the inputs they read."""
        outputs, inputs = [], []
        along = zip(self.kernel_size, self.stride, self.dilation, self.padding, self.output_padding, strict=True)
        for d, (k, s, dilation, (low, high), extra) in enumerate(along):
            n, reach = owned.extent[d + 2], dilation * (k - 1)
            total = (n - 1) * s - low - high + reach + extra + 1
            if n == 0 or total < 1:
                raise PlanError(
                    f"In feature dimension {d}: `x` has length {n}, of which stride {s}, `padding` (={(low, high)}) "
                    f"and a kernel of {k} make no output."
                )
            own = balanced_ranges(total, self.P_x.shape[d + 2])
            outputs.append(own)
            read = ((-((reach - low - start) // s), (stop - 1 + low) // s + 1) for start, stop in own)
            clipped = (tuple(min(max(bound, 0), n) for bound in bounds) for bounds in read)
            inputs.append(tuple((a, b) if a < b else (0, 0) for a, b in clipped))
        return tuple(outputs), tuple(inputs)

    def _transposed(self, outputs: Ranges, inputs: Ranges) -> dict[int, LocalTransposedConvolution]:
        """Return the product of each worker that multiplies."""
        work, (p_co, p_ci) = self._partitions.work, self._partitions.channels
        local = {}
        for rank, worker in enumerate(work.ranks):
            _, i, j, *index = index_of(rank, work.shape)
            channels, groups = self._own_groups(i, j)
            if self.groups > 1:
                c_in, c_out = self.in_channels // p_co, self.out_channels // self.groups
            else:
                c_in, c_out = balanced_sizes(self.in_channels, p_ci)[j], balanced_sizes(self.out_channels, p_co)[i]
            local[worker] = LocalTransposedConvolution(
                (c_in, c_out, *self.kernel_size),
                channels,
                groups,
                self.stride,
                self.dilation,
                tuple(ranges[at] for ranges, at in zip(inputs, index, strict=True)),
                tuple(ranges[at] for ranges, at in zip(outputs, index, strict=True)),
                tuple(low for low, _ in self.padding),
                adds_bias=j == 0,
            )
        return local


class DistributedConvTranspose1d(DistributedConvTranspose):
    """`DistributedConvTranspose` of N x C x n_0 tensors."""

    dims = 1


class DistributedConvTranspose2d(DistributedConvTranspose):
    """`DistributedConvTranspose` of N x C x n_1 x n_0 tensors."""

    dims = 2


class DistributedConvTranspose3d(DistributedConvTranspose):
    """`DistributedConvTranspose` of N x C x n_2 x n_1 x n_0 tensors."""

    dims = 3
