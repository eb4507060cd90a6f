"""Which workers hold, copy and sum what in a distributed convolution, from P_x, P_y and P_W."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.nn.base.input_checks import check_features
from distdl_jax.nn.base.weighted_layer import check_not_split, moves_features, weight_partition
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.shape_dtype import shape_text

Kind = Literal["feature", "channel", "general"]


@dataclass(frozen=True)
class ConvPartitions:
    """The partitions of one convolution, brought to the dimensions P_n x P_co x P_ci x features where they move data.

    - `kind`: the algorithm.
    - `work`: P_n x P_co x P_ci x features, the workers that convolve.
    - `x`, `y`: P_x's and P_y's teams in shapes that broadcast to `work`; None where x is gathered along the channels
      on its own workers, and where sums are scattered along them.
    """

    kind: Kind
    work: Partition
    x: Partition | None
    y: Partition | None

    @property
    def channels(self) -> tuple[int, int]:
        """P_co and P_ci."""
        return self.work.shape[1], self.work.shape[2]


def given_or_derived(
    dims: int,
    P_x: Partition,
    P_y: Partition | None,
    P_W: Partition | None,
    split: str | None,
    channels: dict[str, int],
    groups: int,
) -> tuple[Partition, Partition] | tuple[None, None]:
    """Return P_y and P_W, as given or derived from P_x; None where x and y are on one partition that cuts no channels.

    - `split`, `channels`: which channels the weight is cut along where they are derived, "in_channels" or
      "out_channels"; and the numbers of both.
    """
    check_features(P_x, dims)
    check_partitions(P_x=P_x, **{name: P for name, P in (("P_y", P_y), ("P_W", P_W)) if P is not None})
    P_y = P_x if P_y is None else P_y
    if P_y.dim != dims + 2 or (P_y.shape[0], *P_y.shape[2:]) != (P_x.shape[0], *P_x.shape[2:]):
        raise InvalidArgumentError(
            f"`P_y` ({shape_text(P_y.shape)}) must split batch and features as `P_x` ({shape_text(P_x.shape)}) does."
        )
    if P_W is not None:
        check_not_split(split)
        return P_y, P_W
    P_W = weight_partition(P_x, P_y, 1, split, channels, grouped=groups > 1 and P_x.shape[1] > 1)
    return (None, None) if P_x.shape[1] == 1 and P_x == P_y else (P_y, P_W)


def conv_partitions(
    dims: int, P_x: Partition, P_y: Partition | None, P_W: Partition | None, groups: int
) -> ConvPartitions:
    """Choose the algorithm and arrange the teams; refuses, in a sentence, what doesn't fit together."""
    batch, p_ci, *features = P_x.shape
    if P_y is None or P_W is None:
        work = P_x.create_cartesian_topology_partition([batch, 1, 1, *features])
        return ConvPartitions("feature", work, work, work)
    p_co = P_y.shape[1]
    full = P_W.shape if P_W.dim == dims + 3 else (1, *P_W.shape)
    work = P_W.create_cartesian_topology_partition(full)
    split_groups = groups > 1 and p_ci > 1
    is_whole = groups == 1 and work.dim == dims + 3
    gathers, scatters = (is_whole and moves_features(P, 1, work, side) for P, side in ((P_x, 2), (P_y, 1)))
    expected = (batch, 1 if scatters else p_co, 1 if gathers or split_groups else p_ci, *features)
    if full != expected or (split_groups and p_co != p_ci):
        shown = expected if batch > 1 else expected[1:]
        raise InvalidArgumentError(_refusal(P_x, P_y, P_W, groups, shown, split_groups))
    if groups % p_co and groups > 1:
        raise InvalidArgumentError(
            f"`groups` (={groups}) must be divisible by the number of workers along the output channels ({p_co}), so "
            "that each of them has whole groups."
        )
    as_x = [batch, p_ci, 1, *features] if split_groups else [batch, 1, p_ci, *features]
    x = None if gathers else P_x.create_cartesian_topology_partition(as_x)
    y = None if scatters else P_y.create_cartesian_topology_partition([batch, p_co, 1, *features])
    return ConvPartitions("general" if math.prod(features) > 1 else "channel", work, x, y)


def _refusal(
    P_x: Partition, P_y: Partition, P_W: Partition, groups: int, expected: tuple[int, ...], grouped: bool
) -> str:
    given = f"`P_W` ({shape_text(P_W.shape)})"
    if grouped and P_y.shape[1] != P_x.shape[1]:
        return (
            f"With `groups` (={groups}) and input channels split over {P_x.shape[1]} workers, the output channels must "
            f"be split over as many: `P_y` is {shape_text(P_y.shape)}, `P_x` {shape_text(P_x.shape)}."
        )
    why = ": each worker along the channels has whole groups, so the weight's input channels are not split"
    return (
        f"{given} must be {shape_text(expected)}, workers along the output channels, the input channels and the "
        f"features{why if grouped else ''} (P_x is {shape_text(P_x.shape)}, P_y {shape_text(P_y.shape)})."
    )
