"""The rule of products of matrices and tensors."""

from __future__ import annotations

from typing import Any

from distdl_jax.distribute.interpreter import Site, rule
from distdl_jax.distribute.tensors import Tensor


@rule("dot_general")
def dot_general(site: Site, x: Tensor, y: Tensor) -> Tensor:
    """Batch and free dimensions stay cut; a cut contraction leaves terms of a sum.

    Of dimensions that want the same axes, the larger operand's is served; the other operand's block moves.
    """
    (contracted_x, contracted_y), (batch_x, batch_y) = site.params["dimension_numbers"]
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
