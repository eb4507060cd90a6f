"""Residual and skip connections: the output of layers is added to, or concatenated with, their input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.distribute.inner import ON_BLOCKS
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.plan import BlocksPlan, Plan, ShapeDtypes
from distdl_jax.nn.base.layer import Ends, Layer, ends_of
from distdl_jax.nn.networks.function_runs import function_runs, team_of
from distdl_jax.nn.networks.layer_compatibility import in_equal_blocks, rearranged
from distdl_jax.nn.networks.network import Network, RunPart, last_partition, params_of_part
from distdl_jax.nn.shape.concatenate import Concatenate, ConcatenationPlan
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.alike import derived, representatives, workers_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.plans.worker_ranks import union
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.scopes import place_of_errors
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import exchange_named_shapes, shape_dtype_of

WAYS = ("body", "shortcut")
Join = Literal["concatenate", "add"]
Params = dict[str, Any]


@dataclass(frozen=True)
class ResidualPlan(BlocksPlan):
    """The plans of both branches, None for an identity shortcut, and all workers' blocks of the sum."""

    body: Plan
    shortcut: Plan | None


@dataclass(frozen=True)
class Residual(Network):
    """y = body(x) + shortcut(x): the block of residual networks. Only the two branches communicate.

    Both must leave their output in the same blocks on the same workers. The parameters, and the state, are a
    dictionary: {"body": the body's, "shortcut": the shortcut's, or {} for the identity}.

    **Arguments:**

    - `body`: a layer, or an `nn.Sequential` for several; with or without a state or random numbers.
    - `shortcut`: another layer, for instance a convolution with a kernel of 1 if the body changes x's shape, or a
      `Repartition` if it changes x's partition. Default: the identity.

    It is called like `nn.Sequential`: `y = block(params, x)`, or `y, state = block(params, x, state=state,
    training=True)`; `key` is split among the two.

    **Raises:** `InvalidTypeError`, on every worker, if `body` or `shortcut` is not a layer; `InvalidArgumentError` if
    the two leave their outputs on different partitions, or take x in different blocks of the same workers; when
    applied, `PlanError` if the outputs have different shapes.

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
            return  # only functions
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
        """The body, and the shortcut if there is one."""
        return (self.body,) if self.shortcut is None else (self.body, self.shortcut)

    @property
    def output_partition(self) -> Partition | None:
        """The partition of the output, the body's; None if there are only functions."""
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
        """Plan the layer for all workers' blocks: without communication, with the same result on every worker.

        **Raises:** `PlanError` if x or a parameter does not fit, or the two outputs have different shapes.
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
        def way(name: str, layer: Any) -> Array:
            if layer is None:
                return x
            functions = function_runs([(name, layer)], self.input_partition).get(name)  # alone: P_x is known here
            y = ON_BLOCKS if functions is None else functions(x, team_of(self.layers))
            return run(name, layer, x) if y is ON_BLOCKS else y

        with jax.named_scope("Residual"):
            return self._sum(*(way(name, layer) for name, layer in self._parts))

    def _sum(self, y: Array, other: Array) -> Array:
        P = self.output_partition
        if trace_context.whole_program:
            return y + other
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


@dataclass(frozen=True)
class SkipPlan(BlocksPlan):
    """The plan of the body and of the concatenation (None for a sum), and all workers' blocks of the output."""

    body: Plan
    join: ConcatenationPlan | None


