"""The carry of recurrent layers, and single-step cells of a GRU or an LSTM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.all_gather import plan_all_gather
from distdl_jax.functional.block_checks import outside
from distdl_jax.functional.copies import ReplicatedPlan
from distdl_jax.functional.plan import BlocksPlan, MovementPlan, ShapeDtypes
from distdl_jax.nn.base.calls import layer_call
from distdl_jax.nn.base.input_checks import real_grid
from distdl_jax.nn.base.layer import PartitionedLayer
from distdl_jax.nn.base.parameters import Params, ParamShapeDtypes, plan_replicated_params
from distdl_jax.partitions.initialization import UniformFanIn, init_block
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.tensors import TensorSpec, check_spec, zero_volume_tensor
from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges, box_shape
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.text import documented
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import World
from distdl_jax.validation import check_key, checked_dtype, checked_integer

Carry = Any
"""An array h, or for an LSTM the tuple (h, c)."""

Parts = tuple[Array, ...]
"""The arrays of a carry."""


class Recurrent(PartitionedLayer):
    """The base of layers with a carry from step to step: `y, carry = layer(params, x, carry=carry)`.

    - `_carried`: the names of the parts of a carry, all of one shape.
    """

    _carried: ClassVar[tuple[str, ...]] = ("h",)

    @abstractmethod
    def _carry_spec(self, x_spec: TensorSpec) -> TensorSpec:
        """Return the spec of each part of the carry, from the input's spec."""

    @abstractmethod
    def _advance(self, plan: Any, params: Params, x: Array, parts: Parts) -> tuple[Array, Parts]:
        """Return this worker's block of the output, and of the carry afterwards."""

    def carry_specs(self, x_spec: TensorSpec) -> Any:
        """Return the global shape and the partition of each part of the carry: a pytree like it.

        `x_spec` is the `TensorSpec` of an input. **Raises:** `InvalidArgumentError` if it is not on P_x.
        """
        check_spec(x_spec, "x_spec")
        if x_spec.replicated or (x_spec.partition.ranks, x_spec.partition.shape) != (self.P_x.ranks, self.P_x.shape):
            raise InvalidArgumentError(
                f"`x_spec` (={x_spec!r}) must be the spec of a tensor on P_x, {self.P_x.describe()}, without copies."
            )
        return self._tree((self._carry_spec(x_spec),) * len(self._carried))

    def init_carry(self, x_spec: TensorSpec, dtype: DTypeLike = jnp.float32) -> Carry:
        """Return this worker's blocks of a zero carry, for inputs of `x_spec`; zero-volume arrays outside P_x."""
        found = checked_dtype("dtype", dtype)
        specs = jax.tree.leaves(self.carry_specs(x_spec))
        blocks = (jnp.zeros(spec.local_shape, found) if spec.box else zero_volume_tensor(dtype=found) for spec in specs)
        return self._tree(tuple(blocks))

    @layer_call
    def __call__(self, params: Params, x: Array, *, carry: Carry | None = None) -> Any:
        """Apply the layer: `y, carry = layer(params, x, carry=carry)`, or `y = layer(params, x)` from a zero carry.

        **Arguments:**

        - `params`: this worker's parameters, from `init`.
        - `x`: this worker's block on P_x, which may be empty; outside P_x a zero-volume array.
        - `carry`: this worker's blocks of the carry, from `init_carry` or the previous call; zero-volume outside P_x.

        **Returns:** this worker's block of y; with `carry`, the pair of y and the new carry, in the dtypes of the old
        one; outside P_x, `x` and `carry`.

        **Raises:** `InvalidTypeError` if `carry` does not have an array for each part; `PlanError`, on every
        worker of P_x, if x, a parameter or the carry does not fit.
        """
        given = self._parts(carry)
        if not self.P_x.active:
            outside(self.P_x.world, x)
            return x if carry is None else (x, carry)
        with jax.named_scope(type(self).__name__):
            params = self._opened(params)
            entries = dict(zip(self._entries, given, strict=False))
            plan = self._agree_on_plan({**params, **entries} if isinstance(params, Mapping) else params, x)
            parts = given or tuple(tie(jnp.zeros(self._carry_shape(plan), x.dtype), x) for _ in self._carried)
            y, new = self._advance(plan, params, x, parts)
            if carry is None:
                return y
            return y, self._tree(tuple(part.astype(old.dtype) for part, old in zip(new, given, strict=True)))

    apply = __call__

    def _carry_shape(self, plan: Any) -> tuple[int, ...]:
        """Return the shape of this worker's block of each part of the carry."""
        shape: tuple[int, ...] = plan.carry[self.P_x.world.rank]
        return shape

    @property
    def _entries(self) -> tuple[str, ...]:
        """How a user writes the parts of the carry, which are also the names for exchanging their shapes."""
        several = len(self._carried) > 1
        return tuple(f"carry[{k}]" if several else "carry" for k in range(len(self._carried)))

    def _tree(self, parts: tuple[Any, ...]) -> Any:
        return parts if len(self._carried) > 1 else parts[0]

    def _parts(self, carry: Carry | None) -> Parts:
        """Return the arrays of a carry; none if there is none."""
        if carry is None:
            return ()
        parts = (carry,) if len(self._carried) == 1 else carry
        is_whole = isinstance(parts, Sequence) and len(parts) == len(self._carried)
        if not is_whole or not all(hasattr(part, "dtype") and hasattr(part, "shape") for part in parts):
            kind = "an array" if len(self._carried) == 1 else f"the arrays ({', '.join(self._carried)})"
            raise InvalidTypeError(f"`carry` (={carry!r}) must be {kind}, as returned by `init_carry`.")
        return tuple(parts)

    def _check_carry(self, params: ParamShapeDtypes, expected: Mapping[int, tuple[int, ...]]) -> None:
        """Reject carries that are not their workers' blocks, with the same message on all workers."""
        for worker in self.P_x.ranks:
            for name in self._entries:
                if (part := params[worker].get(name)) is None:
                    continue
                if part.shape != expected[worker] or not jnp.issubdtype(part.dtype, jnp.floating):
                    raise PlanError(
                        f"On worker {worker}: `{name}` must hold real floating-point numbers, "
                        f"{shape_text(expected[worker])}, for this worker's block `x`, but is "
                        f"{part.dtype}{list(part.shape)}."
                    )


