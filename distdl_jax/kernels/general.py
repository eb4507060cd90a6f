"""One worker's convolution in lax's whole vocabulary, computed by the kernels of `convolution`.

A convolution relates positions i in x, t in w and j in its result y:

    lhs_dilation i = window_strides j + rhs_dilation t - low

A `Problem` relates positions in its input X, its weight W and its result Y: i = stride j + dilation t - low. So each of
x, w and y that has scale 1 can be X; the other two are W and Y; and the direction, forward or one of the gradients, is
determined by which of the three y is. JAX's derivatives of a convolution are convolutions with other dimension numbers,
strides, dilations and groups. They are computed by the kernels of the gradients, because of all forms the one is chosen
that transposes least, and JAX leaves arrays as they lie in memory.

If X isn't x, one index runs backwards. Then w or y is reversed. For JAX's derivatives this undoes a reversal in the
program, and XLA removes both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import InvalidTypeError
from distdl_jax.kernels.convolution import as_operations, in_direction
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.precision import has_fast_products
from distdl_jax.kernels.problem import Direction, Problem, Shape, conv

Name = Literal["x", "w", "y"]
NAMES: tuple[Name, ...] = get_args(Name)

Axes = tuple[tuple[str, ...], ...]
"""For each axis of an array, the indices that make it up, the outermost first.

They are "g", the group; within a group "n" of the batch, "c" of the input's channels and "o" of the output's; and "0",
"1", ... of positions.
"""


MOST_TAPS = 64
"""Of a larger kernel, whatever has to be transposed instead, no library makes a fast convolution."""


class Form(NamedTuple):
    """A reading of a convolution as a `Problem` in a direction.

    - `X`, `W`, `Y`: which arrays are the problem's input, weight and result.
    - `batch`, `c_in`, `c_out`: which indices are the problem's batch and channels.
    """

    direction: Direction
    X: Name
    W: Name
    Y: Name
    batch: str
    c_in: str
    c_out: str

    @property
    def turned(self) -> Name | None:
        """The array whose positions run backwards."""
        turned: dict[Name, Name | None] = {"x": None, "y": "w", "w": "y"}
        return turned[self.X]

    @property
    def operands(self) -> tuple[Name, Name]:
        """The operands, in the order of the kernels."""
        match self.direction:
            case "forward":
                return self.X, self.W
            case "input_gradient":
                return self.W, self.Y
        return self.X, self.Y

    def axes(self, dims: int, channels_last: bool) -> dict[Name, Axes]:
        """Return the axes of the arrays in the problem's order."""
        features, batch = tuple((str(d),) for d in range(dims)), (self.batch,)
        c_in, c_out, of_weight = ("g", self.c_in), ("g", self.c_out), (self.c_in,)
        if channels_last:
            weight = (*features, of_weight, c_out)
            return {self.X: (batch, *features, c_in), self.W: weight, self.Y: (batch, *features, c_out)}
        weight = (c_out, of_weight, *features)
        return {self.X: (batch, c_in, *features), self.W: weight, self.Y: (batch, c_out, *features)}


FORMS = (
    Form("forward", X="x", W="w", Y="y", batch="n", c_in="c", c_out="o"),
    Form("weight_gradient", X="x", W="y", Y="w", batch="c", c_in="n", c_out="o"),
    Form("input_gradient", X="y", W="w", Y="x", batch="n", c_in="o", c_out="c"),
    Form("input_gradient", X="y", W="x", Y="w", batch="o", c_in="n", c_out="c"),
    Form("weight_gradient", X="w", W="y", Y="x", batch="c", c_in="o", c_out="n"),
    Form("forward", X="w", W="x", Y="y", batch="o", c_in="c", c_out="n"),
)


@dataclass(frozen=True)
class Operand:
    """One of x, w and y.

    - `axes`: the indices of its axes; `sizes`: the size of each index.
    - `scale`: by how much positions are multiplied, per feature dimension.
    """

    axes: Axes
    sizes: dict[str, int]
    scale: tuple[int, ...]

    @property
    def positions(self) -> Shape:
        """The number of positions, per feature dimension."""
        return tuple(self.sizes[str(d)] for d in range(len(self.scale)))

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.sizes.values())

    def is_transposed(self, axes: Axes) -> bool:
        """Say whether it lies in memory otherwise than with `axes`."""
        here, there = ([i for axis in each for i in axis if self.sizes[i] > 1] for each in (self.axes, axes))
        return here != there

    def arranged(self, array: Array, source: Axes, target: Axes) -> Array:
        """Return the array, which has the axes `source`, with the axes `target`."""
        before, after = ([i for axis in axes for i in axis] for axes in (source, target))
        if [i for i in before if self.sizes[i] > 1] != [i for i in after if self.sizes[i] > 1]:
            array = jnp.transpose(array.reshape([self.sizes[i] for i in before]), [before.index(i) for i in after])
        return array.reshape([math.prod(self.sizes[i] for i in axis) for axis in target])

    def reversed(self, array: Array) -> Array:
        """Return the array with its positions backwards."""
        return lax.rev(array, [axis for axis, (i, *_) in enumerate(self.axes) if i.isdigit() and self.sizes[i] > 1])


