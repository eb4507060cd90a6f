"""The rule of products of matrices and tensors."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from distdl_jax.distribute.interpreter import Site, rule
from distdl_jax.distribute.layouts import trimmed
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.plans.decomposition import Range, balanced_ranges

MOST_KNOWN_BYTES = 2**26
"""Known matrices of at most so many bytes are searched for bands."""


@rule("dot_general")
def dot_general(site: Site, x: Tensor, y: Tensor) -> Tensor:
    """Batch and free dimensions stay cut; a cut contraction leaves terms of a sum.

    Of dimensions that want the same axes, the larger operand's is served; the other operand's block moves.
    """
    (contracted_x, contracted_y), (batch_x, batch_y) = site.params["dimension_numbers"]
    for matrix, other, is_first in ((x, y, True), (y, x, False)):
        if (banded := _banded_product(site, matrix, other, is_first)) is not None:
            return banded
    names: list[dict[int, Any]] = [{}, {}]
    for of, contracted, batch, side, operand in (
        (names[0], contracted_x, batch_x, "x", x),
        (names[1], contracted_y, batch_y, "y", y),
    ):
        of.update({d: ("batch", k) for k, d in enumerate(batch)})
        of.update({d: ("contracted", k) for k, d in enumerate(contracted)})
        of.update({d: (side, d) for d in range(len(operand.shape)) if d not in of})
    wishes = [
        (of[d], axes, 0 if operand.is_lazy else operand.size)
        for operand, of in ((x, names[0]), (y, names[1]))
        for d, axes in enumerate(operand.natural())
    ]
    # A name is of a dimension that the two operands share, so both get the cut of whichever was granted it.
    granted = site.claim(wishes)
    own_x, own_y = ([granted.get(of[d], ()) for d in range(len(of))] for of in names)
    out = [granted.get(("batch", k), ()) for k in range(len(batch_x))]
    out += [granted.get(of[d], ()) for of in names for d in range(len(of)) if of[d][0] in ("x", "y")]
    pending = [a for k in range(len(contracted_x)) for a in granted.get(("contracted", k), ())]
    return site.value(site.bind(x.at(own_x), y.at(own_y)), out, pending)


def _banded_product(site: Site, matrix: Tensor, x: Tensor, matrix_is_first: bool) -> Tensor | None:
    """Return the product with a known matrix whose rows have few entries, such as an interpolation's; None for others.

    Each block of results is fetched what it reads of x, instead of summing everybody's terms of all results.
    """
    (contracted, of_x), (batch, _) = site.params["dimension_numbers"]
    if not matrix_is_first:
        contracted, of_x = of_x, contracted
    if batch or len(contracted) != 1 or len(matrix.shape) != 2 or x.is_lazy:
        return None
    if not matrix.is_known or matrix.bytes > MOST_KNOWN_BYTES:
        return None
    cut, c, mesh = x.natural(), of_x[0], site.mesh
    m = matrix.shape[1 - contracted[0]]
    if not cut[c] or m == 1:
        return None
    weights = matrix.known()
    assert weights is not None
    p, rows = mesh.size(cut[c]), weights if contracted[0] == 0 else weights.T
    hulls = [_hull(np.any(rows[:, a:b] != 0, axis=1)) for a, b in balanced_ranges(m, p)]
    own = balanced_ranges(x.shape[c], p)
    foreign = sum(max(0, b - a - max(0, min(b, d) - max(a, e))) for (a, b), (e, d) in zip(hulls, own, strict=True))
    if 2 * foreign > (p - 1) * min(m, x.shape[c]):
        return None
    i = mesh.place(cut, x.shape, c)
    (first, stop), (a, b) = hulls[i], balanced_ranges(m, p)[i]
    block, part = x.ranges(cut, {c: hulls}), rows[first:stop, a:b]
    local = jnp.asarray(part if contracted[0] == 0 else part.T)
    free = [axes for d, axes in enumerate(cut) if d != c]
    if matrix_is_first:
        return site.value(site.bind(local, block), trimmed([cut[c], *free], site.shape))
    return site.value(site.bind(block, local), trimmed([*free, cut[c]], site.shape))


def _hull(is_read: np.ndarray) -> Range:
    """Return the range of the entries that are read; (0, 0) if there are none."""
    (places,) = np.nonzero(is_read)
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
