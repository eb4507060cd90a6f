"""Recurrent cells with the batch and the features split: one step of a GRU or an LSTM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.functional.all_gather import plan_all_gather
from distdl_jax.functional.all_sum_reduce import ReplicatedPlan
from distdl_jax.functional.plan import BlocksPlan, MovementPlan, ShapeDtypes
from distdl_jax.nn.base.input_checks import real_grid
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes, plan_replicated_params
from distdl_jax.nn.recurrent.carry import Parts, Recurrent
from distdl_jax.partitions.initialization import UniformFanIn, init_block
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges, box_shape
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.world import World
from distdl_jax.validation import check_key, checked_integer


@dataclass(frozen=True)
class CellPlan(BlocksPlan):
    """The plan of a step.

    - `of_params`: for each parameter, which workers hold copies of it.
    - `gather_x`, `gather_h`: how each worker gets all features of x and of h.
    - `dtype`: of the arithmetic, and of the output.
    - `carry`: the shape of each part of the carry, by world rank.
    """

    of_params: Mapping[str, ReplicatedPlan] = field(hash=False)
    gather_x: MovementPlan
    gather_h: MovementPlan
    dtype: np.dtype
    carry: Mapping[int, tuple[int, ...]] = field(hash=False)

    def own(self, world: World, params: Params) -> Params:
        """Return this worker's copies of the parameters."""
        return {name: plan.run(world, params[name]).astype(self.dtype) for name, plan in self.of_params.items()}


class RecurrentCell(Recurrent):
    """The base of cells: a subclass says how many gates there are, and what is computed from them."""

    gates: ClassVar[int]

    P_x: Partition
    input_size: int
    hidden_size: int
    bias: bool

    @staticmethod
    @abstractmethod
    def step(of_x: Array, of_h: Array, parts: Parts) -> Parts:
        """Return the carry after a step, from this worker's gates of x and of h, ... x gates x features."""

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)
        for name in ("input_size", "hidden_size"):
            checked_integer(name, getattr(self, name), 1)

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each parameter, of which workers hold copies."""
        *lead, p_f = self.P_x.shape
        copies, g, n_h = tuple(range(len(lead))), self.gates, self.hidden_size
        of_weight, of_bias = (
            self.P_x.create_cartesian_topology_partition([*lead, 1, p_f, *rest]) for rest in ((1,), ())
        )
        shapes = {"weight_ih": (g, n_h, self.input_size), "weight_hh": (g, n_h, n_h)}
        specs = {name: TensorSpec(shape, of_weight, copies) for name, shape in shapes.items()}
        if self.bias:
            specs |= dict.fromkeys(("bias_ih", "bias_hh"), TensorSpec((g, n_h), of_bias, copies))
        return specs

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """Return this worker's blocks of the initial parameters: uniform in ±1/sqrt(hidden_size), as in PyTorch."""
        check_key("key", key)
        specs, uniform = self.param_specs(), UniformFanIn(self.hidden_size)
        keys = jax.random.split(key, len(specs))
        return {name: init_block(uniform, k, spec, dtype) for k, (name, spec) in zip(keys, specs.items(), strict=True)}

    def _carry_spec(self, x_spec: TensorSpec) -> TensorSpec:
        return TensorSpec((*x_spec.global_shape[:-1], self.hidden_size), self.P_x)

    def _plan(self, x: ShapeDtypes, params: ParamShapeDtypes) -> CellPlan:
        last = self.P_x.dim - 1
        grid, dtype = real_grid("x", x, self.P_x, {last: self.input_size})
        of_params = plan_replicated_params(params, self.param_specs())
        for plan in of_params.values():
            dtype = np.dtype(jnp.promote_types(dtype, plan.inputs[self.P_x.ranks[0]].dtype))
        of_y = ProductGrid(grid.ranks, (*grid.ranges[:-1], balanced_ranges(self.hidden_size, self.P_x.shape[-1])))
        carry = {worker: box_shape(of_y.box(of_y.cell_of[worker])) for worker in grid.ranks}
        self._check_carry(params, carry)
        blocks = {worker: ShapeDtype(carry[worker], dtype) for worker in sorted(carry)}
        copies = {worker: ShapeDtype(block.shape, dtype) for worker, block in x.items()}
        gather_x, gather_h = (plan_all_gather(each, self.P_x, last) for each in (copies, blocks))
        return CellPlan(blocks, of_params, gather_x, gather_h, dtype, carry)

    def _advance(self, plan: CellPlan, params: Params, x: Array, parts: Parts) -> tuple[Array, Parts]:
        world, own = self.P_x.world, plan.own(self.P_x.world, params)
        of_x = self._of(own, "ih", plan.gather_x.run(world, x.astype(plan.dtype)))
        parts = self._next(plan, own, of_x, tuple(part.astype(plan.dtype) for part in parts))
        return parts[0], parts

    def _next(self, plan: CellPlan, own: Params, of_x: Array, parts: Parts) -> Parts:
        """Return the carry after a step, from this worker's gates of x."""
        h = plan.gather_h.run(self.P_x.world, parts[0])
        return self.step(of_x, self._of(own, "hh", h), parts)

    def _of(self, own: Params, kind: str, x: Array) -> Array:
        """Return this worker's gates of x, or of h: ... x gates x features."""
        weight = own[f"weight_{kind}"]
        g, rows, columns = weight.shape
        y = lax.dot_general(x, weight.reshape(g * rows, columns), (((x.ndim - 1,), (1,)), ((), ())))
        y = tie(y.reshape(*x.shape[:-1], g, rows), x, weight)
        return y + own[f"bias_{kind}"] if self.bias else y

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.input_size} -> {self.hidden_size}, bias={self.bias}, "
            f"P_x {shape_text(self.P_x.shape)})"
        )


