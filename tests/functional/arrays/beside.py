"""A function of blocks as a layer without parameters, to be compared with the function of the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matrix.partitions import On
from sequential import Beside, Sizes

import distdl_jax as dj


@dataclass(frozen=True)
class Applied:
    """A function of this worker's block, bound to its other arguments."""

    function: Callable[[Any], Any]

    def param_specs(self) -> dict[str, Any]:
        return {}

    def __call__(self, params: Any, x: Any) -> Any:
        return self.function(x)


def beside(
    name: str,
    sizes: Sequence[Sizes],
    P_x: On,
    function: Callable[[Any, dj.Partition], Any],
    whole: Callable[[Any], Any],
    P_y: On | None = None,
    y_sizes: Sequence[Sizes] | None = None,
) -> Beside:
    """`function` of x and P_x, beside `whole` of the whole x; on P_y, where the output has other dimensions."""
    return Beside(
        f"{name} {sizes} {P_x}",
        sizes,
        lambda P: Applied(lambda x: function(x, P_x.partition(P))),
        lambda params, x: whole(x),
        P_x,
        P_y,
        y_sizes,
    )