@dataclass(frozen=True)
class Skip(Network):
    """y = x combined with body(x), along a dimension that may be split: the skip of a U-Net, as a layer of an
    `nn.Sequential`.

        concatenate(x, body(x)), or with "add" x + body(x)

    The body must leave its output in x's blocks, except for their length along `axis`. Only the body communicates, and
    the concatenation along a split dimension. The parameters, and the state, are a dictionary: {"body": the body's}.

    **Arguments:**

    - `body`: a layer, or an `nn.Sequential` for several; with or without a state or random numbers.
    - `join`: "concatenate", or "add", which is `nn.Residual`'s sum.
    - `axis`: the dimension to concatenate along. Default: the channels.

    It is called like `nn.Sequential`: `y = skip(params, x)`, or `y, state = skip(params, x, state=state,
    training=True)`.

    **Raises:** `InvalidTypeError`, on every worker, if the body is not a layer; `InvalidArgumentError` for another
    `join`, a dimension that x doesn't have, or a body whose output is on another partition than its input, or that has
    none; when applied, `PlanError` if the blocks don't fit.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> conv = dj.nn.DistributedConv1d(P, in_channels=2, out_channels=3, kernel_size=3, padding=1)
    >>> network = dj.nn.Sequential(Skip(dj.nn.Sequential(conv, jax.nn.relu)), jax.nn.relu)
    >>> network(network.init(jax.random.key(0)), jax.numpy.ones((1, 2, 8))).shape
    (1, 5, 8)

    Source: Ronneberger et al. (2015), arXiv:1505.04597.
    """

    body: Any
    join: Join = "concatenate"
    axis: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.body, Layer):
            raise InvalidTypeError(
                f"`body` (={self.body!r}) must be a layer; functions go into an nn.Sequential with layers."
            )
        if self.join not in get_args(Join):
            joins = ", ".join(map(repr, get_args(Join)))
            raise InvalidArgumentError(f"`join` (={self.join!r}) must be one of {joins}.")
        P_x, P_y = self.input_partition, last_partition((self.body,))
        if P_x is None or P_y is None:
            raise InvalidArgumentError("`body` must have a layer with a partition: a function alone has none.")
        if not in_equal_blocks(P_x, P_y):
            raise InvalidArgumentError(
                f"`body` takes its input from {P_x.describe()}, but leaves its output on {P_y.describe()}: both must "
                "be on the same workers, in the same blocks; a `Repartition` at its end moves it."
            )
        if self.join == "concatenate":
            Concatenate(P_x, self.axis)

    @property
    def _computes(self) -> str:
        return "sum" if self.join == "add" else "concatenation"

    @property
    def layers(self) -> tuple[Any, ...]:
        """The body only."""
        return (self.body,)

    @property
    def _parts(self) -> tuple[tuple[str, Any], ...]:
        return (("body", self.body),)

    @property
    def _ends(self) -> Ends:
        return ends_of(self.body)

    def _pack(self, entries: Iterable[Any]) -> Params:
        return dict(zip(("body",), entries, strict=True))

    @property
    def _partition(self) -> Partition:
        assert self.input_partition is not None
        return self.input_partition

    def plan(self, x: ShapeDtypes, params: Mapping[int, Params] | None = None) -> SkipPlan:
        """Plan the blocks of the output: without a message, and the same on every worker.

        **Raises:** `PlanError` if x or a parameter does not fit, or the outputs don't match.
        """
        if self.join == "add":
            of_sum = Residual(self.body).plan(x, params)
            return SkipPlan(of_sum.outputs, of_sum.body, None)
        with place_of_errors("body", self.body):
            body = self.body.plan(x, params_of_part(params, "body"))
        join = Concatenate(self._partition, self.axis).plan([x, body.after(x)])
        return SkipPlan({**x, **join.outputs}, body, join)

    def _forward(self, run: RunPart, x: Array) -> Array:
        with jax.named_scope("Skip"):
            y = run("body", self.body, x)
            if self.join == "add":
                return Residual(self.body)._sum(y, x)
            if trace_context.whole_program:
                return jnp.concatenate([x, y], self.axis)
            return Concatenate(self._partition, self.axis)(x, y)


def _check_shapes(outputs: Mapping[int, tuple[ShapeDtype, ShapeDtype]]) -> None:
    for worker in sorted(representatives(outputs)):
        y, other = outputs[worker]
        if y.shape != other.shape:
            raise PlanError(
                f"On worker {worker}: the outputs of `body` ({shape_text(y.shape)}) and `shortcut` "
                f"({shape_text(other.shape)}) must have the same shape for a sum."
            )