@dataclass(frozen=True)
class Reading:
    """A form of a convolution, and the problem that it is."""

    form: Form
    problem: Problem

    @property
    def axes(self) -> dict[Name, Axes]:
        """The axes of the arrays in the problem's order."""
        return self.form.axes(self.problem.dims, self.problem.channels_last)


@dataclass(frozen=True)
class Convolution:
    """A convolution in lax's vocabulary.

    - `low`: the padding at the low end, per feature dimension.
    - `fast_math`: whether products may be of bfloat16.
    """

    operands: dict[Name, Operand]
    low: tuple[int, ...]
    dtype: str
    fast_math: bool

    @classmethod
    def of(cls, shapes: Mapping[Name, Shape], dtype: str, params: Mapping[str, Any]) -> Convolution:
        """Return the convolution of an equation, from its shapes and params."""
        specs = dict(zip(NAMES, params["dimension_numbers"], strict=True))
        scales = params["lhs_dilation"], params["rhs_dilation"], params["window_strides"]
        of_batch, of_features = params["batch_group_count"], params["feature_group_count"]
        groups = of_batch * of_features
        n, c = (("g", "n"), ("c",)) if of_batch > 1 else (("n",), ("g", "c"))
        sizes = {
            "g": groups,
            "n": shapes["x"][specs["x"][0]] // of_batch,
            "c": shapes["w"][specs["w"][1]],
            "o": shapes["w"][specs["w"][0]] // groups,
        }
        kinds = {"x": (n, c), "w": (("g", "o"), ("c",)), "y": (("n",), ("g", "o"))}
        order = np.argsort(specs["x"][2:]).tolist()  # features as they lie in x
        operands: dict[Name, Operand] = {}
        for name, scale in zip(NAMES, scales, strict=True):
            shape, (first, second, *features) = shapes[name], specs[name]
            places = {str(d): features[at] for d, at in enumerate(order)}
            along = {first: kinds[name][0], second: kinds[name][1]} | {axis: (i,) for i, axis in places.items()}
            axes = tuple(along[axis] for axis in range(len(shape)))
            positions = {i: shape[axis] for i, axis in places.items()}
            its = {i: sizes[i] for axis in kinds[name] for i in axis} | positions
            # The scale of a single position has no effect.
            scale = tuple(1 if n == 1 else scale[at] for at, n in zip(order, positions.values(), strict=True))
            operands[name] = Operand(axes, its, scale)
        fast = dtype == "float32" and has_fast_products(params["precision"])
        return cls(operands, tuple(params["padding"][at][0] for at in order), dtype, fast)

    def problem(self, form: Form, channels_last: bool) -> Problem | None:
        """Return the problem; None if the convolution has not this form, or its weight would be larger than w."""
        X, W, Y = (self.operands[name] for name in (form.X, form.W, form.Y))
        if set(X.scale) - {1} or math.prod(W.positions) > math.prod(self.operands["w"].positions):
            return None
        low = self.low
        if form.turned:
            turned = self.operands[form.turned]
            along = zip(turned.scale, turned.positions, low, strict=True)
            low = tuple(scale * (n - 1) - before for scale, n, before in along)
        # The high end is up to the last entry that is read, or, to crop less, before the next stride.
        ends = zip(Y.scale, Y.positions, W.scale, W.positions, X.positions, low, strict=True)
        exact = ((s, s * (m - 1) + d * (k - 1) + 1 - n - before) for s, m, d, k, n, before in ends)
        high = (max(end, min(0, end + s - 1)) for s, end in exact)
        window = Placement(Y.scale, tuple(zip(low, high, strict=True)), W.scale)
        sizes = {i: n for operand in self.operands.values() for i, n in operand.sizes.items()}
        groups, c_in, c_out = sizes["g"], sizes[form.c_in], sizes[form.c_out]
        x, weight = (sizes[form.batch], groups * c_in, *X.positions), (groups * c_out, c_in, *W.positions)
        return Problem(x, weight, window, groups, self.dtype, channels_last, self.fast_math)

    @property
    def reading(self) -> Reading | None:
        """The form that transposes the fewest entries, and has a small weight; None if it has none."""
        best: tuple[int, Reading] | None = None
        for form, channels_last in product(FORMS, (False, True)):
            if (problem := self.problem(form, channels_last)) is None:
                continue
            reading = Reading(form, problem)
            there = reading.axes
            transposed = sum(each.size for name, each in self.operands.items() if each.is_transposed(there[name]))
            weight = self.operands[form.W]
            cost = transposed + weight.size * (1 if math.prod(weight.positions) <= MOST_TAPS else 4)
            if best is None or cost < best[0]:
                best = cost, reading
        return best and best[1]


