"""Fourier transforms of split tensors, as functions of this worker's block."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.block_checks import outside
from distdl_jax.functional.fourier.fourier import Axes, Kind, check_transform, plan_fourier
from distdl_jax.partitions.partition import Partition
from distdl_jax.transports.agreement import compared, exchange_shapes
from distdl_jax.validation import checked_integer


@compared
def fft(
    x: Array,
    P_x: Partition,
    axes: Axes = -1,
    norm: str | None = None,
    *,
    axis: int | None = None,
    n: int | None = None,
) -> Array:
    """Compute the discrete Fourier transform of a tensor on `P_x` along `axes`, which may be split: `jnp.fft.fft`.

        y[k] = sum over j of x[j] exp(-2 pi i j k / n)

    With P_x of shape p_0 x ... x p_{D-1}, a worker transforms along the dimensions that it holds as a whole. For each
    group of others the tensor is repartitioned to pencils along them, and in the end back; where no dimension of `axes`
    is split nothing moves. These are the fewest movements that keep the workers busy: one there and one back, where the
    other dimensions are long enough to be split instead.

    **Arguments:**

    - `x`: this worker's block on P_x, of any length, also 0; real or complex. Elsewhere a zero-volume array.
    - `P_x`: the partition of x and of the result, of as many dimensions as the tensor.
    - `axes`: the dimensions of the tensor; negative ones count from the end. `axis` is one, in its place.
    - `norm`: "backward" (None is the same), "ortho" or "forward", as in `jnp.fft`.
    - `n`: the length of the result along the last of `axes`, as in `jnp.fft`: x is cut off, or filled up with zeros, at
      the end. Default: x's.

    **Returns:** this worker's block, of x's shape; where `n` is another length, balanced along it. It is complex64, or
    complex128 of double precision. (Half precisions, integers and booleans are transformed as jnp's floats.) Outside
    P_x, `x`.

    Its derivative is JAX's: the transform is linear, and its transpose is itself, by the same movements backwards.

    **Raises:** `InvalidArgumentError`, on every worker, where `axes`, `norm` or `n` doesn't fit; `PlanError`, on every
    worker of P_x, where blocks don't form a grid, or the tensor has no elements along one of `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2])
    ...     x = dj.TensorSpec((4,), P).block(jnp.arange(4.0))
    ...     return dj.functional.fft(x, P).real.tolist()
    >>> dj.simulate(2, program)[0]
    [6.0, -2.0]

    Source: numpy's fft; Pekurovsky (2012), doi:10.1137/11082748X, on pencils.
    """
    return _transform("fft", x, P_x, _one_of(axes, axis), norm, n)


@compared
def ifft(
    x: Array,
    P_x: Partition,
    axes: Axes = -1,
    norm: str | None = None,
    *,
    axis: int | None = None,
    n: int | None = None,
) -> Array:
    """Compute the inverse discrete Fourier transform of a tensor on `P_x` along `axes`: `jnp.fft.ifft`.

        y[j] = sum over k of x[k] exp(2 pi i j k / n) / n

    Any dimension may be split; what moves is as in `fft`. It is linear, and its derivative is JAX's: its transpose
    moves as much, backwards.

    **Arguments:**

    - `x`: this worker's block on P_x, of any length, also 0; real or complex. Elsewhere a zero-volume array.
    - `P_x`: the partition of x and of the result, of as many dimensions as the tensor.
    - `axes`: the dimensions of the tensor; negative ones count from the end. `axis` is one, in its place.
    - `norm`: "backward" (None is the same), "ortho" or "forward", as in `jnp.fft`.
    - `n`: the length of the result along the last of `axes`: x is cut off, or filled up with zeros, at the end.
      Default: x's.

    **Returns:** this worker's block, of x's shape; where `n` is another length, balanced along it. It is complex64, or
    complex128 of double precision. Outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, where `axes`, `norm` or `n` doesn't fit; `PlanError`, on every
    worker of P_x, where blocks don't form a grid, or the tensor has no elements along one of `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2])
    ...     x = dj.TensorSpec((4,), P).block(jnp.array([6, -2 + 2j, -2, -2 - 2j]))
    ...     return dj.functional.ifft(x, P).real.tolist()
    >>> dj.simulate(2, program)[0]
    [0.0, 1.0]

    Source: numpy's fft; Pekurovsky (2012), doi:10.1137/11082748X, on pencils.
    """
    return _transform("ifft", x, P_x, _one_of(axes, axis), norm, n)


@compared
def rfft(
    x: Array,
    P_x: Partition,
    axes: Axes = -1,
    norm: str | None = None,
    *,
    axis: int | None = None,
    n: int | None = None,
) -> Array:
    """Compute the discrete Fourier transform of real numbers on `P_x` along `axes`: `jnp.fft.rfft`.

        y[k] = sum over j of x[j] exp(-2 pi i j k / n), k = 0, ..., n // 2

    along the last of `axes`; the other frequencies there are conjugates of these. Along the others, all frequencies.
    Any dimension may be split; what moves is as in `fft`. It is linear, and its derivative is JAX's: its transpose
    moves as much, backwards.

    **Arguments:**

    - `x`: this worker's block on P_x, of any length, also 0; real. Elsewhere a zero-volume array.
    - `P_x`: the partition of x and of the result, of as many dimensions as the tensor.
    - `axes`: the dimensions of the tensor; negative ones count from the end. `axis` is one, in its place.
    - `norm`: "backward" (None is the same), "ortho" or "forward", as in `jnp.fft`.
    - `n`: the length of what is transformed along the last of `axes`: x is cut off, or filled up with zeros, at the
      end. Default: x's.

    **Returns:** this worker's block: along the last of `axes` balanced blocks of n // 2 + 1 frequencies, along all
    other dimensions those of x. It is complex64, or complex128 of double precision. Outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, where `axes`, `norm` or `n` doesn't fit; `PlanError`, on every
    worker of P_x, where blocks don't form a grid, x is complex, or the tensor has no elements along one of `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2])
    ...     x = dj.TensorSpec((4,), P).block(jnp.arange(4.0))
    ...     return dj.functional.rfft(x, P).real.tolist()
    >>> dj.simulate(2, program)[0]
    [6.0, -2.0]

    Source: numpy's fft; Pekurovsky (2012), doi:10.1137/11082748X, on pencils.
    """
    return _transform("rfft", x, P_x, _one_of(axes, axis), norm, n)


@compared
def irfft(
    x: Array,
    P_x: Partition,
    axes: Axes = -1,
    norm: str | None = None,
    *,
    axis: int | None = None,
    n: int | None = None,
) -> Array:
    """Compute the real inverse of `rfft` on `P_x` along `axes`: `jnp.fft.irfft`.

    The numbers along the last of `axes` stand for the frequencies 0 to m - 1 of a real tensor, the missing ones being
    their conjugates. Any dimension may be split; what moves is as in `fft`. It is linear, and its derivative is JAX's:
    its transpose moves as much, backwards.

    **Arguments:**

    - `x`: this worker's block on P_x, of any length, also 0; real or complex. Elsewhere a zero-volume array.
    - `P_x`: the partition of x and of the result, of as many dimensions as the tensor.
    - `axes`: the dimensions of the tensor; negative ones count from the end. `axis` is one, in its place.
    - `norm`: "backward" (None is the same), "ortho" or "forward", as in `jnp.fft`.
    - `n`: the length of the result along the last of `axes`, any: of the frequencies there the n // 2 + 1 lowest count,
      and those that are missing are 0. Default: 2 (m - 1), where x has m.

    **Returns:** this worker's block: along the last of `axes` balanced blocks, along all other dimensions those of x.
    It is float32, or float64 of double precision. Outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, where `axes`, `norm` or `n` doesn't fit; `PlanError`, on every
    worker of P_x, where blocks don't form a grid, or the tensor has no elements along one of `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2])
    ...     x = dj.TensorSpec((3,), P).block(jnp.array([6, -2 + 2j, -2]))
    ...     return dj.functional.irfft(x, P).tolist()
    >>> dj.simulate(2, program)[0]
    [0.0, 1.0]

    Source: numpy's fft; Pekurovsky (2012), doi:10.1137/11082748X, on pencils.
    """
    return _transform("irfft", x, P_x, _one_of(axes, axis), norm, n)


@compared
def fftn(
    x: Array,
    P_x: Partition,
    axes: Axes | None = None,
    norm: str | None = None,
    *,
    s: Sequence[int] | None = None,
) -> Array:
    """Compute `fft` of a tensor on `P_x` along all dimensions, or along `axes`: `jnp.fft.fftn`.

    Any dimension may be split; what moves is as in `fft`. It is linear, and its derivative is JAX's: its transpose
    moves as much, backwards.

    **Arguments:**

    - `x`: this worker's block on P_x, of any length, also 0; real or complex. Elsewhere a zero-volume array.
    - `P_x`: the partition of x and of the result, of as many dimensions as the tensor.
    - `axes`: the dimensions of the tensor; negative ones count from the end. Default: all, or with `s` the last ones.
    - `norm`: "backward" (None is the same), "ortho" or "forward", as in `jnp.fft`.
    - `s`: the length of the result along each of `axes`: x is cut off, or filled up with zeros, at the end. Default:
      x's.

    **Returns:** this worker's block, of x's shape; balanced along dimensions for which `s` has another length. It is
    complex64, or complex128 of double precision. Outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, where `axes`, `norm` or `s` doesn't fit; `PlanError`, on every
    worker of P_x, where blocks don't form a grid, or the tensor has no elements along one of `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2, 1])
    ...     x = dj.TensorSpec((2, 2), P).block(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    ...     return dj.functional.fftn(x, P).real.tolist()
    >>> dj.simulate(2, program)[0]
    [[10.0, -2.0]]

    Source: numpy's fft; Pekurovsky (2012), doi:10.1137/11082748X, on pencils.
    """
    return _transform("fft", x, P_x, axes, norm, s=s)


@compared
def ifftn(
    x: Array,
    P_x: Partition,
    axes: Axes | None = None,
    norm: str | None = None,
    *,
    s: Sequence[int] | None = None,
) -> Array:
    """Compute `ifft` of a tensor on `P_x` along all dimensions, or along `axes`: `jnp.fft.ifftn`.

    Any dimension may be split; what moves is as in `fft`. It is linear, and its derivative is JAX's: its transpose
    moves as much, backwards.

    **Arguments:**

    - `x`: this worker's block on P_x, of any length, also 0; real or complex. Elsewhere a zero-volume array.
    - `P_x`: the partition of x and of the result, of as many dimensions as the tensor.
    - `axes`: the dimensions of the tensor; negative ones count from the end. Default: all, or with `s` the last ones.
    - `norm`: "backward" (None is the same), "ortho" or "forward", as in `jnp.fft`.
    - `s`: the length of the result along each of `axes`: x is cut off, or filled up with zeros, at the end. Default:
      x's.

    **Returns:** this worker's block, of x's shape; balanced along dimensions for which `s` has another length. It is
    complex64, or complex128 of double precision. Outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, where `axes`, `norm` or `s` doesn't fit; `PlanError`, on every
    worker of P_x, where blocks don't form a grid, or the tensor has no elements along one of `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2, 1])
    ...     x = dj.TensorSpec((2, 2), P).block(jnp.array([[10.0, -2.0], [-4.0, 0.0]]))
    ...     return dj.functional.ifftn(x, P).real.tolist()
    >>> dj.simulate(2, program)[0]
    [[1.0, 2.0]]

    Source: numpy's fft; Pekurovsky (2012), doi:10.1137/11082748X, on pencils.
    """
    return _transform("ifft", x, P_x, axes, norm, s=s)


@compared
def rfftn(
    x: Array,
    P_x: Partition,
    axes: Axes | None = None,
    norm: str | None = None,
    *,
    s: Sequence[int] | None = None,
) -> Array:
    """Compute `rfft` of a real tensor on `P_x` along all dimensions, or along `axes`: `jnp.fft.rfftn`.

    Of the last of `axes`, n // 2 + 1 frequencies are left. Any dimension may be split; what moves is as in `fft`. It is
    linear, and its derivative is JAX's: its transpose moves as much, backwards.

    **Arguments:**

    - `x`: this worker's block on P_x, of any length, also 0; real. Elsewhere a zero-volume array.
    - `P_x`: the partition of x and of the result, of as many dimensions as the tensor.
    - `axes`: the dimensions of the tensor; negative ones count from the end. Default: all, or with `s` the last ones.
    - `norm`: "backward" (None is the same), "ortho" or "forward", as in `jnp.fft`.
    - `s`: the length of what is transformed along each of `axes`: x is cut off, or filled up with zeros, at the end.
      Default: x's.

    **Returns:** this worker's block: along the last of `axes`, and where `s` has another length, balanced; along all
    other dimensions blocks are those of x. It is complex64, or complex128 of double precision. Outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, where `axes`, `norm` or `s` doesn't fit; `PlanError`, on every
    worker of P_x, where blocks don't form a grid, x is complex, or the tensor has no elements along one of `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2, 1])
    ...     x = dj.TensorSpec((2, 2), P).block(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    ...     return dj.functional.rfftn(x, P).real.tolist()
    >>> dj.simulate(2, program)[0]
    [[10.0, -2.0]]

    Source: numpy's fft; Pekurovsky (2012), doi:10.1137/11082748X, on pencils.
    """
    return _transform("rfft", x, P_x, axes, norm, s=s)


@compared
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

    The last of `axes` is the one that `rfftn` has halved. Any dimension may be split; what moves is as in `fft`. It is
    linear, and its derivative is JAX's: its transpose moves as much, backwards.

    **Arguments:**

    - `x`: this worker's block on P_x, of any length, also 0; real or complex. Elsewhere a zero-volume array.
    - `P_x`: the partition of x and of the result, of as many dimensions as the tensor.
    - `axes`: the dimensions of the tensor; negative ones count from the end. Default: all, or with `s` the last ones.
    - `norm`: "backward" (None is the same), "ortho" or "forward", as in `jnp.fft`.
    - `n`: the length of the result along the last of `axes`, in place of `s`. Default: 2 (m - 1), where x has m.
    - `s`: the length of the result along each of `axes`. Default: x's, and along the last as `n`.

    **Returns:** this worker's block: along the last of `axes`, and where `s` has another length, balanced; along all
    other dimensions blocks are those of x. It is float32, or float64 of double precision. Outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, where `axes`, `norm` or `n` or `s` doesn't fit; `PlanError`, on
    every worker of P_x, where blocks don't form a grid, or the tensor has no elements along one of `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2, 1])
    ...     x = dj.TensorSpec((2, 2), P).block(jnp.array([[10.0, -2.0], [-4.0, 0.0]]))
    ...     return dj.functional.irfftn(x, P).tolist()
    >>> dj.simulate(2, program)[0]
    [[1.0, 2.0]]

    Source: numpy's fft; Pekurovsky (2012), doi:10.1137/11082748X, on pencils.
    """
    return _transform("irfft", x, P_x, axes, norm, n, s)


def _one_of(axes: Axes, axis: int | None) -> Axes:
    """Return the dimensions, which are given as `axes` or as `axis`."""
    if axis is None:
        return axes
    if axes != -1:
        raise InvalidArgumentError(
            f"`axis` (={axis!r}) must not be given beside `axes` (={axes!r}): it is one of them."
        )
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
    check_transform(kind, P_x, axes, norm, n, s)
    if not P_x.active:
        return outside(P_x.world, x)
    with jax.named_scope(kind):
        team = tuple(sorted(P_x.ranks))
        label = f"{kind} along {axes}, norm {norm}, n {n}, s {s}, on {P_x.describe()}"
        blocks = exchange_shapes(P_x.world, team, label, x)
        return plan_fourier(kind, blocks, P_x, axes, norm, n, s).run(P_x.world, x)
