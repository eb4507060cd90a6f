"""Rules of windows: convolutions, poolings, and the gradient of a max pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.distribute.interpreter import Site, rule
from distdl_jax.distribute.layouts import Axes, Cut, trimmed
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.kernels import reduce_window as kernels
from distdl_jax.kernels.dtypes import extreme
from distdl_jax.kernels.general import conv_general_dilated
from distdl_jax.plans.decomposition import Range, balanced_ranges
from distdl_jax.tracing.tie import tie


class Window(NamedTuple):
    """The windows along dimension `d` of an operand, which is spread by `base`, and gives `outputs` results.

    - `span`: from the first to the last entry of a window. `low`, `high`: the padding, of the spread operand.
    - `taps`: length and dilation of a kernel that is cut along its taps, too; None for a whole one.
    """

    d: int
    stride: int
    span: int
    low: int
    high: int
    base: int
    outputs: int
    taps: tuple[int, int] | None = None

    def reads(self, p: int) -> list[tuple[int, int, bool]]:
        """Return, for each of p workers, the range of the spread operand that it reads, and whether it has work.

        With a cut kernel each worker has its own taps of all windows, and the results are terms of a sum.
        """
        if self.taps:
            length, dilation = self.taps
            last = (self.outputs - 1) * self.stride
            return [
                (a * dilation - self.low, last + (b - 1) * dilation - self.low + 1, a < b)
                for a, b in balanced_ranges(length, p)
            ]
        mine = balanced_ranges(self.outputs, p) if self.outputs != 1 else ((0, 1),) * p
        return [(a * self.stride - self.low, (b - 1) * self.stride - self.low + self.span, a < b) for a, b in mine]

    def entries(self, low: int, high: int, n: int) -> Range:
        """Return the entries of the operand, of length `n`, in a range of the spread one; (0, 0) if there are none."""
        first, stop = min(max(-(-low // self.base), 0), n), min(max((high - 1) // self.base + 1, 0), n)
        return (first, stop) if first < stop else (0, 0)


class WindowsRead:
    """What this worker's windows read of a value.

    - `needed`: by cut dimension, the ranges of all workers. `padding`: around the fetched array, by window.
    - `axes`: those that cut the result, by window.
    - `has_nothing`: whether this worker's part is empty, or a sum of nothing.
    """

    def __init__(self, x: Tensor, cut: Cut, windows: Sequence[Window]) -> None:
        self.x, self.cut, mesh = x, cut, x.mesh
        self.needed: dict[int, list[Range]] = {}
        self.padding: list[tuple[int, int]] = []
        self.axes: list[Axes] = []
        self._only_padding: list[int] = []
        self.has_nothing = False
        for window in windows:
            d, n = window.d, x.shape[window.d]
            if not cut[d]:
                self.padding.append((window.low, window.high))
                self.axes.append(())
                continue
            reads = window.reads(mesh.size(cut[d]))
            self.needed[d] = [window.entries(low, high, n) if some else (0, 0) for low, high, some in reads]
            self.axes.append(cut[d] if window.outputs != 1 and not window.taps else ())
            place = mesh.place(cut, x.shape, d)
            (low, high, some), (first, stop) = reads[place], self.needed[d][place]
            if first < stop:
                self.padding.append((first * window.base - low, high - ((stop - 1) * window.base + 1)))
            elif some and not window.taps:
                self._only_padding.append(d)
                self.padding.append((0, high - low - 1))
            else:
                self.has_nothing = True
                self.padding.append((0, 0))

    def fetched(self, fill: Any) -> Array:
        """Return the entries that are read, one of `fill` where windows lie on nothing but padding."""
        block = self.x.ranges(self.cut, self.needed)
        for d in self._only_padding:
            block = lax.pad(block, jnp.asarray(fill, block.dtype), [(int(e == d), 0, 0) for e in range(block.ndim)])
        return block


def _nothing(site: Site, cut: Cut, dtype: Any, *anchors: Array, nothing: bool) -> Array | None:
    """Return this worker's part of the result if it is empty, or a sum of nothing; otherwise None."""
    shape = site.mesh.block_shape(cut, site.shape)
    return tie(jnp.zeros(shape, dtype), *anchors) if nothing or 0 in shape else None


