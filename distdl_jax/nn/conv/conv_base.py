"""The base of the convolutions: the general algorithm; the feature and channel ones are special cases."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass
from functools import cached_property
from typing import ClassVar, Literal

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.convolutions import Channels, ConvPartitions, Kind, conv_partitions, plan_convolution
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.functional.products import ProductPlan
from distdl_jax.functional.sliding_windows import TransposedWindowsPlan, WindowsPlan, plan_windows
from distdl_jax.nn.base.input_checks import check_features
from distdl_jax.nn.base.parameters import ParamShapeDtypes
from distdl_jax.nn.base.weighted_layer import WeightedLayer, check_not_split, weight_partition
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.padding import PaddingMode
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.plans.windows import WindowSpec, window_spec
from distdl_jax.validation import Padding, Sizes, is_integer


@dataclass(frozen=True)
class DistributedConv(WeightedLayer):
    """The base of the convolutions, of any number of dimensions; see `DistributedConv2d`.

    - `dims`: the number of feature dimensions.
    - `_required_kind`: the one algorithm that a class accepts; None for all."""

    dims: ClassVar[int]
    _required_kind: ClassVar[Kind | None] = None

    P_x: Partition
    P_y: Partition | None = None
    P_W: Partition | None = None
    _: KW_ONLY
    in_channels: int
    out_channels: int
    kernel_size: Sizes
    stride: Sizes = 1
    padding: Padding = 0
    dilation: Sizes = 1
    groups: int = 1
    bias: bool = True
    padding_mode: PaddingMode = "zeros"
    sharded: bool = False
    split: InitVar[Literal["in_channels", "out_channels"] | None] = None

    def __post_init__(self, split: str | None) -> None:
        w = self._windows
        # The fields, normalised so that equal layers compare equal.
        self._store(kernel_size=w.kernel, stride=w.stride, padding=w.padding, dilation=w.dilation)
        for name in ("groups", "in_channels", "out_channels"):
            number = getattr(self, name)
            if not is_integer(number, least=1):
                raise InvalidArgumentError(f"`{name}` (={number!r}) must be an integer, 1 or more.")
            if number % self.groups:
                raise InvalidArgumentError(f"`{name}` (={number}) must be divisible by `groups` (={self.groups}).")
        channels = {"in_channels": self.in_channels, "out_channels": self.out_channels}
        P_y, P_W = given_or_derived(self.dims, self.P_x, self.P_y, self.P_W, split, channels, self.groups)
        self._store(P_y=P_y, P_W=P_W)
        if self._required_kind not in (None, self.kind):
            raise InvalidArgumentError(
                f"P_x, P_y and P_W need the {self.kind} algorithm, but this class implements the {self._required_kind} "
                "one."
            )

    @cached_property
    def _partitions(self) -> ConvPartitions:
        return conv_partitions(self.dims, self.P_x, self.P_y, self.P_W, self.groups)

    @property
    def _work(self) -> Partition:
        return self._partitions.work

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        weight = (self.out_channels, self.in_channels // self.groups, *self._windows.kernel)
        return {"weight": weight} | ({"bias": (self.out_channels,)} if self.bias else {})

    @cached_property
    def _windows(self) -> WindowSpec:
        return window_spec(self.dims, self.kernel_size, self.stride, self.padding, self.dilation, self.padding_mode)

    @property
    def kind(self) -> Kind:
        """The algorithm that the partitions need."""
        return self._partitions.kind

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> ProductPlan:
        windows, weights = self._plan_windows(x), self._plan_weights(params)
        channels = Channels(self.in_channels, self.out_channels, self.groups)
        return plan_convolution(x, windows, weights, self.P_x, self.output_partition, self._partitions, channels)

    def _plan_windows(self, x: ShapeDtypes) -> WindowsPlan | TransposedWindowsPlan:
        return plan_windows(x, self.P_x, self._windows)

    def __repr__(self) -> str:
        w = self._windows
        shown = [f"{self.in_channels} -> {self.out_channels}", f"kernel {shape_text(w.kernel)}"]
        steps = {"stride": w.stride, "dilation": w.dilation}
        shown += [f"{name} {values}" for name, values in steps.items() if set(values) != {1}]
        if set(w.padding) != {(0, 0)}:
            shown.append(f"padding {w.padding} {w.mode}")
        if self.groups > 1:
            shown.append(f"groups {self.groups}")
        shown += ["sharded"] * self.sharded
        work = self._partitions.work.shape
        shown += [f"P_x {shape_text(self.P_x.shape)}", f"P_W {shape_text(work if work[0] > 1 else work[1:])}"]
        return f"{type(self).__name__}[{self.kind}]({', '.join(shown)})"


def given_or_derived(
    dims: int,
    P_x: Partition,
    P_y: Partition | None,
    P_W: Partition | None,
    split: str | None,
    channels: dict[str, int],
    groups: int,
) -> tuple[Partition, Partition] | tuple[None, None]:
    """Return P_y and P_W, given or derived from P_x; both None if x and y are on one partition that cuts no channels.

    - `split`, `channels`: the side along which a derived weight is cut, "in_channels" or "out_channels"; and the
      numbers of both channels.
    """
    check_features(P_x, dims)
    check_partitions(P_x=P_x, **{name: P for name, P in (("P_y", P_y), ("P_W", P_W)) if P is not None})
    P_y = P_x if P_y is None else P_y
    if P_y.dim != dims + 2 or (P_y.shape[0], *P_y.shape[2:]) != (P_x.shape[0], *P_x.shape[2:]):
        raise InvalidArgumentError(
            f"`P_y` ({shape_text(P_y.shape)}) must split batch and features as `P_x` ({shape_text(P_x.shape)}) does."
        )
    if P_W is not None:
        check_not_split(split)
        return P_y, P_W
    P_W = weight_partition(P_x, P_y, 1, split, channels, grouped=groups > 1 and P_x.shape[1] > 1)
    return (None, None) if P_x.shape[1] == 1 and P_x == P_y else (P_y, P_W)
