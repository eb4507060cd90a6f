"""Recurrent layers over a whole sequence: cells in a loop over an unsplit dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.all_gather import plan_all_gather
from distdl_jax.functional.plan import BlocksPlan, MovementPlan, ShapeDtypes
from distdl_jax.nn.base.input_checks import real_grid
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes
from distdl_jax.nn.recurrent.cells import (
    CellPlan,
    DistributedGRUCell,
    DistributedLSTMCell,
    Parts,
    Recurrent,
    RecurrentCell,
)
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.text import documented
from distdl_jax.validation import check_key, checked_integer


@dataclass(frozen=True)
class OverTimePlan(BlocksPlan):
    """The plan of a recurrent layer.

    - `cells`: the plan of a step of each cell; `gathers`: how each cell gets all features of the whole sequence.
    - `carry`: the shape of each part of the carry, by world rank.
    """

    cells: tuple[CellPlan, ...]
    gathers: tuple[MovementPlan, ...]
    carry: Mapping[int, tuple[int, ...]] = field(hash=False)


_MOST_LAYERS = 2**16
"""Each is an object with separate parameters."""


@dataclass(frozen=True, repr=False)
class OverTime(Recurrent):
    """The base of recurrent layers: `num_layers` stacked cells of one kind."""

    kind: ClassVar[type[RecurrentCell]]

    P_x: Partition
    input_size: int
    hidden_size: int
    num_layers: int = 1
    bias: bool = True

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)
        if self.P_x.dim < 2 or self.P_x.shape[-2] != 1:
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(self.P_x.shape)}) must have shape P_n x ... x 1 x P_f: the sequence, the "
                "dimension before the features, can't be split, since its steps depend on each other."
            )
        checked_integer("num_layers", self.num_layers, 1, _MOST_LAYERS)
        _ = self._cells

    @cached_property
    def _cells(self) -> tuple[RecurrentCell, ...]:
        *lead, _, p_f = self.P_x.shape
        P = self.P_x.create_cartesian_topology_partition([*lead, p_f])
        sizes = (self.input_size, *(self.hidden_size,) * (self.num_layers - 1))
        return tuple(self.kind(P, size, self.hidden_size, self.bias) for size in sizes)

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each parameter, which is replicated."""
        return {f"{name}_l{k}": spec for k, cell in enumerate(self._cells) for name, spec in cell.param_specs().items()}

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """Return this worker's blocks of the initial parameters: uniform in ±1/sqrt(hidden_size), as in PyTorch."""
        check_key("key", key)
        keys = jax.random.split(key, self.num_layers)
        of_cells = [cell.init(each, dtype) for cell, each in zip(self._cells, keys, strict=True)]
        return {f"{name}_l{k}": block for k, params in enumerate(of_cells) for name, block in params.items()}

    def _carry_spec(self, x_spec: TensorSpec) -> TensorSpec:
        shape, P = x_spec.global_shape, self._cells[0].P_x
        cut = self.P_x.create_cartesian_topology_partition([1, *P.shape])
        return TensorSpec((self.num_layers, *shape[:-2], self.hidden_size), cut)

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> OverTimePlan:
        last = self.P_x.dim - 1
        real_grid("x", x, self.P_x, {last: self.input_size})
        length = x[self.P_x.ranks[0]].shape[-2]
        plans, gathers = [], []
        for k, cell in enumerate(self._cells):
            steps = {
                worker: ShapeDtype((*block.shape[:-2], block.shape[-1]), block.dtype) for worker, block in x.items()
            }
            plan = cell._plan(steps, {worker: _of_cell(each, k) for worker, each in params.items()})
            whole = {worker: ShapeDtype(block.shape, plan.dtype) for worker, block in x.items()}
            gathers.append(plan_all_gather(whole, self.P_x, last))
            plans.append(plan)
            x = {worker: ShapeDtype((*y.shape[:-1], length, y.shape[-1]), y.dtype) for worker, y in plan.blocks.items()}
        carry = {worker: (self.num_layers, *shape) for worker, shape in plans[0].carry.items()}
        self._check_carry(params, carry)
        return OverTimePlan(x, tuple(plans), tuple(gathers), carry)

    def _advance(self, plan: OverTimePlan, params: Params, x: Array, parts: Parts) -> tuple[Array, Parts]:
        after = []
        for k, (cell, step_plan, gather) in enumerate(zip(self._cells, plan.cells, plan.gathers, strict=True)):
            own = step_plan.own(self.P_x.world, _of_cell(params, k))
            of_x = cell._of(own, "ih", gather.run(self.P_x.world, x.astype(step_plan.dtype)))
            first = tuple(part[k].astype(step_plan.dtype) for part in parts)
            new, ys = lax.scan(partial(_step, cell, step_plan, own), first, jnp.moveaxis(of_x, -3, 0))
            after.append(new)
            x = jnp.moveaxis(ys, 0, -2)
        return x, tuple(jnp.stack(each) for each in zip(*after, strict=True))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.input_size} -> {self.hidden_size}, num_layers={self.num_layers}, "
            f"bias={self.bias}, P_x {shape_text(self.P_x.shape)})"
        )


