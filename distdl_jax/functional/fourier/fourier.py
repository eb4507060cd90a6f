"""Plans of the Fourier transforms of split tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, owned_grid
from distdl_jax.functional.fourier.local_fft import Forward, Inverse, Resized
from distdl_jax.functional.fourier.staged_fft import StagesPlan, Step, plan_stages
from distdl_jax.functional.plan import ShapeDtypes, taking_part
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.pencils import Reals, pencils
from distdl_jax.validation import checked_axes, checked_integer, checked_integers

Axes = int | Sequence[int]
Kind = Literal["fft", "ifft", "rfft", "irfft"]
NORMS = (None, "backward", "ortho", "forward")


def plan_fourier(
    kind: Kind,
    shape_dtypes: ShapeDtypes,
    P_x: Partition,
    axes: Axes | None = -1,
    norm: str | None = None,
    n: int | None = None,
    s: Sequence[int] | None = None,
) -> StagesPlan:
    """Plan the transform `kind`, from the shapes and dtypes of the workers of P_x (and perhaps more)."""
    along, halved, wanted = check_transform(kind, P_x, axes, norm, n, s)
    blocks = taking_part(shape_dtypes, P_x.ranks)
    dtype, grid = common_dtype("x", blocks, P_x.ranks), owned_grid("x", P_x, blocks)
    if nothing := [a for a in along if grid.extent[a] == 0]:
        raise PlanError(f"`x` (of shape {grid.extent}) must have an element along dimension {nothing[0]}.")
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    # The lengths of what is transformed, and of the result.
    before = {a: grid.extent[a] if kind == "irfft" and a == halved else wanted.get(a, grid.extent[a]) for a in along}
    after = dict(before)
    if halved is not None:
        after[halved] = _halved_length(kind, before[halved], wanted.get(halved), real, dtype)
    forward, reals = kind in ("fft", "rfft"), Reals(before=real, after=kind == "irfft")
    path = pencils(grid.extent, P_x.shape, tuple(after.items()), P_x.shape, reals=reals)
    done: set[int] = set()
    steps: list[tuple[Partition, Step | None]] = []
    for stage in path:
        done.update(stage.axes)
        sizes = tuple((a, after[a]) for a in stage.axes)
        step = Forward(sizes, halved, norm) if forward else Inverse(sizes, halved, done == set(along), norm)
        resized = tuple((a, before[a]) for a in stage.axes if before[a] != grid.extent[a])
        whole: Step = Resized(resized, step) if resized else step
        steps.append((on_grid(P_x, stage.shape), whole if sizes else None))
    return plan_stages(blocks, grid, dtype, steps, grid, () if halved is None else (halved,))


def on_grid(P: Partition, shape: tuple[int, ...]) -> Partition:
    """Return the workers of `P` on a grid of `shape`; on a grid of one worker the first of them."""
    if shape == P.shape:
        return P
    if np.prod(shape) == 1:
        P = P.create_partition_inclusive([0])
    return P.create_cartesian_topology_partition(shape)


def _halved_length(kind: Kind, length: int, n: int | None, real: bool, dtype: np.dtype) -> int:
    """Return the length of the last dimension in the end."""
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
    """Return the dimensions, ascending, the one of which half of the frequencies are kept, and lengths that are given.

    By dimension, they are those of the result; with `rfft`, of what is transformed.
    """
    check_partitions(P_x=P_x)
    lengths = None if s is None else checked_integers("s", s)
    count = P_x.dim if lengths is None else min(len(lengths), P_x.dim)
    given = tuple(range(P_x.dim))[P_x.dim - count :] if axes is None else checked_integers("axes", axes, or_one=True)
    along = checked_axes("axes", given, P_x.shape)
    if not along:
        raise InvalidArgumentError("`axes` (=()) must name a dimension or more.")
    if norm not in NORMS:
        raise InvalidArgumentError(f"`norm` (={norm!r}) must be None, 'backward', 'ortho' or 'forward'.")
    named = [a % P_x.dim for a in given]
    halved = named[-1] if kind in ("rfft", "irfft") else None
    if lengths is None:
        return along, halved, {} if n is None else {named[-1]: checked_integer("n", n, 1)}
    if n is not None or len(lengths) != len(named) or min(lengths) < 1:
        raise InvalidArgumentError(
            f"`s` (={s!r}) must have a length of 1 or more for each of the {len(named)} dimensions that are "
            "transformed, and go without `n`."
        )
    return along, halved, dict(zip(named, lengths, strict=True))
