"""Fourier transforms of split tensors, as functions of this worker's block, and their plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, outside, owned_grid
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.fourier.staged_fft import Forward, Inverse, StagesPlan, Transform, plan_stages
from distdl_jax.functional.plan import ShapeDtypes, taking_part
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.pencils import Reals, pencils
from distdl_jax.text import documented
from distdl_jax.transports.agreement import exchange_shapes
from distdl_jax.validation import checked_axes, checked_integer, checked_integers

Axes = int | Sequence[int]
Kind = Literal["fft", "ifft", "rfft", "irfft"]
NORMS = (None, "backward", "ortho", "forward")

_TRANSFORM = """
With P_x of shape p_0 x ... x p_{D-1}, a worker transforms along the dimensions that are whole on it. For each group of
the other dimensions, the tensor is repartitioned to pencils along them, and back at the end; if no dimension of `axes`
is split, there is no communication. This is the minimum number of movements that keeps the workers busy: one there and
one back, if the other dimensions are long enough to be split instead. The transform is linear, and its derivative is
JAX's; its transpose moves the same amount in reverse.

**Arguments:**

- `x`: this worker's block on P_x, of any length, including 0; $numbers. Elsewhere a zero-volume array.
- `P_x`: the partition of x and of the result, with as many dimensions as the tensor.
- `axes`: the dimensions of the tensor; negative ones count from the end. $axes
- `norm`: "backward" (None is the same), "ortho" or "forward", as in `jnp.fft`.$lengths

**Returns:** this worker's block, balanced along $balanced; along all other dimensions blocks are the same as x's. It is
$dtype for double precision. (Half precisions, integers and booleans are transformed as jnp's floats.) Outside P_x, `x`.

**Raises:** `InvalidArgumentError`, on every worker, if an argument is invalid; `PlanError`, on every worker of P_x, if
blocks don't form a grid, or the tensor has no elements along one of `axes`$or_complex.

>>> import jax.numpy as jnp, distdl_jax as dj
>>> def program():
...     P = dj.Partition().grid([2$others])
...     x = jnp.array($x)
...     return dj.functional.$name(dj.TensorSpec(x.shape, P).block(x), P).real.tolist()
>>> dj.simulate(2, program)[0]
$y

Source: numpy's fft; Pekurovsky (2012), doi:10.1137/11082748X, on pencils.
"""
_COMPLEX = {
    "numbers": "real or complex",
    "dtype": "complex64, or complex128",
    "balanced": "dimensions whose length changes",
    "or_complex": "",
}
_HALVED = _COMPLEX | {
    "numbers": "real",
    "balanced": "the last of `axes` and dimensions whose length changes",
    "or_complex": ", or x is complex",
}
_REAL = _HALVED | {"numbers": "real or complex", "dtype": "float32, or float64", "or_complex": ""}
_ALONG_ONE = {
    "others": "",
    "axes": "`axis`: a single dimension, instead of `axes`.",
    "lengths": """
- `n`: the length of the transform along the last of `axes`, as in `jnp.fft`: x is truncated, or zero-padded, at the
  end. Default: x's length.""",
}
_ALONG_ALL = {
    "others": ", 1",
    "axes": "Default: all, or with `s` the last ones.",
    "lengths": """
- `s`: the length of the transform along each of `axes`: x is truncated, or zero-padded, at the end. Default: x's
  lengths.""",
}
_TO_ANY_LENGTH = """
- `n`: the length of the result along the last of `axes`, any: the n // 2 + 1 lowest frequencies there are used, and
  missing ones are 0. Default: 2 (m - 1), for x of length m."""


@documented(_TRANSFORM, **_COMPLEX, **_ALONG_ONE, x="[0.0, 1.0, 2.0, 3.0]", y="[6.0, -2.0]")
@function_call
def fft(
    x: Array, P_x: Partition, axes: Axes = -1, norm: str | None = None, *, axis: int | None = None, n: int | None = None
) -> Array:
    """Compute the discrete Fourier transform of a tensor on `P_x` along `axes`, which may be split: `jnp.fft.fft`.

        y[k] = sum over j of x[j] exp(-2 pi i j k / n)

    with the length n.
    """
    return _transform("fft", x, P_x, _one_of(axes, axis), norm, n)


@documented(_TRANSFORM, **_COMPLEX, **_ALONG_ONE, x="[6, -2 + 2j, -2, -2 - 2j]", y="[0.0, 1.0]")
@function_call
def ifft(
    x: Array, P_x: Partition, axes: Axes = -1, norm: str | None = None, *, axis: int | None = None, n: int | None = None
) -> Array:
    """Compute the inverse discrete Fourier transform of a tensor on `P_x` along `axes`: `jnp.fft.ifft`.

        y[j] = sum over k of x[k] exp(2 pi i j k / n) / n

    with the length n.
    """
    return _transform("ifft", x, P_x, _one_of(axes, axis), norm, n)