def conv_general_dilated(
    x: Array,
    w: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Return `lax.conv_general_dilated(x, w, ...)`, by the fastest kernel.

    Arguments are those of lax. On CPUs a float32 convolution has products of bfloat16 if `precision`, or the one set by
    `jax.default_matmul_precision`, is `Precision.DEFAULT`.

    **Raises:** `InvalidTypeError` if x and w have different dtypes; `InvalidArgumentError` if `precision` is not
    supported; what lax raises for arguments that don't fit.
    """
    if x.dtype != w.dtype:
        raise InvalidTypeError(f"`x` ({x.dtype}) and `w` ({w.dtype}) must have one dtype.")
    plain = partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    if as_operations.get() or jax.default_backend() != "cpu":
        return plain(x, w)
    traced = jax.make_jaxpr(plain)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)))
    (equation,) = traced.eqns  # whose params are complete and checked
    (y,), params = traced.out_avals, equation.params
    dtype = jnp.promote_types(x.dtype, y.dtype)
    x, w = x.astype(dtype), w.astype(dtype)
    if x.ndim == 2:  # a matrix product, as a convolution of one position
        x, w = x[..., None], w[..., None]
        params |= dict.fromkeys(("window_strides", "lhs_dilation", "rhs_dilation"), (1,)) | {"padding": ((0, 0),)}
        params["dimension_numbers"] = tuple((*spec, 2) for spec in params["dimension_numbers"])
    shape = (*y.shape, 1) if len(y.shape) == 2 else y.shape
    return _computed(x, w, shape, params).astype(y.dtype).reshape(y.shape)


def read(x: Any, w: Any, y: Any, params: Mapping[str, Any]) -> Reading | None:
    """Return the form in which an equation `conv_general_dilated` is computed, from its arrays or their shapes."""
    return Convolution.of({"x": x.shape, "w": w.shape, "y": y.shape}, x.dtype.name, params).reading


def _computed(x: Array, w: Array, shape: Shape, params: dict[str, Any]) -> Array:
    """Return the convolution with complete `params`, of `shape`."""
    if 0 in (*x.shape, *w.shape, *shape):
        return jnp.zeros(shape, x.dtype)
    convolution = Convolution.of({"x": x.shape, "w": w.shape, "y": shape}, x.dtype.name, params)
    reading = convolution.reading
    if reading is None:  # without gaps in x it is forward
        gaps = dict(zip(params["dimension_numbers"][0][2:], params["lhs_dilation"], strict=True))
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, gaps.get(axis, 1) - 1) for axis in range(x.ndim)])
        return _computed(x, w, shape, params | {"lhs_dilation": (1,) * len(gaps)})
    operands, problem = convolution.operands, reading.problem
    if problem.flops == 0:  # windows hold only padding
        return jnp.zeros(shape, x.dtype)
    if not problem.has_choice:
        return _by_xla(convolution, x, w)
    form, given = reading.form, {"x": x, "w": w}
    if form.turned == "w":
        given["w"] = operands["w"].reversed(w)
    axes = reading.axes
    arranged = (operands[name].arranged(given[name], operands[name].axes, axes[name]) for name in form.operands)
    y = in_direction(problem, form.direction, *arranged)
    y = operands["y"].arranged(y, axes["y"], operands["y"].axes)
    return operands["y"].reversed(y) if form.turned == "y" else y


def _by_xla(convolution: Convolution, x: Array, w: Array) -> Array:
    """Compute it by `conv`, in the order N x C x features."""
    X, W, Y = (convolution.operands[name] for name in NAMES)
    axes = FORMS[0].axes(len(convolution.low), channels_last=False)
    ends = zip(Y.scale, Y.positions, W.scale, W.positions, X.scale, X.positions, convolution.low, strict=True)
    high = (s * (m - 1) + d * (k - 1) - spread * (n - 1) - low for s, m, d, k, spread, n, low in ends)
    y = conv(
        X.arranged(x, X.axes, axes["x"]),
        W.arranged(w, W.axes, axes["w"]),
        Y.scale,
        tuple(zip(convolution.low, high, strict=True)),
        x_dilation=X.scale,
        dilation=W.scale,
        groups=X.sizes["g"],
    )
    return Y.arranged(y, axes["y"], Y.axes)