@dataclass(frozen=True)
class CellPlan(BlocksPlan):
    """The plan of a step.

    - `of_params`: for each parameter, the workers that hold copies of it.
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


@dataclass(frozen=True, repr=False)
class RecurrentCell(Recurrent):
    """The base of cells: a subclass defines the number of gates, and the computation from them."""

    gates: ClassVar[int]

    P_x: Partition
    input_size: int
    hidden_size: int
    bias: bool = True

    @staticmethod
    @abstractmethod
    def _step(of_x: Array, of_h: Array, parts: Parts) -> Parts:
        """Return the carry after a step, from this worker's gates of x and of h, ... x gates x features."""

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)
        for name in ("input_size", "hidden_size"):
            checked_integer(name, getattr(self, name), 1)

    def param_specs(self) -> dict[str, TensorSpec]:
        """Return the global shape and the partition of each parameter, which is replicated."""
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
        return self._step(of_x, self._of(own, "hh", h), parts)

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


_CELL = """
| tensor | global shape | partition |
|---|---|---|
| x | n_b x ... x n_in | P_x: P_n x ... x P_f |
| $carry, the carry; y, which is h' | n_b x ... x n_h | P_x, the same blocks but for the features |
| `weight_ih`, `weight_hh` | $gates x n_h x n_in, $gates x n_h x n_h | n_h over P_f; copies along the rest of P_x |
| `bias_ih`, `bias_hh` | $gates x n_h | n_h over P_f; copies along the rest of P_x |

Each worker computes its features of all gates, $names in this order, and holds the corresponding rows of the weights,
1/P_f of all: PyTorch's $gates n_h rows are its gates, concatenated. The workers along P_f gather x and h, n_in and n_h
numbers per sample, and the gradients are reduce-scattered. The rest of the carry does not move. Gradients of the
weights are summed over the copies: in each step of a loop of your own, but only once by the layer over a whole
sequence.

Blocks of x are balanced along the features, and have any length, including 0, along the rest. In half precision
the arithmetic is in half precision, as in a linear layer.

**Arguments:**

- `P_x`: the partition of input, carry and output; of one dimension if there is no batch.
- `input_size`, `hidden_size`: n_in and n_h.
- `bias`: whether there are biases.

**Call:** `y, carry = cell(params, x, carry=carry)`, where the carry is $carry, from `cell.init_carry(x_spec)` or the
previous call, as `jax.lax.scan` expects. `y = cell(params, x)` is a step from zeros.

**Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; a call raises
`PlanError`, on every worker of P_x, if x, a parameter or the carry does not fit.

>>> import jax, distdl_jax as dj
>>> P = dj.Partition().grid([1, 1])
>>> cell = $name(P, input_size=3, hidden_size=2)
>>> params, carry = cell.init(jax.random.key(0)), cell.init_carry(dj.TensorSpec((5, 3), P))
>>> def step(carry, x):
...     y, carry = cell(params, x, carry=carry)
...     return carry, y
>>> carry, ys = jax.lax.scan(step, carry, jax.numpy.ones((7, 5, 3)))
>>> jax.tree.map(jax.numpy.shape, carry), ys.shape
($shapes, (7, 5, 2))

Source: $source.
"""


@documented(
    _CELL,
    carry="h",
    gates="3",
    names="r, z and n",
    shapes="(5, 2)",
    source="Cho et al. (2014), arXiv:1406.1078; PyTorch's GRUCell",
)
class DistributedGRUCell(RecurrentCell):
    """One step of a gated recurrent unit, with samples and features split: PyTorch's GRUCell.

        r = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
        z = sigmoid(W_iz x + b_iz + W_hz h + b_hz)
        n = tanh(W_in x + b_in + r (W_hn h + b_hn))

    and h' = (1 - z) n + z h.
    """

    gates = 3

    @staticmethod
    def _step(of_x: Array, of_h: Array, parts: Parts) -> Parts:
        (h,) = parts
        r, z = (jax.nn.sigmoid(of_x[..., k, :] + of_h[..., k, :]) for k in (0, 1))
        n = jnp.tanh(of_x[..., 2, :] + r * of_h[..., 2, :])
        return ((1 - z) * n + z * h,)


@documented(
    _CELL,
    carry="(h, c)",
    gates="4",
    names="i, f, g and o",
    shapes="((5, 2), (5, 2))",
    source="Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000); PyTorch's LSTMCell",
)
class DistributedLSTMCell(RecurrentCell):
    """One step of a long short-term memory, with samples and features split: PyTorch's LSTMCell.

        i, f, o = sigmoid(W_i x + b_i + W_h h + b_h) of their rows; g = tanh of the same for its rows
        c' = f c + i g

    and h' = o tanh(c').
    """

    _carried = ("h", "c")
    gates = 4

    @staticmethod
    def _step(of_x: Array, of_h: Array, parts: Parts) -> Parts:
        return lstm_step(*(of_x[..., k, :] + of_h[..., k, :] for k in range(4)), c=parts[1])


def lstm_step(i: Array, f: Array, g: Array, o: Array, *, c: Array) -> Parts:
    """Return h and c after a step of an LSTM, from the inputs of its gates."""
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c