@documented(_TRANSFORM, **_HALVED, **_ALONG_ONE, x="[0.0, 1.0, 2.0, 3.0]", y="[6.0, -2.0]")
@function_call
def rfft(
    x: Array, P_x: Partition, axes: Axes = -1, norm: str | None = None, *, axis: int | None = None, n: int | None = None
) -> Array:
    """Compute the discrete Fourier transform of real numbers on `P_x` along `axes`: `jnp.fft.rfft`.

        y[k] = sum over j of x[j] exp(-2 pi i j k / n), k = 0, ..., n // 2

    along the last of `axes`; the other frequencies there are conjugates of these. Along the others, all frequencies.
    """
    return _transform("rfft", x, P_x, _one_of(axes, axis), norm, n)


@documented(_TRANSFORM, **(_REAL | _ALONG_ONE | {"lengths": _TO_ANY_LENGTH}), x="[6, -2 + 2j, -2]", y="[0.0, 1.0]")
@function_call
def irfft(
    x: Array, P_x: Partition, axes: Axes = -1, norm: str | None = None, *, axis: int | None = None, n: int | None = None
) -> Array:
    """Compute the real inverse of `rfft` on `P_x` along `axes`: `jnp.fft.irfft`.

    The numbers along the last of `axes` are the frequencies 0 to m - 1 of a real tensor; the others are conjugates.
    """
    return _transform("irfft", x, P_x, _one_of(axes, axis), norm, n)


@documented(_TRANSFORM, **_COMPLEX, **_ALONG_ALL, x="[[1.0, 2.0], [3.0, 4.0]]", y="[[10.0, -2.0]]")
@function_call
def fftn(
    x: Array, P_x: Partition, axes: Axes | None = None, norm: str | None = None, *, s: Sequence[int] | None = None
) -> Array:
    """Compute `fft` of a tensor on `P_x` along all dimensions, or along `axes`: `jnp.fft.fftn`."""
    return _transform("fft", x, P_x, axes, norm, s=s)


@documented(_TRANSFORM, **_COMPLEX, **_ALONG_ALL, x="[[10.0, -2.0], [-4.0, 0.0]]", y="[[1.0, 2.0]]")
@function_call
def ifftn(
    x: Array, P_x: Partition, axes: Axes | None = None, norm: str | None = None, *, s: Sequence[int] | None = None
) -> Array:
    """Compute `ifft` of a tensor on `P_x` along all dimensions, or along `axes`: `jnp.fft.ifftn`."""
    return _transform("ifft", x, P_x, axes, norm, s=s)


@documented(_TRANSFORM, **_HALVED, **_ALONG_ALL, x="[[1.0, 2.0], [3.0, 4.0]]", y="[[10.0, -2.0]]")
@function_call
def rfftn(
    x: Array, P_x: Partition, axes: Axes | None = None, norm: str | None = None, *, s: Sequence[int] | None = None
) -> Array:
    """Compute `rfft` of a real tensor on `P_x` along all dimensions, or along `axes`: `jnp.fft.rfftn`.

    n // 2 + 1 frequencies remain along the last of `axes`.
    """
    return _transform("rfft", x, P_x, axes, norm, s=s)


@documented(
    _TRANSFORM,
    **(
        _REAL
        | _ALONG_ALL
        | {
            "lengths": _TO_ANY_LENGTH
            + "\n- `s`: the length along each of `axes`. Default: x's; along the last one, as "
            "`n`."
        }
    ),
    x="[[10.0, -2.0], [-4.0, 0.0]]",
    y="[[1.0, 2.0]]",
)
@function_call
def irfftn(
    x: Array,
    P_x: Partition,
    axes: Axes | None = None,
    norm: str | None = None,
    *,
    n: int | None = None,
    s: Sequence[int] | None = None,
) -> Array:
    """Compute `irfft` of a tensor on `P_x` along all dimensions, or along `axes`: `jnp.fft.irfftn`.

    The last of `axes` is the one halved by `rfftn`.
    """
    return _transform("irfft", x, P_x, axes, norm, n, s)


def _one_of(axes: Axes, axis: int | None) -> Axes:
    """Return the dimensions, given as `axes` or as `axis`."""
    if axis is None:
        return axes
    if axes != -1:
        raise InvalidArgumentError(f"`axis` (={axis!r}) must not be given together with `axes` (={axes!r}).")
    return checked_integer("axis", axis)


