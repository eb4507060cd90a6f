"""Random convolutions and poolings: layer, partitions, and how the input is cut into blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
from matrix.partitions import On, Shape

import distdl_jax as dj
from distdl_jax import nn

Range = tuple[int, int]


def balanced(n: int, p: int) -> list[Range]:
    """The first n mod p parts hold one more than the rest."""
    return cut([len(part) for part in np.array_split(np.arange(n), p)])


def cut(sizes: Sequence[int]) -> list[Range]:
    return list(pairwise(accumulate(sizes, initial=0)))


@dataclass(frozen=True)
class Drawn:
    """What a convolution and a pooling have in common.

    - `world`: the number of workers.
    - `padding`: what the layer is given; `pairs` what it means.
    - `sizes`: the features of the input; `cuts`: the ranges of its blocks, per dimension.
    """

    world: int
    P_x: On
    kernel: Shape
    stride: Shape
    dilation: Shape
    padding: Any
    pairs: tuple[Range, ...]
    batch: int
    channels: int
    sizes: Shape
    cuts: tuple[list[Range], ...]

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def x_shape(self) -> Shape:
        return self.batch, self.channels, *self.sizes

    @property
    def lengths(self) -> Shape:
        return tuple(
            (n + sum(pair) - d * (k - 1) - 1) // s + 1
            for n, pair, k, s, d in zip(self.sizes, self.pairs, self.kernel, self.stride, self.dilation, strict=True)
        )

    @property
    def x_boxes(self) -> dict[int, tuple[slice, ...]]:
        return self.P_x.boxes(self.cuts)


@dataclass(frozen=True)
class Conv(Drawn):
    P_y: On | None
    P_W: On | None
    out_channels: int
    groups: int
    bias: bool
    mode: str
    sharded: bool = False

    def layer(self, world: dj.Partition) -> Any:
        P_y, P_W = (None if P is None else P.partition(world) for P in (self.P_y, self.P_W))
        same = ("out_channels", "stride", "padding", "dilation", "groups", "bias", "sharded")
        options = {"in_channels": self.channels, "kernel_size": self.kernel, "padding_mode": self.mode}
        options |= {name: getattr(self, name) for name in same}
        return getattr(nn, f"DistributedConv{self.dims}d")(self.P_x.partition(world), P_y, P_W, **options)

    @property
    def y_shape(self) -> Shape:
        return self.batch, self.out_channels, *self.lengths

    @property
    def w_shape(self) -> Shape:
        return self.out_channels, self.channels // self.groups, *self.kernel

    @property
    def y_boxes(self) -> dict[int, tuple[slice, ...]]:
        """Balanced blocks; along the batch, x's."""
        P_y = self.P_y or self.P_x
        lines = [balanced(n, p) for n, p in zip(self.y_shape, P_y.shape, strict=True)]
        return P_y.boxes([self.cuts[0], *lines[1:]])


@dataclass(frozen=True)
class Pool(Drawn):
    kind: str
    count_include_pad: bool

    def layer(self, world: dj.Partition) -> Any:
        option: dict[str, Any] = {"dilation": self.dilation}
        if self.kind == "Avg":
            option = {"count_include_pad": self.count_include_pad}
        layer = getattr(nn, f"Distributed{self.kind}Pool{self.dims}d")
        return layer(self.P_x.partition(world), self.kernel, self.stride, self.padding, **option)

    @property
    def y_shape(self) -> Shape:
        return self.batch, self.channels, *self.lengths

    @property
    def y_boxes(self) -> dict[int, tuple[slice, ...]]:
        lines = [balanced(n, p) for n, p in zip(self.lengths, self.P_x.shape[2:], strict=True)]
        return self.P_x.boxes([*self.cuts[:2], *lines])


