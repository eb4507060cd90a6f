"""Rules of what rearranges dimensions: transposition, reshaping, and dimensions of length 1."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from distdl_jax.distribute.interpreter import Site, rule
from distdl_jax.distribute.layouts import Axes, Cut, trimmed, uncut
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.distribute.views import rearranged
from distdl_jax.functional.reshape import plan_reshape


@rule("transpose")
def transpose(site: Site, x: Tensor) -> Tensor:
    """The cut is permuted."""
    cut, order = x.natural(), site.params["permutation"]
    if (view := rearranged(x, order)) is not None:
        return view
    if x.is_lazy:
        back = [order.index(d) for d in range(len(order))]
        return site.lazy(lambda wanted: site.bind(x.at([wanted[d] for d in back])), tuple(cut[d] for d in order))
    return site.value(site.bind(x.at(cut)), [cut[d] for d in order])


@rule("squeeze")
def squeeze(site: Site, x: Tensor) -> Tensor:
    """Dimensions of length 1 are never cut."""
    cut, gone = x.natural(), site.params["dimensions"]
    kept = [d for d in range(len(x.shape)) if d not in gone]
    if (view := rearranged(x, kept)) is not None:
        return view
    if x.is_lazy:

        def make(wanted: Cut) -> object:
            own: list[Axes] = [()] * len(x.shape)
            for d, axes in zip(kept, wanted, strict=True):
                own[d] = axes
            return site.bind(x.at(own))

        return site.lazy(make, tuple(cut[d] for d in kept))
    return site.value(site.bind(x.at(cut)), [cut[d] for d in kept])


@rule("reshape")
def reshape(site: Site, x: Tensor) -> Tensor:
    """Each cut goes to the first dimension of its group that is long enough; rows that are then elsewhere move."""
    if order := site.params.get("dimensions"):  # it transposes first
        own = x.natural()
        x = site.like(x, x.at(own).transpose(order), [x.shape[d] for d in order], [own[d] for d in order])
    shape, cut = site.shape, x.natural()
    places = _same_dimensions(x.shape, shape)
    if places is not None:
        back = {new: old for old, new in places.items()}
        if (view := rearranged(x, [back.get(d) for d in range(len(shape))])) is not None:
            return view
    if x.is_lazy and (kept := _same_dimensions(x.shape, shape)) is not None:
        return site.lazy(partial(_with_ones, site, x, kept), _moved_cut(cut, kept, shape))
    if not any(cut):
        return site.value(_bound(site, x.at(cut), shape), uncut(shape))
    if (kept := _same_dimensions(x.shape, shape)) is not None:
        after = _moved_cut(cut, kept, shape)
        return site.value(_bound(site, x.at(cut), site.mesh.block_shape(after, shape)), after)
    if not shape or 0 in shape:
        whole = uncut(x.shape)
        return site.value(_bound(site, x.at(whole), shape), uncut(shape))
    after = _reshaped_cut(site, x.shape, cut, shape)
    blocks = site.movements.blocks(cut, x.shape, x.dtype)
    plan = plan_reshape(blocks, site.mesh.partition(cut), site.mesh.partition(after), shape)
    return site.value(site.movements.compute(plan, x.at(cut), "reshape", x.shape, cut, after), after)


def _bound(site: Site, x: Any, shape: Sequence[int]) -> Any:
    return site.bind(x, new_sizes=tuple(shape), dimensions=None)


def _same_dimensions(before: Sequence[int], after: Sequence[int]) -> dict[int, int] | None:
    """Return the new place of each dimension longer than 1, if a reshape adds or removes nothing but ones."""
    olds = [d for d, n in enumerate(before) if n != 1]
    news = [d for d, n in enumerate(after) if n != 1]
    if [before[d] for d in olds] != [after[d] for d in news]:
        return None
    return dict(zip(olds, news, strict=True))


def _moved_cut(cut: Cut, places: dict[int, int], shape: Sequence[int]) -> Cut:
    after: list[Axes] = [()] * len(shape)
    for old, new in places.items():
        after[new] = cut[old]
    return trimmed(after, shape)


def _with_ones(site: Site, x: Tensor, places: dict[int, int], wanted: Cut) -> Any:
    own: list[Axes] = [()] * len(x.shape)
    for old, new in places.items():
        own[old] = wanted[new]
    return _bound(site, x.at(own), site.mesh.block_shape(wanted, site.shape))


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the dimensions before and after that hold the same elements, group by group."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        old, new, n, m = [i], [j], before[i], after[j]
        i, j = i + 1, j + 1
        while n != m:
            if n < m:
                n *= before[i]
                old.append(i)
                i += 1
            else:
                m *= after[j]
                new.append(j)
                j += 1
        while i < len(before) and before[i] == 1:
            i += 1
        while j < len(after) and after[j] == 1:
            j += 1
        groups.append((old, new))
    return groups


def _reshaped_cut(site: Site, before: Sequence[int], cut: Cut, after: Sequence[int]) -> Cut:
    result: list[Axes] = [()] * len(after)
    for old, new in _groups(before, after):
        long = [e for e in new if after[e] > 1]
        for d in old:
            if not cut[d] or not long:
                continue
            p, n = site.mesh.size(cut[d]), prod(before[e] for e in old if e >= d)
            # The first dimension that begins where this one does, or after it, and is long enough.
            inside = [e for e in long if prod(after[f] for f in new if f >= e) <= n]
            best = next((e for e in (*inside, *long) if after[e] >= p and not result[e]), None)
            best = next((e for e in (*inside, *long) if not result[e]), long[0]) if best is None else best
            result[best] = (*result[best], *cut[d])
    return trimmed(result, after)
