"""The partition of a weight, derived from the partitions of a layer's input and output."""

from __future__ import annotations

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.plans.shape_dtype import shape_text


def weight_partition(
    P_x: Partition, P_y: Partition, axis: int, split: str | None, widths: dict[str, int], grouped: bool = False
) -> CartesianPartition:
    """Return P_n x P_out x P_in x features, without P_n where that is 1, for a layer that cuts one side of its weight.

    - `axis`: the dimension of P_x and P_y along the inputs, or outputs, of the weight; in the others they are equal.
    - `split`: the side that is cut over the workers; None where it follows, or the layer is to move the least.
    - `widths`: the numbers of inputs and of outputs, by the names that the user knows, in this order.
    - `grouped`: whether each output reads the inputs of its worker alone.
    """
    (inputs, n_in), (outputs, n_out) = widths.items()
    p_in, p_out = P_x.shape[axis], P_y.shape[axis]
    shown = f"`P_x` is {shape_text(P_x.shape)}, `P_y` {shape_text(P_y.shape)}"
    if split not in (None, inputs, outputs):
        raise InvalidArgumentError(f"`split` (={split!r}) must be {inputs!r}, {outputs!r}, or None.")
    if p_in > 1 and p_out > 1 and P_x.ranks != P_y.ranks:
        raise InvalidArgumentError(
            f"`P_W` is not given, and does not follow from `P_x`, {P_x.describe()}, and `P_y`, {P_y.describe()}: both "
            "cut their features, on other workers. Give `P_W`, or one partition for both, and a Repartition behind."
        )
    if grouped or p_in == 1:
        side = outputs
    elif p_out == 1:
        side = inputs
    else:
        side = split or (outputs if n_in <= n_out else inputs)
    if split not in (None, side) and max(p_in, p_out) > 1:
        raise InvalidArgumentError(
            f"`split` (={split!r}) must be {side!r} or None, where {shown}{' and there are groups' if grouped else ''}."
        )
    on, cells = (P_x, (1, p_in)) if side == inputs else (P_y, (p_out, 1))
    shape = (P_x.shape[0], *cells, *P_x.shape[axis:][1:])
    return on.create_cartesian_topology_partition(shape if shape[0] > 1 else shape[1:])


def check_not_split(split: str | None) -> None:
    """Refuse a `split` in addition to a P_W, which says the same."""
    if split is not None:
        raise InvalidArgumentError(f"`split` (={split!r}) must be None where `P_W` is given: `P_W` says what is split.")


def moves_features(P: Partition, axis: int, work: Partition, side: int) -> bool:
    """Say whether `P` cuts, along `axis`, the features that no worker of `work` cuts, on the workers of its other side.

    - `side`: 2 for P_in, the inputs: x is gathered along `axis` before it is multiplied. 1 for P_out, the outputs: the
      products are summed, and scattered along `axis`.
    """
    return work.shape[side] == 1 < P.shape[axis] == work.shape[3 - side] and P.ranks == work.ranks
