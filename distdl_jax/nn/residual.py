"""The block of residual networks: the output of layers and their input, added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.agreement.shapes import exchange_named_shapes, shape_dtype_of
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.layer.layer import Ends, Layer, ends_of
from distdl_jax.nn.layer_compatibility import function_runs, in_equal_blocks, rearranged, team_of
from distdl_jax.nn.network import Network, RunPart, last_partition, params_of_part
from distdl_jax.partition import Partition
from distdl_jax.plans.alike import derived, representatives, workers_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.plans.worker_ranks import union
from distdl_jax.primitives.plan import BlocksPlan, Plan, ShapeDtypes
from distdl_jax.tracing.scopes import place_of_errors
from distdl_jax.tracing.tie import tie

WAYS = ("body", "shortcut")
Params = dict[str, Any]


@dataclass(frozen=True)
class ResidualPlan(BlocksPlan):
    """The plans of the two ways, None where the shortcut is x as it is, and all workers' blocks of the sum."""

    body: Plan
    shortcut: Plan | None


@dataclass(frozen=True)
class Residual(Network):
    """y = body(x) + shortcut(x): the block of residual networks. Nothing moves but what the two move.

    Both have to leave their output in the same blocks on the same workers. The parameters, and the state, are a
    dictionary: {"body": the body's, "shortcut": the shortcut's, {} where it is x}.

    **Arguments:**

    - `body`: a layer, for several an `nn.Sequential`; with a state or random numbers, or without.
    - `shortcut`: another one, a convolution with a kernel of 1, say, where the body changes x's shape, or a
      `Repartition` where it changes x's partition. Default: none, x as it is.

    It is called as `nn.Sequential` is: `y = block(params, x)`, or `y, state = block(params, x, state=state,
    training=True)`; `key` is split among the two.

    **Raises:** `InvalidTypeError`, on every worker, for what is no layer; `InvalidArgumentError` where the two leave
    their outputs on different partitions, or take x in other blocks of the same workers; when applied, `PlanError`
    where the outputs have different shapes.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> block = Residual(dj.nn.Sequential(dj.nn.DistributedLinear(P, P, P, 3, 3), jax.nn.relu))
    >>> block(block.init(jax.random.key(0)), jax.numpy.ones((5, 3))).shape
    (5, 3)

    Source: He et al. (2015), arXiv:1512.03385.
    """

    body: Any
    shortcut: Any = None

    def __post_init__(self) -> None:
        for name, layer in zip(WAYS, (self.body, self.shortcut), strict=True):
            if not isinstance(layer, Layer) and (name == "body" or layer is not None):
                raise InvalidTypeError(
                    f"`{name}` (={layer!r}) must be a layer{', or None' * (name != 'body')}; functions go into an "
                    "nn.Sequential."
                )
        if (P_x := self.input_partition) is None:
            return  # nothing but functions
        inputs = [P for layer in self.layers if (P := ends_of(layer).P_x) is not None]
        if len(inputs) > 1 and rearranged(*inputs):
            raise InvalidArgumentError(
                f"`body` takes its input from {inputs[0].describe()}, but `shortcut` from {inputs[1].describe()}: both "
                "must take it from the same workers, in the same blocks."
            )
        P, other = (last_partition((layer,)) or P_x for layer in (self.body, self.shortcut))
        if not in_equal_blocks(P, other):
            raise InvalidArgumentError(
                f"`body` leaves its output on {P.describe()}, but `shortcut` on {other.describe()}: both must leave it "
                "on the same workers, in the same blocks; a `Repartition` as the shortcut, or at its end, moves it."
            )

    @property
    def _computes(self) -> str:
        return "sum"

    @property
    def layers(self) -> tuple[Any, ...]:
        """The body, and the shortcut where there is one."""
        return (self.body,) if self.shortcut is None else (self.body, self.shortcut)

    @property
    def output_partition(self) -> Partition | None:
        """The partition of the output, the body's; None where there are only functions."""
        return last_partition((self.body,)) or last_partition((self.shortcut,)) or self.input_partition

    @property
    def _ends(self) -> Ends:
        ways = [ends_of(layer) for layer in self.layers]
        return Ends(*(next((ends[k] for ends in ways if ends[k] is not None), None) for k in (0, 1)))

    @property
    def _parts(self) -> tuple[tuple[str, Any], ...]:
        return tuple(zip(WAYS, (self.body, self.shortcut), strict=True))

    def _pack(self, entries: Iterable[Any]) -> Params:
        return dict(zip(WAYS, entries, strict=True))

    def plan(self, x: ShapeDtypes, params: Mapping[int, Params] | None = None) -> ResidualPlan:
        """Plan what becomes of all workers' blocks: without a message, and the same on every worker.

        **Raises:** `PlanError` where x or a parameter does not fit, or the two outputs have different shapes.
        """
        plans = dict[str, Plan]()
        for name, layer in self._parts:
            if layer is not None:
                with place_of_errors(name, layer):
                    plans[name] = layer.plan(x, params_of_part(params, name))
        y, other = (plans[name].after(x) if name in plans else x for name in WAYS)
        added = workers_of(x) if self.output_partition is None else union(self.output_partition.ranks)
        is_all = added == workers_of(y)
        both = derived(lambda worker: (y[worker], other[worker]), y if is_all else dict.fromkeys(added), other)
        _check_shapes(both)

        def total(worker: int) -> ShapeDtype:
            of_y, of_other = both.get(worker, (y[worker], y[worker]))
            return ShapeDtype(of_y.shape, np.dtype(jnp.promote_types(of_y.dtype, of_other.dtype)))

        blocks = derived(total, both if is_all else y)
        return ResidualPlan(blocks, plans["body"], plans.get("shortcut"))

    def _forward(self, run: RunPart, x: Array) -> Array:
        for layer in self.layers:  # of functions alone: their partition is known here
            for functions in function_runs((layer,), self.input_partition).values():
                functions.check(x, team_of(self.layers))
        with jax.named_scope("Residual"):
            return self._sum(*(x if layer is None else run(name, layer, x) for name, layer in self._parts))

    def _sum(self, y: Array, other: Array) -> Array:
        P = self.output_partition
        if P is not None and P.rank is None:
            return tie(y, other)
        names = "body(x)", "shortcut(x)"
        if P is None:
            _check_shapes({0: (shape_dtype_of(names[0], y), shape_dtype_of(names[1], other))})
        else:
            label = f"sum of two outputs on {P.describe()}"
            arrays = dict(zip(names, (y, other), strict=True))
            shapes = exchange_named_shapes(P.world, tuple(sorted(P.ranks)), label, arrays)
            _check_shapes({worker: (pair[names[0]], pair[names[1]]) for worker, pair in shapes.items()})
        return y + other


def _check_shapes(outputs: Mapping[int, tuple[ShapeDtype, ShapeDtype]]) -> None:
    for worker in sorted(representatives(outputs)):
        y, other = outputs[worker]
        if y.shape != other.shape:
            raise PlanError(
                f"On worker {worker}: the outputs of `body` ({shape_text(y.shape)}) and `shortcut` "
                f"({shape_text(other.shape)}) must have the same shape, to be added."
            )
