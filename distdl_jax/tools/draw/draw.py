"""One function for all pictures: `draw`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from distdl_jax.distribute.plan import Plan
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.nn.base.layer import BaseLayer
from distdl_jax.nn.shape.data_movement import HaloExchange
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec, check_spec
from distdl_jax.text import Drawing, quoted
from distdl_jax.tools.cost.cost import Cost
from distdl_jax.tools.draw.bars import draw_cost
from distdl_jax.tools.draw.grids import draw_blocks, spec_as_blocks, workers_as_blocks
from distdl_jax.tools.draw.layers import draw_layer
from distdl_jax.tools.draw.messages import draw_report, draw_totals
from distdl_jax.tools.draw.plans import draw_plan
from distdl_jax.validation import checked_boolean, checked_dtype
from distdl_jax.watchdog.programs.report import Report

KINDS = "a partition, a spec, a layer of the library, the result of dj.check, that of dj.cost, or a plan"


def draw(
    x: Any,
    x_spec: TensorSpec | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    halos: Mapping[int, Any] | None = None,
    in_order: bool = True,
) -> Drawing:
    """Draw a partition, a tensor's blocks, a layer, a function's messages or plan, or a cost.

    | x | shows |
    |---|---|
    | a `Partition` | its workers with their world ranks, in the team's order: on the grid, if there is one |
    | a `TensorSpec` | the owners of the blocks |
    | a layer, with `x_spec` | its plan: the owners of all blocks before and after, and the boxes sent, with bytes |
    | a report of `dj.check` | the messages in order, and in which operations workers wait for ever |
    | a plan: `f.plan(*args)` of `dj.distribute` | this worker's movements: arrays' blocks, what moves, and bytes |
    | a result of `dj.cost` | each layer's share of flops, of bytes sent and of bytes stored |

    There is no communication, and every worker gets the same picture, but of a plan its own. Of more than 64 workers
    it shows some, of more than 160 messages in order the first, of a plan 40 movements. A report's loop is drawn once,
    with the number of passes; of a conditional, the first branch.

    **Arguments:**

    - `x`: one of these.
    - `x_spec`: for a layer, the global shape and the partition of its input.
    - `dtype`: of a layer's input, for the byte counts; an input of indices has int32.
    - `halos`: for an `nn.HaloExchange`, the widths of workers by world rank. By default all have this worker's.

    - `in_order`: for a report, whether the messages are shown in order, or the totals of each pair of workers.

    **Returns:** a `Drawing`: SVG, which Jupyter shows by itself, with `save`; printed, it is text.

    **Raises:** `InvalidTypeError` if `x` is none of these, or `x_spec` of a layer not a spec; `InvalidArgumentError` if
    `x_spec` or `halos` is given for something else; `PlanError` if the layer's input does not fit.

    >>> import jax, distdl_jax as dj
    >>> P = dj.planning_world(4)
    >>> print(dj.draw(P.grid([2, 1], [3, 1])))
    2 x 1 grid of 2 workers
          0
       +-----+
     0 |  3  |
       +-----+
     1 |  1  |
       +-----+
    Outside: workers 0, 2.
    >>> print(dj.draw(dj.TensorSpec((5, 4), P.grid([2, 2]))))
    5 x 4 on 4 workers, dimensions 0 and 1 split
           0:2   2:4
         +-----+-----+
     0:3 |  0  |  1  |
         +-----+-----+
     3:5 |  2  |  3  |
         +-----+-----+
    >>> def program():
    ...     f = dj.distribute(lambda x: x.sum(), dj.TensorSpec((6, 4), dj.Partition().grid([2, 1])))
    ...     return str(dj.draw(f.plan(jax.ShapeDtypeStruct((3, 4), "float32")))).splitlines()[-1].split()
    >>> dj.simulate(2, program)[0]
    ['all', '1', '4', 'B']
    >>> layer = dj.nn.Repartition(P.grid([2, 1]), P.grid([1, 2]))
    >>> print(str(dj.draw(layer, dj.TensorSpec((4, 6), layer.P_x))).splitlines()[-1])
      24 bytes each: 0 → 1, 1 → 0
    """
    number, in_order = checked_dtype("dtype", dtype), checked_boolean("in_order", in_order)
    if isinstance(x, BaseLayer):
        check_spec(x_spec, "x_spec")
        assert x_spec is not None
        if isinstance(x, HaloExchange):
            widths = dict.fromkeys(x.P_x.ranks, x.halo) | dict(halos or {})
            return draw_layer(x, x_spec, number, halos=widths)
        _check_absent(x, halos=halos)
        return draw_layer(x, x_spec, number)
    _check_absent(x, x_spec=x_spec, halos=halos)
    match x:
        case Partition():
            return draw_blocks(workers_as_blocks(x))
        case TensorSpec():
            return draw_blocks(spec_as_blocks(x))
        case Report():
            return draw_report(x) if in_order else draw_totals(x)
        case Cost():
            return draw_cost(x)
        case Plan():
            return draw_plan(x)
    raise InvalidTypeError(f"`x` (={quoted(x)}) must be {KINDS}.")


def _check_absent(x: Any, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            of = "an nn.HaloExchange" if name == "halos" else "a layer"
            raise InvalidArgumentError(f"`{name}` must be omitted: it is for {of}, but `x` is a {type(x).__name__}.")