@rule("conv_general_dilated")
def convolution(site: Site, x: Tensor, w: Tensor) -> Tensor:
    """Batch and space are local, with halos; cut input features leave a pending sum, cut kernels their results' cut.

    The gradient of a kernel is a convolution, too: with a cotangent as kernel, cut along its taps, and few results.
    """
    params, mesh = site.params, site.mesh
    numbers = params["dimension_numbers"]
    (xb, xc, *xs), (wo, wi, *ws), (yb, yc, *ys) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    # As in a kernel's gradient, whose "kernel" is about as long as x. The taps of a true one, if cut, are gathered.
    along_taps = [
        k
        for k, (d, e) in enumerate(zip(xs, ws, strict=True))
        if w.natural()[e] and 2 * _span(int(w.shape[e]), int(params["rhs_dilation"][k])) > x.shape[d]
    ]
    granted = _granted(site, x, w, along_taps)
    group = granted.get("group", ())
    of_x: dict[int, Axes] = {xb: granted.get("batch", ()), xc: group or granted.get("in", ())}
    of_x |= {d: granted.get(("taps", k) if k in along_taps else ("space", k), ()) for k, d in enumerate(xs)}
    of_w: dict[int, Axes] = {wo: group or granted.get("out", ()), wi: () if group else granted.get("in", ())}
    of_w |= {ws[k]: granted.get(("taps", k), ()) for k in along_taps}
    cut = trimmed([of_x[d] for d in range(len(x.shape))], x.shape)
    for k in along_taps:
        if of_w[ws[k]] and not cut[xs[k]]:  # x has length 1 there: every worker has it, but not its place
            of_w[ws[k]] = ()
    weight = w.at([of_w.get(d, ()) for d in range(len(w.shape))])
    read = WindowsRead(
        x, cut, [_window(site, w, k, (d, ws[k], ys[k]), bool(of_w.get(ws[k]))) for k, d in enumerate(xs)]
    )
    out = {yb: cut[xb], yc: of_w[wo], **dict(zip(ys, read.axes, strict=True))}
    out_cut = trimmed([out[d] for d in range(len(site.shape))], site.shape)
    block = read.fetched(0)
    y = _nothing(site, out_cut, site.outs[0].dtype, block, weight, nothing=read.has_nothing)
    if y is None:
        y = conv_general_dilated(
            block,
            weight,
            params["window_strides"],
            read.padding,
            params["lhs_dilation"],
            params["rhs_dilation"],
            numbers,
            params["feature_group_count"] // (mesh.size(group) if group else 1),
            params["batch_group_count"],
            params["precision"],
            params["preferred_element_type"],
        )
    pending = [*(() if group else granted.get("in", ())), *(a for k in along_taps for a in of_w[ws[k]])]
    return site.value(y, out_cut, pending)


def _span(taps: int, dilation: int) -> int:
    """Return the length from the first to the last entry of a window."""
    return (taps - 1) * dilation + 1


def _granted(site: Site, x: Tensor, w: Tensor, along_taps: Sequence[int]) -> Mapping[Any, Axes]:
    params = site.params
    numbers, groups, batches = params["dimension_numbers"], params["feature_group_count"], params["batch_group_count"]
    (xb, xc, *xs), (wo, wi, *ws) = numbers.lhs_spec, numbers.rhs_spec
    of_x, of_w = x.readable(), w.natural()
    wishes: list[tuple[Any, Axes, int]] = []
    if batches == 1:
        wishes.append(("batch", of_x[xb], x.size))
    wishes += [(("space", k), of_x[d], x.size) for k, d in enumerate(xs) if k not in along_taps]
    wishes += [(("taps", k), of_w[ws[k]], w.size) for k in along_taps]
    if batches > 1:
        return site.claim(wishes)
    if groups == 1:
        wishes += [("in", of_x[xc], x.size), ("in", of_w[wi], w.size), ("out", of_w[wo], w.size)]
    else:
        wishes += [
            ("group", axes, v.size) for v, axes in ((x, of_x[xc]), (w, of_w[wo])) if groups % site.mesh.size(axes) == 0
        ]
    return site.claim(wishes)


def _window(site: Site, w: Tensor, k: int, places: tuple[int, int, int], is_cut: bool) -> Window:
    d, of_w, of_y = places
    params, taps = site.params, int(w.shape[of_w])
    dilation, (low, high) = int(params["rhs_dilation"][k]), params["padding"][k]
    span, stride, base = _span(taps, dilation), int(params["window_strides"][k]), int(params["lhs_dilation"][k])
    return Window(d, stride, span, int(low), int(high), base, site.shape[of_y], (taps, dilation) if is_cut else None)


_REDUCERS: dict[str, Any] = {f"reduce_window_{kind}": kind for kind in ("max", "min", "sum")}
_FILLS = {
    "reduce_window_sum": lambda dtype: np.zeros((), dtype),
    "reduce_window_max": lambda dtype: extreme(dtype, largest=False),
    "reduce_window_min": lambda dtype: extreme(dtype, largest=True),
}