class Draw:
    """Draws layers for worlds of `workers` workers, with small integers everywhere."""

    def __init__(self, seed: Sequence[int], workers: int, dims: Sequence[int] = (1, 2, 3)) -> None:
        self.rng = np.random.default_rng(seed)
        self.workers = workers
        self.dims = dims

    def conv(self) -> Conv:
        dims, mode = self._one_of(*self.dims), self._one_of("zeros", "zeros", "circular", "reflect", "replicate")
        groups = self._one_of(1, 1, 1, 2, 3, 4)
        P_x, P_y, P_W = self._feature_split(dims) if self._chance(0.4) else self._channel_split(dims, groups)
        return Conv(
            **self._drawn(P_x, groups * self._upto(3), mode),
            P_y=P_y,
            P_W=P_W,
            out_channels=groups * self._upto(3),
            groups=groups,
            bias=self._chance(0.7),
            mode=mode,
            sharded=self._chance(0.4),
        )

    def pool(self) -> Pool:
        dims, kind = self._one_of(*self.dims), self._one_of("Max", "Avg")
        (P_x,) = self._teams(self._grid(dims + 2))
        return Pool(**self._drawn(P_x, self._upto(4), kind), kind=kind, count_include_pad=self._chance(0.5))

    def _feature_split(self, dims: int) -> tuple[On, None, None]:
        batch, *features = self._grid(dims + 1)
        return *self._teams((batch, 1, *features)), None, None

    def _channel_split(self, dims: int, groups: int) -> tuple[On, ...]:
        if groups == 1:
            batch, p_co, p_ci, *features = self._grid(dims + 3)
        else:
            p_co = self._one_of(*(p for p in range(1, self.workers + 1) if groups % p == 0))
            p_ci = self._one_of(1, p_co)
            batch, *features = self._grid(dims + 1, self.workers // p_co)
        if self._chance(0.3):
            features = [1] * dims
        P_W = (p_co, p_ci if groups == 1 else 1, *features)
        P_W = (batch, *P_W) if batch > 1 or self._chance(0.3) else P_W
        return self._teams((batch, p_ci, *features), (batch, p_co, *features), P_W)

    def _drawn(self, P_x: On, channels: int, kind: str) -> dict[str, Any]:
        """The arguments of `Drawn`; `kind` is the padding mode, or which pooling it is."""
        dims = len(P_x.shape) - 2
        most = (6, 4, 3, 3)[dims - 1]
        kernel, stride, dilation = (tuple(self._upto(n) for _ in range(dims)) for n in (most, 3, 3))
        if kind == "Avg":
            dilation = (1,) * dims
        spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        limits = [span - 1 if kind in ("Max", "Avg") else 4 for span in spans]
        padding: Any = tuple((self._upto(limit, least=0), self._upto(limit, least=0)) for limit in limits)
        pairs = padding
        if self._chance(0.2):
            padding, pairs = "valid", ((0, 0),) * dims
        elif self._chance(0.2):
            stride = (1,) * dims
            padding, pairs = "same", tuple(((span - 1) // 2, span // 2) for span in spans)
        elif self._chance(0.3):
            padding = tuple(low for low, _ in pairs)
            pairs = tuple((low, low) for low in padding)
        sizes = [self._upto((24, 10, 7, 5)[dims - 1], least=0) for _ in range(dims)]
        for d, (low, high) in enumerate(pairs):
            inside = {"circular": max(low, high), "reflect": max(low, high) + 1, "zeros": 0}.get(kind, 1)
            sizes[d] = max(sizes[d], inside, spans[d] - low - high)
        batch = self._upto(3, least=0 if self._chance(0.1) else 1)
        cuts = [self._cut(n, p) for n, p in zip((batch, channels, *sizes), P_x.shape, strict=True)]
        # A convolution's channels are balanced; a pooling takes them as they are.
        cuts[1] = cuts[1] if kind in ("Max", "Avg") else balanced(channels, P_x.shape[1])
        return {
            "world": self.workers,
            "P_x": P_x,
            "kernel": kernel,
            "stride": stride,
            "dilation": dilation,
            "padding": padding,
            "pairs": pairs,
            "batch": batch,
            "channels": channels,
            "sizes": tuple(sizes),
            "cuts": tuple(cuts),
        }

    def _cut(self, n: int, p: int) -> list[Range]:
        """Balanced, or cut anywhere."""
        if self._chance(0.5):
            return balanced(n, p)
        return list(pairwise([0, *sorted(int(c) for c in self.rng.integers(0, n + 1, p - 1)), n]))

    def _grid(self, dims: int, most: int | None = None) -> list[int]:
        """A shape for at most `most` workers, by default all; a dimension is often not split."""
        left = self.workers if most is None else most
        shape = [1] * dims
        for d in self.rng.permutation(dims):
            if self._chance(0.6):
                shape[d] = self._upto(min(left, self._one_of(2, 3, 4, self.workers)))
                left //= shape[d]
        return shape

    def _teams(self, *shapes: Sequence[int]) -> tuple[On, ...]:
        """Partitions of the same first workers, or of workers drawn for each."""
        order = self.rng.permutation(self.workers)
        teams = []
        for shape in shapes:
            teams.append(On(tuple(shape), tuple(int(rank) for rank in order[: prod(shape)])))
            if self._chance(0.6):
                order = self.rng.permutation(self.workers)
        return tuple(teams)

    def _upto(self, most: int, least: int = 1) -> int:
        return int(self.rng.integers(least, most + 1))

    def _chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def _one_of(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]
