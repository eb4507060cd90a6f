"""Values of a distributed program: the whole shape, a layout, and this worker's array in one or more layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.distribute.layouts import Axes, Cut, Layout, Mesh, axes_in, grown, trimmed, uncut
from distdl_jax.distribute.movements import Movements, Needed
from distdl_jax.tracing.tie import tie

SCATTERED_FROM = 4096
"""A pending sum of so many elements, which no reader wants whole, is scattered instead of copied."""


class Tensor:
    """A value of the whole program, as this worker has it.

    - `shape`, `dtype`: of the whole value.
    - `cut`, `pending`: its layout: which axes cut which dimension, and along which axes the arrays are terms of a sum.
    - `make`: for a *lazy* value, this worker's block in any cut, computed without communication: constants, random
      bits, enlarging broadcasts, and what is computed from them. So no worker makes the whole array.
    - `is_exact`: whether it is computed from integers and constants alone, so that it is the same on all workers to the
      bit; None if that isn't known yet.
    - `collects`, `is_carried`: whether terms are added to it later, here or in the next pass of a loop. Such a sum
      doesn't travel with others before it is due.
    - `wanted`: the cut in which it is to be in the end, if that is known.
    """

    def __init__(
        self,
        movements: Movements,
        shape: Sequence[int],
        dtype: Any,
        cut: Cut,
        block: Any = None,
        pending: Iterable[int] = (),
        make: Callable[[Cut], Any] | None = None,
    ) -> None:
        self.movements, self.shape, self.dtype = movements, tuple(shape), dtype
        self.cut, self.pending, self.make = trimmed(cut, shape), frozenset(pending), make
        self.is_wanted_whole = False
        self.is_read, self.views = False, list[Any]()  # the views of it; whether more than views reads it
        self.is_exact: bool | None = None
        self.collects = self.is_carried = False
        self.wanted: Cut | None = None
        self.is_known: Callable[[], np.ndarray] | None = None
        self._at: dict[Cut, Any] = {} if make else {self.cut: block}
        self._fetched: dict[Any, Any] = {}

    @classmethod
    def copies(cls, movements: Movements, x: Any) -> Tensor:
        """Return the value of which every worker has the whole array `x`."""
        value = cls(movements, np.shape(x), jax.typeof(x).dtype, uncut(np.shape(x)), x)
        if not isinstance(x, jax.core.Tracer) and isinstance(value.dtype, np.dtype):  # no key of jax.random
            value.is_known = partial(np.asarray, x)
        return value

    def known(self) -> np.ndarray | None:
        """Return the whole value, if it is computed from constants of the program alone; otherwise None."""
        return None if self.is_known is None else self.is_known()

    @classmethod
    def laid_out(cls, movements: Movements, aval: Any, layout: Layout, block: Any) -> Tensor:
        """Return the value of a type and a layout, from this worker's array."""
        x = cls(movements, aval.shape, aval.dtype, layout.cut, block, layout.pending)
        x.is_exact = layout.is_exact
        return x

    @property
    def mesh(self) -> Mesh:
        """The mesh of the program."""
        return self.movements.mesh

    @property
    def size(self) -> int:
        """The number of elements of the whole value."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The number of bytes of the whole value."""
        return self.size * int(self.dtype.itemsize)

    @property
    def is_lazy(self) -> bool:
        """Whether any worker can compute any block."""
        return self.make is not None

    @property
    def is_everywhere(self) -> bool:
        """Whether every worker has, or can compute, all of it."""
        return not any(self.cut) and not self.pending

    def natural(self) -> Cut:
        """Return the cut that costs the least to read: its own; a large pending sum is scattered."""
        if self.pending and self.wanted is not None and self.size >= SCATTERED_FROM:
            return grown(self.shape, self.cut, tuple(a if self.pending.issuperset(a) else () for a in self.wanted))
        if self.is_lazy or not self.pending or self.is_wanted_whole or self.size < SCATTERED_FROM:
            return self.cut
        axes = tuple(sorted(self.pending))
        free = [d for d, n in enumerate(self.shape) if not self.cut[d] and n >= self.mesh.size(axes)]
        if not free:
            return self.cut
        longest = max(free, key=lambda d: self.shape[d])
        return tuple(axes if d == longest else own for d, own in enumerate(self.cut))

    def readable(self) -> Cut:
        """Return the cut in which a reader that isn't lazy takes the value: a lazy one along its longest dimensions."""
        cut = list(self.natural())
        if not self.is_lazy:
            return tuple(cut)
        for a in sorted(self.mesh.axes - axes_in(cut)):
            room = [d for d, n in enumerate(self.shape) if n > 1 and n >= self.mesh.size((*cut[d], a))]
            if room:
                longest = max(room, key=lambda d: self.shape[d] / self.mesh.size(cut[d]))
                cut[longest] = (*cut[longest], a)
        return tuple(cut)

    def at(self, cut: Iterable[Sequence[int]]) -> Any:
        """Return this worker's block in a cut, of the settled value."""
        wanted = trimmed(cut, self.shape)
        if self.pending:
            self._settle(wanted)
        if wanted not in self._at:
            if self.make is not None:
                self._at[wanted] = self.make(wanted)
            else:
                block = self.movements.cut_again(self._at[self.cut], self.shape, self.cut, wanted)
                if self._is_large(wanted):
                    return block  # gathered again by the next reader: it would stay until the backward pass
                self._at[wanted] = block
        return self._at[wanted]

    def _is_large(self, cut: Cut) -> bool:
        """Say whether more than the program's `gather` bytes have been gathered for a block in this cut."""
        limit, blocks = self.movements.gather, self.mesh.size(axes_in(cut))
        return limit is not None and self.mesh.size(axes_in(self.cut)) > blocks and self.bytes > limit * blocks

    def whole(self) -> Any:
        """Return the whole array."""
        return self.at(uncut(self.shape))

    def _settle(self, wanted: Cut) -> None:
        """Sum the terms: onto blocks where `wanted` cuts a dimension along pending axes, otherwise onto copies."""
        x, cut, pending = self._at[self.cut], list(self.cut), set(self.pending)
        dims = []
        for d, axes in enumerate(wanted):
            if axes and not cut[d] and set(axes) <= pending:
                cut[d], pending = axes, pending - set(axes)
                dims.append(d)
        if dims:
            x = self.movements.scattered_sum(x, self.shape, tuple(cut), tuple(dims))
        self.settled(self.movements.all_sum(x, pending, self.shape, tuple(cut)), tuple(cut))

    def settled(self, x: Any, cut: Cut | None = None) -> None:
        """Take `x` as this worker's block of the sum."""
        self.cut, self.pending = self.cut if cut is None else cut, frozenset()
        self._at, self._fetched = {self.cut: x}, {}

    def terms(self, cut: Iterable[Sequence[int]], pending: frozenset[int]) -> Any:
        """Return this worker's array in the layout with terms along `pending`: of copies, the first counts."""
        wanted = trimmed(cut, self.shape)
        if self.pending and self.cut == wanted and self.pending <= pending:
            x, missing = self._at[self.cut], pending - self.pending
        else:
            x, missing = self.at(wanted), pending
        return x if self.mesh.is_first(missing) else tie(jnp.zeros_like(x), x)

    def ranges(self, cut: Cut, needed: Needed, periodic: Iterable[int] = ()) -> Array:
        """Return the ranges that this worker needs; a neighbourhood is fetched once, whoever reads it."""
        block = self.at(cut)
        if not needed:
            return block
        along = tuple(sorted((d, tuple((int(a), int(b)) for a, b in ranges)) for d, ranges in needed.items()))
        key = (trimmed(cut, self.shape), along, tuple(periodic))
        if key not in self._fetched:
            self._fetched[key] = self.movements.ranges(block, self.shape, key[0], dict(along), periodic)
        return self._fetched[key]

    def whole_along(self, dims: Iterable[int]) -> Cut:
        """Return the nearest cut with `dims` whole: their axes move to the longest free dimension, or are gathered."""
        cut, dims = list(self.natural()), tuple(dims)
        if self.is_lazy:
            return tuple(() if d in dims else axes for d, axes in enumerate(cut))
        for d in dims:
            axes: Axes = cut[d]
            cut[d] = ()
            free = [e for e, n in enumerate(self.shape) if e not in dims and not cut[e] and n >= self.mesh.size(axes)]
            if axes and free:
                cut[max(free, key=lambda e: self.shape[e])] = axes
        return tuple(cut)

    def __repr__(self) -> str:
        pending = f", pending along {sorted(self.pending)}" if self.pending else ""
        return f"Tensor({self.dtype}{list(self.shape)}, cut {self.cut}{pending}{', lazy' * self.is_lazy})"