def _of_reduction(site: Site) -> list[Window]:
    names = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    along = zip(*(site.params[name] for name in names), site.shape, strict=True)
    return [
        Window(d, int(stride), (int(size) - 1) * int(dilation) + 1, int(low), int(high), int(base), m)
        for d, (size, stride, (low, high), base, dilation, m) in enumerate(along)
    ]


@rule(*_FILLS, "reduce_window")
def reduce_window(site: Site, *args: Tensor) -> list[Tensor]:
    """Windows with their halo; padding is the initial value."""
    params = site.params
    number = len(args) // 2 if site.name == "reduce_window" else len(args)
    xs, initial = args[:number], args[number:]
    cut = xs[0].readable()
    windows = _of_reduction(site)
    reads = [WindowsRead(x, cut, windows) for x in xs]
    fills = [value.whole() for value in initial] or [_FILLS[site.name](np.dtype(x.dtype)) for x in xs]
    blocks = [read.fetched(fill) for read, fill in zip(reads, fills, strict=True)]
    out_cut = trimmed(reads[0].axes, site.shape)
    if _nothing(site, out_cut, xs[0].dtype, *blocks, nothing=False) is not None:
        shape = site.mesh.block_shape(out_cut, site.shape)
        return [site.value(tie(jnp.zeros(shape, out.dtype), *blocks), out_cut, n=n) for n, out in enumerate(site.outs)]
    if kind := _REDUCERS.get(site.name):
        y = kernels.reduce_window(
            blocks[0],
            kind,
            params["window_dimensions"],
            params["window_strides"],
            tuple(reads[0].padding),
            params["base_dilation"],
            params["window_dilation"],
        )
        return [site.value(y, out_cut)]
    results = site.bind(*blocks, *(value.whole() for value in initial), padding=tuple(reads[0].padding))
    results = results if site.eqn.primitive.multiple_results else [results]
    return [site.value(y, out_cut, n=n) for n, y in enumerate(results)]


@rule("select_and_gather_add")
def select_and_gather_add(site: Site, tangent: Tensor, x: Tensor) -> Tensor:
    """The tangent of a pooling: of the selected entry of each window."""
    cut, largest = x.readable(), site.params["select_prim"].name == "ge"
    reads = [WindowsRead(each, cut, _of_reduction(site)) for each in (tangent, x)]
    fill = extreme(np.dtype(x.dtype), largest=not largest)
    blocks = [read.fetched(value) for read, value in zip(reads, (0, fill), strict=True)]
    out_cut = trimmed(reads[0].axes, site.shape)
    y = _nothing(site, out_cut, site.outs[0].dtype, *blocks, nothing=False)
    return site.value(site.bind(*blocks, padding=tuple(reads[0].padding)) if y is None else y, out_cut)


@rule("select_and_scatter_add")
def select_and_scatter_add(site: Site, source: Tensor, x: Tensor) -> Tensor:
    """The gradient of a max pooling: each worker's windows add to what they have read."""
    params, cut = site.params, x.readable()
    windows = [
        Window(d, int(stride), int(size), int(low), int(high), 1, m)
        for d, (size, stride, (low, high), m) in enumerate(
            zip(params["window_dimensions"], params["window_strides"], params["padding"], source.shape, strict=True)
        )
    ]
    if any(n == 1 and cut[d] for d, n in enumerate(source.shape)) or _some_only_padding(x, cut, windows):
        dims = [d for d in range(len(x.shape)) if x.shape[d] != source.shape[d] or params["window_dimensions"][d] > 1]
        cut = x.whole_along(dims)
    read = WindowsRead(x, cut, windows)
    block, dy = read.fetched(0), source.at(read.axes)
    y = tie(jnp.zeros(block.shape, site.outs[0].dtype), block, dy)
    if 0 not in dy.shape and 0 not in block.shape:
        select: kernels.Selected = "max" if params["select_prim"].name == "ge" else "min"
        sizes, strides = params["window_dimensions"], params["window_strides"]
        y = kernels.select_and_scatter_add(dy, block, select, sizes, strides, tuple(read.padding))
    return site.value(site.movements.added_ranges(y, x.shape, cut, read.needed) if read.needed else y, cut)


def _some_only_padding(x: Tensor, cut: Cut, windows: Sequence[Window]) -> bool:
    """Say whether windows of some worker lie on nothing but padding."""
    return any(
        some and window.entries(low, high, x.shape[window.d]) == (0, 0)
        for window in windows
        if cut[window.d]
        for low, high, some in window.reads(x.mesh.size(cut[window.d]))
    )