@dataclass(frozen=True, repr=False)
class DistributedGRUCell(RecurrentCell):
    r"""One step of a gated recurrent unit, whose samples and features are split: PyTorch's GRUCell.

        r = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
        z = sigmoid(W_iz x + b_iz + W_hz h + b_hz)
        n = tanh(W_in x + b_in + r (W_hn h + b_hn))
        h' = (1 - z) n + z h

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x ... x n_in | P_x: P_n x ... x P_f |
    | h, the carry; y, which is h' | n_b x ... x n_h | P_x, the same blocks but for the features |
    | `weight_ih`, `weight_hh` | 3 x n_h x n_in, 3 x n_h x n_h | n_h over P_f; copies along the rest of P_x |
    | `bias_ih`, `bias_hh` | 3 x n_h | n_h over P_f; copies along the rest of P_x |

    Each worker computes its features of all gates, r, z and n, and holds the rows of the weights for them, 1/P_f of
    all: PyTorch's 3 n_h rows are its gates one after the other. For that the workers along P_f gather x and h, n_in and
    n_h numbers per sample, and each sums what comes back for its own ones (a reduce-scatter). The new carry does not
    move. Gradients of the weights are summed over the copies: in a loop of your own in each step, in
    `DistributedGRU` once.

    Blocks of x are balanced along the features, and of any length, also 0, along the rest. In half precision the
    arithmetic is in half precision, as in a linear layer.

    **Arguments:**

    - `P_x`: the partition of input, carry and output; of one dimension where there is no batch.
    - `input_size`, `hidden_size`: n_in and n_h.
    - `bias`: whether there are biases.

    **Call:** `y, carry = cell(params, x, carry=carry)`, where the carry is h, from `cell.init_carry(x_spec)` or the
    last call; so it goes through `jax.lax.scan`. `y = cell(params, x)` is a step from zeros.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit; a call raises
    `PlanError`, on every worker of P_x, where x, a parameter or the carry does not fit.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> cell = DistributedGRUCell(P, input_size=3, hidden_size=2)
    >>> params, h = cell.init(jax.random.key(0)), cell.init_carry(dj.TensorSpec((5, 3), P))
    >>> def step(h, x):
    ...     y, h = cell(params, x, carry=h)
    ...     return h, y
    >>> h, ys = jax.lax.scan(step, h, jax.numpy.ones((7, 5, 3)))
    >>> h.shape, ys.shape
    ((5, 2), (7, 5, 2))

    Source: Cho et al. (2014), arXiv:1406.1078; PyTorch's GRUCell.
    """

    gates = 3

    P_x: Partition
    input_size: int
    hidden_size: int
    bias: bool = True

    @staticmethod
    def step(of_x: Array, of_h: Array, parts: Parts) -> Parts:
        (h,) = parts
        r, z = (jax.nn.sigmoid(of_x[..., k, :] + of_h[..., k, :]) for k in (0, 1))
        n = jnp.tanh(of_x[..., 2, :] + r * of_h[..., 2, :])
        return ((1 - z) * n + z * h,)


@dataclass(frozen=True, repr=False)
class DistributedLSTMCell(RecurrentCell):
    """One step of a long short-term memory, whose samples and features are split: PyTorch's LSTMCell.

        i, f, o = sigmoid(W_i x + b_i + W_h h + b_h) of their rows; g = tanh(the same) of its own
        c' = f c + i g
        h' = o tanh(c')

    Partitions and movements are `DistributedGRUCell`'s, with four gates, i, f, g and o in this order, and weights of
    4 x n_h x n_in and 4 x n_h x n_h. The carry is the tuple (h, c), both n_b x ... x n_h on P_x; y is h'. Of the two h
    alone is gathered.

    **Arguments:**

    - `P_x`: the partition of input, carry and output, P_n x ... x P_f; of one dimension where there is no batch.
    - `input_size`, `hidden_size`: n_in and n_h.
    - `bias`: whether there are biases.

    **Call:** `y, carry = cell(params, x, carry=carry)`, where the carry is (h, c), from `cell.init_carry(x_spec)` or
    the last call; so it goes through `jax.lax.scan`. `y = cell(params, x)` is a step from zeros.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit; a call raises
    `PlanError`, on every worker of P_x, where x, a parameter or the carry does not fit.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> cell = DistributedLSTMCell(P, input_size=3, hidden_size=2)
    >>> params, carry = cell.init(jax.random.key(0)), cell.init_carry(dj.TensorSpec((5, 3), P))
    >>> y, (h, c) = cell(params, jax.numpy.ones((5, 3)), carry=carry)
    >>> y.shape, c.shape
    ((5, 2), (5, 2))

    Source: Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000); PyTorch's LSTMCell.
    """

    carried = ("h", "c")
    gates = 4

    P_x: Partition
    input_size: int
    hidden_size: int
    bias: bool = True

    @staticmethod
    def step(of_x: Array, of_h: Array, parts: Parts) -> Parts:
        return lstm_step(*(of_x[..., k, :] + of_h[..., k, :] for k in range(4)), c=parts[1])


def lstm_step(i: Array, f: Array, g: Array, o: Array, *, c: Array) -> Parts:
    """Return h and c after a step of an LSTM, from what goes into its gates."""
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c