def _transform(
    kind: Kind,
    x: Array,
    P_x: Partition,
    axes: Axes | None,
    norm: str | None,
    n: int | None = None,
    s: Sequence[int] | None = None,
) -> Array:
    along, _, lengths = check_transform(kind, P_x, axes, norm, n, s)
    if not P_x.active:
        return outside(P_x.world, x)
    with jax.named_scope(kind):
        team = tuple(sorted(P_x.ranks))
        label = f"{kind} along {along}, norm {norm}, lengths {lengths}, on {P_x.describe()}"
        blocks = exchange_shapes(P_x.world, team, label, x)
        return plan_fourier(kind, blocks, P_x, axes, norm, n, s).run(P_x.world, x)


def plan_fourier(
    kind: Kind,
    shape_dtypes: ShapeDtypes,
    P_x: Partition,
    axes: Axes | None = -1,
    norm: str | None = None,
    n: int | None = None,
    s: Sequence[int] | None = None,
) -> StagesPlan:
    """Plan the transform `kind`, from the shapes and dtypes on at least the workers of P_x."""
    along, halved, wanted = check_transform(kind, P_x, axes, norm, n, s)
    blocks = taking_part(shape_dtypes, P_x.ranks)
    dtype, grid = common_dtype("x", blocks, P_x.ranks), owned_grid("x", P_x, blocks)
    if nothing := [a for a in along if grid.extent[a] == 0]:
        raise PlanError(f"`x` (of shape {grid.extent}) must have an element along dimension {nothing[0]}.")
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    # The lengths of the transform, and of the result.
    before = {a: grid.extent[a] if kind == "irfft" and a == halved else wanted.get(a, grid.extent[a]) for a in along}
    after = dict(before)
    if halved is not None:
        after[halved] = _halved_length(kind, before[halved], wanted.get(halved), real, dtype)
    forward, reals = kind in ("fft", "rfft"), Reals(before=real, after=kind == "irfft")
    path = pencils(grid.extent, P_x.shape, tuple(after.items()), P_x.shape, reals=reals)
    done: set[int] = set()
    steps: list[tuple[Partition, Transform | None]] = []
    for stage in path:
        done.update(stage.axes)
        sizes = tuple((a, after[a]) for a in stage.axes)
        resized = tuple((a, before[a]) for a in stage.axes if before[a] != grid.extent[a])
        step: Transform = Forward(sizes, halved, norm, resized)
        if not forward:
            step = Inverse(sizes, halved, norm, resized, last=done == set(along))
        steps.append((on_grid(P_x, stage.shape), step if sizes else None))
    return plan_stages(blocks, grid, dtype, steps, grid, () if halved is None else (halved,))


def on_grid(P: Partition, shape: tuple[int, ...]) -> Partition:
    """Return the workers of `P` on a grid of `shape`; only the first for a grid of one worker."""
    if shape == P.shape:
        return P
    if np.prod(shape) == 1:
        P = P.create_partition_inclusive([0])
    return P.create_cartesian_topology_partition(shape)


def _halved_length(kind: Kind, length: int, n: int | None, real: bool, dtype: np.dtype) -> int:
    """Return the final length of the last dimension."""
    if kind == "rfft":
        if not real:
            raise PlanError(
                f"`x` must hold real numbers for a transform that keeps half of the frequencies, not {dtype}."
            )
        return length // 2 + 1
    return max(2 * (length - 1), 1) if n is None else n


def check_transform(
    kind: Kind, P_x: Partition, axes: Axes | None, norm: str | None, n: int | None, s: Sequence[int] | None
) -> tuple[tuple[int, ...], int | None, dict[int, int]]:
    """Return the dimensions, ascending, the halved one, and the given lengths.

    By dimension, these are the lengths of the result; with `rfft`, of the transform.
    """
    check_partitions(P_x=P_x)
    lengths = None if s is None else checked_integers("s", s)
    count = P_x.dim if lengths is None else min(len(lengths), P_x.dim)
    given = tuple(range(P_x.dim))[P_x.dim - count :] if axes is None else checked_integers("axes", axes, or_one=True)
    along = checked_axes("axes", given, P_x.shape)
    if not along:
        raise InvalidArgumentError("`axes` (=()) must have one dimension or more.")
    if norm not in NORMS:
        raise InvalidArgumentError(f"`norm` (={norm!r}) must be None, 'backward', 'ortho' or 'forward'.")
    named = [a % P_x.dim for a in given]
    halved = named[-1] if kind in ("rfft", "irfft") else None
    if lengths is None:
        return along, halved, {} if n is None else {named[-1]: checked_integer("n", n, 1)}
    if n is not None or len(lengths) != len(named) or min(lengths) < 1:
        raise InvalidArgumentError(
            f"`s` (={s!r}) must have a length of 1 or more for each of the {len(named)} transformed dimensions, and "
            "excludes `n`."
        )
    return along, halved, dict(zip(named, lengths, strict=True))
