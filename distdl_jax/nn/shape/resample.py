"""Upsampling, adaptive pooling, padding and cropping: layers whose outputs read a few inputs along each dimension."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from numbers import Number, Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.block_checks import common_dtype, owned_grid
from distdl_jax.functional.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.functional.repartition import RepartitionPlan, plan_repartition
from distdl_jax.functional.sampling import SamplingPlan, Taps, plan_sampling
from distdl_jax.kernels.dtypes import mean_dtype
from distdl_jax.nn.base.layer import ParameterFreeLayer
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.padding import PAD_MODES, filled_from, fills, widest
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import check_length, is_integer, is_real, per_feature


@dataclass(frozen=True)
class MovedPlan(Plan):
    """The plan `first`, followed by the movement `move`."""

    first: SamplingPlan
    move: RepartitionPlan

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted({*self.first.workers, *self.move.workers}))

    def output(self, worker: int) -> ShapeDtype:
        return self.move.output(worker) if worker in self.move.workers else self.first.output(worker)

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block of the output, from its block `x`."""
        return self.move.run(world, self.first.run(world, x))


class Sampling(ParameterFreeLayer):
    """The base of these layers: a subclass determines, from the tensor's shape, the inputs of each output."""

    P_x: Partition

    def _fill(self, dtype: np.dtype) -> float:
        """Return the value of outputs that read nothing, for an x of `dtype`."""
        return 0.0

    def _dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the output, from the dtype of x."""
        return dtype

    @abstractmethod
    def _taps(self, extent: tuple[int, ...]) -> list[Taps | None]:
        """Return the taps along each dimension of x; None if outputs equal inputs."""

    def _plan(self, x: ShapeDtypes, params: object) -> SamplingPlan | MovedPlan:
        return self._sampling(x)

    def _sampling(self, x: ShapeDtypes) -> SamplingPlan:
        blocks = taking_part(x, self.P_x.ranks)
        dtype = common_dtype("x", blocks, self.P_x.ranks)
        taps = self._taps(owned_grid("x", self.P_x, blocks).extent)
        return plan_sampling(blocks, self.P_x, taps, self._dtype(dtype), self._fill(dtype))


@dataclass(frozen=True)
class DistributedUpsample(Sampling):
    """Enlarge the features of x, N x C x n_{D-1} x ... x n_0, for any D; all dimensions may be split.

    Each worker reads the inputs of its balanced block of outputs: its own and at most a few from its neighbours.

    Along a feature dimension of length n, output o of m reads the input

    | mode | input | as in |
    |---|---|---|
    | "nearest" | floor(o n / m) | PyTorch's "nearest" |
    | "nearest-exact" | floor((o + 1/2) n / m), whose center is nearest | `jax.image.resize(x, shape, "nearest")` |

    which are equal if m is a multiple of n. With `scale_factor`, it stands in place of m / n.

    **Arguments:**

    - `P_x`: the partition of the input, P_n x P_c x P_{D-1} x ... x P_0; `P_y`: the output's, if different.
    - `size`, `scale_factor`: one of the two: the lengths of the output's features, or the factor by which the
      input's are multiplied (the product is rounded down); a number, or one for each feature dimension.
    - `mode`: "nearest", "nearest-exact", or "linear" ("bilinear", "trilinear"): between two inputs along each feature
      dimension, without smoothing where the output is smaller.
    - `align_corners`: in linear modes, whether the first and last inputs and outputs are aligned, or their cells cover
      the same range.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; `PlanError` if
    x doesn't fit.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> DistributedUpsample(P, scale_factor=2)(jnp.array([[[1.0, 2.0]]])).tolist()
    [[[1.0, 1.0, 2.0, 2.0]]]

    Source: PyTorch's Upsample; jax.image.resize.
    """

    P_x: Partition
    P_y: Partition | None = None
    _: KW_ONLY
    size: int | Sequence[int] | None = None
    scale_factor: float | Sequence[float] | None = None
    mode: str = "nearest"
    align_corners: bool = False

    def __post_init__(self) -> None:
        check_feature_partitions(self.P_x, self.P_y)
        if (self.size is None) == (self.scale_factor is None):
            raise InvalidArgumentError(
                f"Exactly one of `size` (={self.size!r}) and `scale_factor` (={self.scale_factor!r}) must be given."
            )
        nearest, linear = ("nearest", "nearest-exact"), ("linear", "bilinear", "trilinear")
        if self.mode not in (*nearest, *linear):
            raise InvalidArgumentError(
                f"`mode` (={self.mode!r}) must be one of {', '.join(map(repr, (*nearest, *linear)))}."
            )
        if self.align_corners and self.mode in nearest:
            raise InvalidArgumentError(f"`align_corners` (=True) must be False if `mode` is {self.mode!r}.")
        # The fields, normalised so that equal layers compare equal.
        self._store(size=self._sizes, scale_factor=self._scales, mode="linear" if self.mode in linear else self.mode)

    @cached_property
    def _sizes(self) -> tuple[int, ...] | None:
        return None if self.size is None else per_feature("size", self.size, self.P_x.dim - 2)

    @cached_property
    def _scales(self) -> tuple[float, ...] | None:
        if self.scale_factor is None:
            return None
        given, dims = self.scale_factor, self.P_x.dim - 2
        scales = tuple(given) if isinstance(given, Sequence | np.ndarray) else (given,) * dims
        if len(scales) != dims or not all(is_real(scale) and scale > 0 for scale in scales):
            raise InvalidArgumentError(f"`scale_factor` (={given!r}) must be a number above 0 or {dims} of them.")
        return scales

    def _plan(self, x: ShapeDtypes, params: object) -> SamplingPlan | MovedPlan:
        dtype = x[self.P_x.ranks[0]].dtype
        if self.mode == "linear" and not jnp.issubdtype(dtype, jnp.inexact):
            raise PlanError(f"`x` must be floating if `mode` is 'linear', but is {dtype}.")
        plan = self._sampling(x)
        return plan if self.P_y is None else MovedPlan(plan, plan_repartition(plan.after(x), self.P_x, self.P_y))

    def _taps(self, extent: tuple[int, ...]) -> list[Taps | None]:
        return [None, None, *(self._along(d, n) for d, n in enumerate(extent[2:]))]

    def _along(self, d: int, n: int) -> Taps:
        scale = None if self._scales is None else self._scales[d]
        outputs = math.floor(n * scale) if scale is not None else (self._sizes or ())[d]
        if scale is not None and n and not outputs:
            raise PlanError(f"`scale_factor` (={scale:g} in feature dimension {d}) leaves nothing of {n} elements.")
        name = "size" if scale is None else "scale_factor"
        check_length(name, getattr(self, name), outputs)
        o = np.arange(outputs)
        if self.mode != "linear":
            halves = 2 * o + (self.mode == "nearest-exact")  # whole numbers, which divide exactly
            inputs = halves * n // (2 * outputs) if scale is None else np.floor(halves / (2 * scale)).astype(int)
            inputs = np.minimum(inputs, n - 1)
            return Taps(inputs[None], np.ones((1, outputs)))
        if self.align_corners:
            places = o * ((n - 1) / max(outputs - 1, 1))
        else:
            places = np.maximum((o + 0.5) * (n / outputs if scale is None else 1 / scale) - 0.5, 0)
        low = np.minimum(np.floor(places).astype(int), n - 1)
        high = np.minimum(low + 1, n - 1)
        return Taps(np.stack([low, high]), np.stack([1 - (places - low), places - low]))


@dataclass(frozen=True, init=False)
class DistributedAdaptiveAvgPool(Sampling):
    """The mean over windows for an output of fixed size, of N x C x features split in any dimensions.

    Along a feature dimension of length n, output o of m is the mean of the inputs from floor(o n / m) to before
    ceil((o + 1) n / m), as in PyTorch's AdaptiveAvgPool1d, 2d and 3d. The mean of integers is a floating-point number.
    For one output use `DistributedGlobalAvgPool`.

    **Arguments:**

    - `P_x`: the partition of input and output, of 3 dimensions or more.
    - `output_size`: m, a number, or one for each feature dimension, None to keep the length.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; `PlanError` if
    x doesn't fit.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = DistributedAdaptiveAvgPool(P, (3, 2))
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8), P)).block_shapes
    {0: (5, 3, 2, 1), 1: (5, 3, 2, 1), 2: (5, 3, 1, 1), 3: (5, 3, 1, 1)}
    """

    P_x: Partition
    output_size: tuple[int | None, ...]

    def __init__(self, P_x: Partition, output_size: int | Sequence[int | None]) -> None:
        check_feature_partitions(P_x)
        sizes = output_size if isinstance(output_size, Sequence | np.ndarray) else (output_size,) * (P_x.dim - 2)
        if len(sizes) != P_x.dim - 2 or not all(m is None or is_integer(m, least=1) for m in sizes):
            raise InvalidArgumentError(
                f"`output_size` (={output_size!r}) must be an integer, 1 or more, or {P_x.dim - 2} of them or None."
            )
        for m in sizes:
            check_length("output_size", output_size, m or 0)
        self._store(P_x=P_x, output_size=tuple(m if m is None else int(m) for m in sizes))

    def _dtype(self, dtype: np.dtype) -> np.dtype:
        return mean_dtype(dtype)

    def _taps(self, extent: tuple[int, ...]) -> list[Taps | None]:
        along = zip(self.output_size, extent[2:], strict=True)
        return [None, None, *(None if m is None else _means(n, m) for m, n in along)]


def _means(n: int, m: int) -> Taps:
    o = np.arange(m)
    starts, stops = o * n // m, -(-(o + 1) * n // m)
    lengths = stops - starts
    k = np.arange(max(int(np.max(lengths, initial=0)), 1))[:, None]
    inside = k < lengths
    return Taps(np.where(inside, starts + k, starts), inside / np.maximum(lengths, 1))


@dataclass(frozen=True)
class DistributedPad(Sampling):
    """Pad a tensor, which may be split in any dimensions, or crop it where a width is negative.

    **Arguments:**

    - `P_x`: the partition of input and output, with as many dimensions as x.
    - `padding`: pairs (low, high) for the last dimensions of x, in the order of the dimensions.
    - `mode`: "constant", "reflect" (without the boundary itself), "replicate" (the boundary) or "circular".
    - `value`: the constant, a number that x's dtype can hold.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; `PlanError` if
    x doesn't fit.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = DistributedPad(P, [(1, 1), (0, 2)], mode="reflect")
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8), P)).block_shapes
    {0: (5, 3, 6, 5), 1: (5, 3, 6, 5), 2: (5, 3, 5, 5), 3: (5, 3, 5, 5)}

    Source: PyTorch's functional.pad, and its padding layers; numpy's pad.
    """

    P_x: Partition
    padding: Sequence[tuple[int, int]]
    mode: str = "constant"
    value: float = 0.0

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)
        pairs = _pairs(self.padding)
        if pairs is None or len(pairs) > self.P_x.dim:
            raise InvalidArgumentError(
                f"`padding` (={self.padding!r}) must be pairs (low, high) of integers for at most {self.P_x.dim} "
                "dimensions."
            )
        if self.mode not in PAD_MODES:
            raise InvalidArgumentError(f"`mode` (={self.mode!r}) must be one of {', '.join(map(repr, PAD_MODES))}.")
        if not isinstance(self.value, Number):
            raise InvalidTypeError(f"`value` (={self.value!r}) must be a number.")
        self._store(padding=pairs)  # normalised so that equal layers compare equal

    def _fill(self, dtype: np.dtype) -> Any:
        if self.mode == "constant" and not _can_hold(dtype, self.value):
            raise PlanError(f"`value` (={self.value!r}) must be a number that `x`, of {dtype}, can hold.")
        return self.value if self.mode == "constant" else 0.0

    def _taps(self, extent: tuple[int, ...]) -> list[Taps | None]:
        first = len(extent) - len(self.padding)
        pairs = zip(extent[first:], self.padding, strict=True)
        return [None] * first + [None if not any(pair) else self._along(n, *pair) for n, pair in pairs]

    def _along(self, n: int, low: int, high: int) -> Taps:
        limit = widest(self.mode, n)
        if n + low + high < 0 or (limit is not None and max(low, high) > limit):
            raise PlanError(
                f"`padding` (={(low, high)}) in mode {self.mode!r} must be at most {limit} along a dimension of length "
                f"{n}."
                if n + low + high >= 0
                else f"`padding` (={(low, high)}) removes more than the length {n} of the dimension."
            )
        check_length("padding", (low, high), n + low + high)
        places = np.arange(-low, n + high)
        ones = np.ones((1, places.size))
        if self.mode == "circular":
            return Taps(places[None], ones, periodic=True)
        if fills(self.mode):
            return Taps(filled_from(self.mode, places, n)[None], ones)
        inside = (places >= 0) & (places < n)
        return Taps(np.clip(places, 0, n - 1)[None], inside[None].astype(float))


class DistributedCrop(DistributedPad):
    """Crop the ends of a tensor, which may be split in any dimensions, as U-Nets do.

    **Arguments:**

    - `P_x`: the partition of input and output, with as many dimensions as x.
    - `cropping`: pairs (low, high) for the last dimensions of x, in the order of the dimensions: how many
      elements to remove.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; `PlanError` if
    x doesn't fit.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = DistributedCrop(P, [(1, 1), (0, 2)])
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8), P)).block_shapes
    {0: (5, 3, 4, 3), 1: (5, 3, 4, 3), 2: (5, 3, 3, 3), 3: (5, 3, 3, 3)}
    """

    def __init__(self, P_x: Partition, cropping: Sequence[tuple[int, int]]) -> None:
        pairs = _pairs(cropping)
        if pairs is None or any(width < 0 for pair in pairs for width in pair):
            raise InvalidArgumentError(f"`cropping` (={cropping!r}) must be pairs (low, high) of integers, 0 or more.")
        super().__init__(P_x, [(-low, -high) for low, high in pairs])


def _can_hold(dtype: np.dtype, number: Any) -> bool:
    """Say whether a number of `dtype` can be `number`, rounded if floating."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    if not isinstance(number, Real):
        return False
    value: Any = number
    if jnp.issubdtype(dtype, jnp.floating):
        return not math.isfinite(value) or abs(value) <= float(jnp.finfo(dtype).max)
    lowest, highest = (0, 1) if dtype == np.bool_ else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return math.isfinite(value) and value == int(value) and lowest <= value <= highest


def _pairs(value: Any) -> tuple[tuple[int, int], ...] | None:
    """Return `value` as pairs of integers; None if it is anything else."""
    try:
        pairs = [tuple(pair) for pair in value]
    except TypeError:
        return None
    if not all(len(pair) == 2 and all(map(is_integer, pair)) for pair in pairs):
        return None
    return tuple((int(low), int(high)) for low, high in pairs)


def check_feature_partitions(P_x: Any, P_y: Any = None) -> None:
    """Reject partitions of fewer than 3 dimensions: batch, channels, and features."""
    given = {"P_x": P_x} if P_y is None else {"P_x": P_x, "P_y": P_y}
    check_partitions(**given)
    for name, P in given.items():
        if P.dim < 3 or P.dim != P_x.dim:
            raise InvalidArgumentError(
                f"`{name}` ({shape_text(P.shape)}) must have 3 dimensions or more: batch, channels, and "
                f"features{', as many as `P_x`' * (name == 'P_y')}."
            )