_OVER_TIME = """
| tensor | global shape | partition |
|---|---|---|
| x | n_b x ... x n_s x n_in | P_x: P_n x ... x 1 x P_f |
| y | n_b x ... x n_s x n_h | P_x |
| $carry, the carry | n_l x n_b x ... x n_h | 1 x P_n x ... x P_f |
| `weight_ih_l0`, `weight_hh_l0`, ... | $gates x n_h x n_in (above the first n_h), $gates x n_h x n_h | as in a cell |
| `bias_ih_l0`, `bias_hh_l0`, ... | $gates x n_h | as in a cell |

For the equations, and the computation on each worker, see `${name}Cell`. The dimension before the features is the
sequence, n_s steps, which is not split. The features of all steps of x are gathered and multiplied together, before the
loop; in each step the workers along P_f gather h, n_h numbers per sample. Gradients of the weights are summed over the
copies once, after the loop.

**Arguments:**

- `P_x`: the partition of input and output; of two dimensions if there is no batch.
- `input_size`, `hidden_size`: n_in and n_h.
- `num_layers`: n_l, the number of cells, each of which takes the output of the previous one.
- `bias`: whether there are biases.

**Call:** `y = layer(params, x)` starts from zeros. `y, carry = layer(params, x, carry=carry)` continues from a carry,
from `layer.init_carry(x_spec)` or the previous call.

**Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid, or the sequence is
split; a call raises `PlanError`, on every worker of P_x, if x, a parameter or the carry doesn't fit.

>>> import jax, distdl_jax as dj
>>> P = dj.Partition().grid([1, 1, 1])
>>> layer = $name(P, input_size=3, hidden_size=2, num_layers=2)
>>> params, carry = layer.init(jax.random.key(0)), layer.init_carry(dj.TensorSpec((5, 7, 3), P))
>>> y, carry = layer(params, jax.numpy.ones((5, 7, 3)), carry=carry)
>>> y.shape, jax.tree.map(jax.numpy.shape, carry)
((5, 7, 2), $shapes)

Source: $source.
"""


@documented(
    _OVER_TIME, carry="h", gates="3", shapes="(2, 5, 2)", source="Cho et al. (2014), arXiv:1406.1078; PyTorch's GRU"
)
class DistributedGRU(OverTime):
    """A gated recurrent unit over sequences, with samples and features split: PyTorch's GRU, `batch_first`."""

    kind = DistributedGRUCell
    _carried = DistributedGRUCell._carried


@documented(
    _OVER_TIME,
    carry="(h, c)",
    gates="4",
    shapes="((2, 5, 2), (2, 5, 2))",
    source="Hochreiter and Schmidhuber (1997); PyTorch's LSTM",
)
class DistributedLSTM(OverTime):
    """A long short-term memory over sequences, with samples and features split: PyTorch's LSTM, `batch_first`."""

    kind = DistributedLSTMCell
    _carried = DistributedLSTMCell._carried


def _step(cell: RecurrentCell, plan: CellPlan, own: Params, parts: Parts, of_x: Array) -> tuple[Parts, Array]:
    """Return the carry after a step and its output, from this worker's gates of x."""
    parts = cell._next(plan, own, of_x, parts)
    return parts, parts[0]


def _of_cell(params: Mapping[str, Any], k: int) -> dict[str, Any]:
    """Return the parameters of cell k, under their names in the cell."""
    end = f"_l{k}"
    return {name.removesuffix(end): each for name, each in params.items() if name.endswith(end)}
